"""This part of the workflow lets a run continue from an external checkpoint.

OUTPUTS: results/<run>/imported/state/manifest.json, where resume_from_checkpoint names one
"""


rule import_checkpoint:
    """Turning an external checkpoint into the state that the run starts from."""
    input:
        settings=f"{RESULTS}/settings/import_checkpoint.json",
        base=f"{RESULTS}/base/manifest.json",
    output:
        state=f"{RESULTS}/imported/state/manifest.json",
    log:
        f"{RESULTS}/logs/import_checkpoint.log",
    benchmark:
        f"{RESULTS}/benchmarks/import_checkpoint.tsv"
    conda:
        "../envs/zerotrain.yaml"
    resources:
        **RESOURCES.memory("import_checkpoint"),
        runtime=RESOURCES.minutes(60),
    params:
        folder=INPUTS.external_checkpoint,
    shell:
        """
        zerotrain --log {log:q} import_checkpoint \
            --settings {input.settings:q} \
            --checkpoint {params.folder:q} \
            --base {input.base:q} \
            --state {output.state:q}
        """
