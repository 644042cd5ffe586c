"""This part of the workflow resolves how a phase is launched.

OUTPUTS: results/<run>/<phase>/launch/manifest.json (accelerate.yaml, deepspeed.json, run.yaml)
"""


localrules:
    render_launch,


rule render_launch:
    """Resolving every value of phase {wildcards.phase} into its launch files."""
    input:
        dataset=dataset,
        cache=launch_cache,
        preset=phase_preset,
        choice=preset_choice,
        base=launch_base,
        start=run_start,
        code=launch_code(),
    output:
        manifest=f"{RESULTS}/{{phase}}/launch/manifest.json",
    log:
        f"{RESULTS}/logs/render_launch.{{phase}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/render_launch.{{phase}}.tsv"
    conda:
        "../envs/zerotrain.yaml"
    params:
        config_file=config_file,
        seed=value("seed"),
        family=value("family"),
        lora=value("lora"),
        peft=value("peft"),
        frozen_parameters=value("frozen_parameters"),
        trainable_parameters=value("trainable_parameters"),
        phases=phases_so_far,
        with_base=lambda wildcards, input: f"--base {input.base}" if input.base else "",
        with_cache=lambda wildcards, input: (
            f"--cache {input.cache}" if input.cache else ""
        ),
        with_start=lambda wildcards, input: (
            f"--start {input.start}" if input.start else ""
        ),
    shell:
        """
        zerotrain --log {log:q} render_launch \
            --config {params.config_file:q} \
            --phase {wildcards.phase:q} \
            --dataset {input.dataset:q} \
            --preset {input.preset:q} \
            --output {output.manifest:q} {params.with_base} {params.with_cache} {params.with_start}
        """
