"""This part of the workflow lets a run continue from an external checkpoint.

OUTPUTS: results/<run>/imported/state/manifest.json, where resume_from_checkpoint names one
"""


rule import_checkpoint:
    """Turning an external checkpoint into the state that the run begins with."""
    input:
        checkpoint=elsewhere_files,
        names=names_file,
        base=f"{RESULTS}/base/manifest.json",
        code=code("import_checkpoint"),
    output:
        state=f"{RESULTS}/imported/state/manifest.json",
    log:
        f"{RESULTS}/logs/import_checkpoint.log",
    benchmark:
        f"{RESULTS}/benchmarks/import_checkpoint.tsv"
    conda:
        "../envs/zerotrain.yaml"
    resources:
        **memory("import_checkpoint"),
        runtime=minutes(60),
    params:
        config_file=config_file,
        folder=lambda wildcards: run_of(wildcards).resume_from_checkpoint.folder,
        resume_from_checkpoint=value("resume_from_checkpoint"),
        lora=value("lora"),
        peft=value("peft"),
        frozen_parameters=value("frozen_parameters"),
        trainable_parameters=value("trainable_parameters"),
        seed=value("seed"),
        batch=lambda wildcards: run_of(wildcards).phases[0].train.global_batch_size,
        param_groups=lambda wildcards: [
            group.model_dump(mode="json")
            for group in run_of(wildcards).phases[0].train.param_groups
        ],
        no_decay_norm_bias=lambda wildcards: run_of(wildcards)
        .phases[0]
        .train.no_decay_norm_bias,
        allow=lambda wildcards: run_of(wildcards).phases[0].allow,
    shell:
        """
        zerotrain --log {log:q} import_checkpoint \
            --config {params.config_file:q} \
            --checkpoint {params.folder:q} \
            --base {input.base:q} \
            --state {output.state:q}
        """
