"""This part of the workflow resolves how a phase is launched.

OUTPUTS: results/<run>/<phase>/launch/manifest.json (accelerate.yaml, deepspeed.json, run.yaml)
"""


localrules:
    render_launch,


rule render_launch:
    """Resolving every value of phase {wildcards.phase} into its launch files."""
    input:
        settings=f"{RESULTS}/{{phase}}/settings/render_launch.json",
        dataset=INPUTS.manifests("render_launch", "dataset"),
        cache=INPUTS.manifests("render_launch", "cache"),
        base=INPUTS.manifests("render_launch", "base"),
        start=INPUTS.manifests("render_launch", "start"),
    output:
        manifest=f"{RESULTS}/{{phase}}/launch/manifest.json",
    log:
        f"{RESULTS}/logs/render_launch.{{phase}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/render_launch.{{phase}}.tsv"
    conda:
        "../envs/zerotrain.yaml"
    params:
        preset=INPUTS.phase_preset,
        with_base=option("--base", "base"),
        with_cache=option("--cache", "cache"),
        with_start=option("--start", "start"),
    shell:
        """
        zerotrain --log {log:q} render_launch \
            --settings {input.settings:q} \
            --dataset {input.dataset:q} \
            --preset {params.preset:q} \
            --output {output.manifest:q} {params.with_base} {params.with_cache} {params.with_start}
        """
