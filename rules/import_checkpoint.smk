"""This part of the workflow lets a run go on from a checkpoint of elsewhere.

OUTPUTS: results/<run>/imported/state/manifest.json, where resume_from_checkpoint names one
"""


rule import_checkpoint:
    """Turning a checkpoint of elsewhere into the state that the run begins with."""
    input:
        checkpoint=elsewhere_files,
        base=f"{RESULTS}/base/manifest.json",
        code=code("import_checkpoint", FAMILY),
    output:
        state=f"{RESULTS}/imported/state/manifest.json",
    log:
        f"{RESULTS}/logs/import_checkpoint.log",
    benchmark:
        f"{RESULTS}/benchmarks/import_checkpoint.tsv"
    conda:
        "../envs/zerotrain.yaml"
    params:
        config_file=config_file,
        folder=RUN.resume_from_checkpoint,
        lora=RUN.model_dump(mode="json")["lora"],
        peft=RUN.peft,
        frozen_parameters=RUN.frozen_parameters,
        trainable_parameters=RUN.trainable_parameters,
        seed=RUN.seed,
        batch=RUN.phases[0].train.global_batch_size,
    shell:
        """
        zerotrain --log {log:q} import_checkpoint \
            --config {params.config_file:q} \
            --checkpoint {params.folder:q} \
            --base {input.base:q} \
            --state {output.state:q}
        """
