"""This part of the workflow resolves how a phase is launched.

OUTPUTS: results/<run>/<phase>/launch/manifest.json (accelerate.yaml, deepspeed.json, run.yaml)
"""


localrules:
    render_launch,


rule render_launch:
    """Resolving every value of phase {wildcards.phase} into its launch files."""
    input:
        dataset=INPUTS.dataset,
        cache=INPUTS.launch_cache,
        preset=INPUTS.phase_preset,
        choice=INPUTS.preset_choice,
        base=INPUTS.launch_base,
        start=INPUTS.run_start,
    output:
        manifest=f"{RESULTS}/{{phase}}/launch/manifest.json",
    log:
        f"{RESULTS}/logs/render_launch.{{phase}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/render_launch.{{phase}}.tsv"
    conda:
        "../envs/zerotrain.yaml"
    params:
        **PARAMETERS.settings("render_launch"),
        version=version_of("render_launch"),
        config_file=PARAMETERS.config_file,
        with_base=option("--base", "base"),
        with_cache=option("--cache", "cache"),
        with_start=option("--start", "start"),
    shell:
        """
        zerotrain --log {log:q} render_launch \
            --config {params.config_file:q} \
            --phase {wildcards.phase:q} \
            --dataset {input.dataset:q} \
            --preset {input.preset:q} \
            --output {output.manifest:q} {params.with_base} {params.with_cache} {params.with_start}
        """
