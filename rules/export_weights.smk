"""This part of the workflow passes a phase on to the next one, and exports it.

OUTPUTS: results/<run>/<phase>/{weights,state}/manifest.json
"""


rule export_weights:
    """Turning the checkpoint of phase {wildcards.phase} into weights and an engine-neutral state."""
    input:
        settings=f"{RESULTS}/{{phase}}/settings/export_weights.json",
        checkpoint=f"{RESULTS}/{{phase}}/checkpoint/manifest.json",
        base=f"{RESULTS}/base/manifest.json",
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
        **RESOURCES.memory("export_weights"),
        runtime=RESOURCES.minutes(60),
    shell:
        """
        zerotrain --log {log:q} export_weights \
            --settings {input.settings:q} \
            --checkpoint {input.checkpoint:q} \
            --base {input.base:q} \
            --weights {output.weights:q} \
            --state {output.state:q}
        """
