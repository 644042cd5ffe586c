"""This part of the workflow names what can be asked for.

OUTPUTS: none of its own. Each target names every artifact on the way to it, not only the last ones:
Snakemake records a failed job as finished, and only a target that names its output makes it run again.
"""

PHASES = [phase.name for phase in RUN.phases]
SIZES = sorted({RUN.cache_size(phase) for phase in RUN.phases})


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
        f"{DATA}/manifest.json",


rule base:
    """The base model."""
    input:
        base_dataset(),
        f"{RESULTS}/base/manifest.json",


rule cache:
    """Latents and text embeddings, or tokens."""
    input:
        rules.dataset.input,
        rules.base.input,
        expand(f"{DATA}/cache/{{size}}/manifest.json", size=SIZES),


rule launch:
    """The launch files of every phase."""
    input:
        rules.dataset.input,
        expand(f"{RESULTS}/{{phase}}/launch/manifest.json", phase=PHASES),


rule checkpoints:
    """The trained checkpoint of every phase."""
    input:
        rules.cache.input,
        rules.launch.input,
        expand(f"{RESULTS}/{{phase}}/state/manifest.json", phase=PHASES[:-1]),
        expand(f"{RESULTS}/{{phase}}/checkpoint/manifest.json", phase=PHASES),


rule weights:
    """Weights and state of every phase."""
    input:
        rules.checkpoints.input,
        expand(
            f"{RESULTS}/{{phase}}/{{artifact}}/manifest.json",
            phase=PHASES,
            artifact=["weights", "state"],
        ),


rule evaluation:
    """Grid, loss curve and metrics of every phase."""
    input:
        rules.weights.input,
        expand(f"{RESULTS}/{{phase}}/evaluation/manifest.json", phase=PHASES),
        expand(f"{RESULTS}/{{phase}}/metrics.json", phase=PHASES),


rule train:
    """Every phase trained, exported, evaluated and reported."""
    input:
        rules.evaluation.input,
        f"{RESULTS}/report/manifest.json",
