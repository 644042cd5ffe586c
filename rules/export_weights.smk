"""This part of the workflow is the door between phases, and out of the pipeline.

OUTPUTS: results/<run>/<phase>/{weights,state}/manifest.json
"""


rule export_weights:
    """Turning the checkpoint of phase {wildcards.phase} into weights and an engine-neutral state."""
    input:
        checkpoint=f"{RESULTS}/{{phase}}/checkpoint/manifest.json",
        base=f"{RESULTS}/base/manifest.json",
        code=code("export_weights"),
    output:
        weights=f"{RESULTS}/{{phase}}/weights/manifest.json",
        state=f"{RESULTS}/{{phase}}/state/manifest.json",
    log:
        f"{RESULTS}/logs/export_weights.{{phase}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/export_weights.{{phase}}.tsv"
    conda:
        "../envs/zerotrain.yaml"
    resources:
        **memory("export_weights"),
        runtime=minutes(60),
    params:
        config_file=config_file,
        export=value("export"),
        lora=value("lora"),
        peft=value("peft"),
        frozen_parameters=value("frozen_parameters"),
        trainable_parameters=value("trainable_parameters"),
    shell:
        """
        zerotrain --log {log:q} export_weights \
            --config {params.config_file:q} \
            --checkpoint {input.checkpoint:q} \
            --base {input.base:q} \
            --weights {output.weights:q} \
            --state {output.state:q}
        """
