"""This part of the workflow names what can be asked for.

OUTPUTS: none of its own. Every artifact is named, not only the last ones: Snakemake records a failed
job as finished, and a target that names the job's output makes it run again.
"""

PHASES = [phase.name for phase in RUN.phases]
RESOLUTIONS = sorted({phase.train.resolution for phase in RUN.phases})


localrules:
    train,
    dataset,
    base,
    cache,
    launch,
    checkpoints,
    weights,
    evaluation,


rule train:
    """Every phase trained, exported, evaluated and reported."""
    input:
        f"{DATA}/manifest.json",
        f"{RESULTS}/base/manifest.json",
        expand(f"{DATA}/cache/{{pixels}}/manifest.json", pixels=RESOLUTIONS),
        expand(
            f"{RESULTS}/{{phase}}/{{artifact}}/manifest.json",
            phase=PHASES,
            artifact=["launch", "checkpoint", "weights", "state", "evaluation"],
        ),
        expand(f"{RESULTS}/{{phase}}/metrics.json", phase=PHASES),
        f"{RESULTS}/report/manifest.json",


rule dataset:
    """The checked list of samples."""
    input:
        f"{DATA}/manifest.json",


rule base:
    """The base model."""
    input:
        f"{RESULTS}/base/manifest.json",


rule cache:
    """Latents and text embeddings."""
    input:
        expand(f"{DATA}/cache/{{pixels}}/manifest.json", pixels=RESOLUTIONS),


rule launch:
    """The launch files of every phase."""
    input:
        expand(f"{RESULTS}/{{phase}}/launch/manifest.json", phase=PHASES),


rule checkpoints:
    """The trained checkpoint of every phase."""
    input:
        expand(f"{RESULTS}/{{phase}}/checkpoint/manifest.json", phase=PHASES),


rule weights:
    """Weights and state of every phase."""
    input:
        expand(
            f"{RESULTS}/{{phase}}/{{artifact}}/manifest.json",
            phase=PHASES,
            artifact=["weights", "state"],
        ),


rule evaluation:
    """Grid, loss curve and metrics of every phase."""
    input:
        expand(f"{RESULTS}/{{phase}}/evaluation/manifest.json", phase=PHASES),
        expand(f"{RESULTS}/{{phase}}/metrics.json", phase=PHASES),
