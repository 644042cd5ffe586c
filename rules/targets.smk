"""This part of the workflow names what can be asked for.

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
        [f"results/data/{name}/manifest.json" for name in BY_DATA],


rule base:
    """The base model."""
    input:
        [
            f"results/data/{run.data_name}/manifest.json"
            for run in BY_DATA.values()
            if run.is_preset
        ],
        of_runs("base/manifest.json"),


rule cache:
    """Latents and text embeddings, or tokens."""
    input:
        rules.dataset.input,
        rules.base.input,
        caches(),


rule launch:
    """The launch files of every phase."""
    input:
        rules.dataset.input,
        of_runs("{phase}/launch/manifest.json"),


rule checkpoints:
    """The trained checkpoint of every phase."""
    input:
        rules.cache.input,
        rules.launch.input,
        of_runs("{phase}/state/manifest.json", phases=slice(-1)),
        of_runs("{phase}/checkpoint/manifest.json"),


rule weights:
    """Weights and state of every phase."""
    input:
        rules.checkpoints.input,
        of_runs("{phase}/weights/manifest.json", "{phase}/state/manifest.json"),


rule evaluation:
    """Grid, loss curve and metrics of every phase."""
    input:
        rules.weights.input,
        of_runs("{phase}/evaluation/manifest.json", "{phase}/metrics.json"),


rule train:
    """Every phase trained, exported, evaluated and reported."""
    input:
        rules.evaluation.input,
        of_runs("report/manifest.json"),
