"""This part of the workflow names the targets.

OUTPUTS: none of its own. Each target names every artifact on the way to it, not only the last ones:
Snakemake records a failed job as finished, and only a target that names its output makes it run again.
"""


localrules:
    train,
    dataset,
    base,
    cache,
    launch,
    checkpoints,
    weights,
    evaluation,


rule dataset:
    """The checked list of samples."""
    input:
        INPUTS.datasets(),


rule base:
    """The base model."""
    input:
        INPUTS.datasets(of_presets=True),
        INPUTS.of_runs("base/manifest.json"),


rule cache:
    """Latents and text embeddings, or tokens."""
    input:
        rules.dataset.input,
        rules.base.input,
        INPUTS.caches(),


rule launch:
    """The launch files of every phase."""
    input:
        rules.dataset.input,
        INPUTS.of_runs("{phase}/launch/manifest.json"),


rule checkpoints:
    """The trained checkpoint of every phase."""
    input:
        rules.cache.input,
        rules.launch.input,
        INPUTS.of_runs("{phase}/state/manifest.json", phases=slice(-1)),
        INPUTS.of_runs("{phase}/checkpoint/manifest.json"),


rule weights:
    """Weights and state of every phase."""
    input:
        rules.checkpoints.input,
        INPUTS.of_runs("{phase}/weights/manifest.json", "{phase}/state/manifest.json"),


rule evaluation:
    """Grid, loss curve and metrics of every phase."""
    input:
        rules.weights.input,
        INPUTS.of_runs("{phase}/evaluation/manifest.json", "{phase}/metrics.json"),


rule train:
    """Every phase trained, exported, evaluated and reported."""
    input:
        rules.evaluation.input,
        INPUTS.of_runs("report/manifest.json"),
