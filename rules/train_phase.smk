"""This part of the workflow trains.

OUTPUTS: results/<run>/<phase>/checkpoint/manifest.json
The rolling checkpoints in progress/ are declared by no rule: they outlive a failure. All that is set
for a phase reaches it through launch/.
"""


rule train_phase:
    """Training phase {wildcards.phase}, from the state of the phase before it."""
    input:
        settings=f"{RESULTS}/{{phase}}/settings/train_phase.json",
        launch=f"{RESULTS}/{{phase}}/launch/manifest.json",
        base=f"{RESULTS}/base/manifest.json",
        cache=INPUTS.manifests("train_phase", "cache"),
        start=INPUTS.manifests("train_phase", "start"),
    output:
        manifest=report(
            f"{RESULTS}/{{phase}}/checkpoint/manifest.json",
            caption="captions/checkpoint.rst",
            category="Training",
            labels={"phase": "{phase}"},
        ),
    log:
        f"{RESULTS}/logs/train_phase.{{phase}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/train_phase.{{phase}}.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: RESOURCES.phase_threads
    resources:
        **RESOURCES.memory("train_phase"),
        # The same at each attempt, which resumes where the one before was stopped.
        runtime=1440,
        gres=RESOURCES.phase_gres,
        nodes=RESOURCES.machines,
        # A launcher on each machine, which starts the processes of that machine.
        tasks=RESOURCES.machines,
        # Else Slurm would be asked for these tasks on each GPU.
        tasks_per_gpu=RESOURCES.multi_node(0),
        mpi=RESOURCES.multi_node("srun"),
    params:
        with_start=option("--start", "start"),
        progress=f"{RESULTS}/{{phase}}/progress",
    shell:
        """
        exec zerotrain --log {log:q} train_phase \
            --settings {input.settings:q} \
            --launch {input.launch:q} \
            --base {input.base:q} \
            --cache {input.cache:q} \
            --progress {params.progress:q} \
            --output {output.manifest:q} {params.with_start}
        """
