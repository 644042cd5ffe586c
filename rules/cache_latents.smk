"""This part of the workflow encodes images and captions, or text, once.

OUTPUTS: results/data/<data.name>/cache/<size>/manifest.json
"""


rule cache_latents:
    """Encoding images at {wildcards.size} pixels and captions, or text in rows of as many tokens."""
    input:
        dataset=f"{DATA}/manifest.json",
        base=cache_base,
        code=code("cache_latents"),
    output:
        manifest=f"{DATA}/cache/{{size}}/manifest.json",
    log:
        f"{SHARED}/logs/cache_latents.{{size}}.log",
    benchmark:
        f"{SHARED}/benchmarks/cache_latents.{{size}}.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: stage_threads
    resources:
        **memory("cache_latents"),
        runtime=minutes(480),
        gres="gpu:1",
    params:
        config_file=config_file,
        cache=value("cache"),
        validation_prompts=value("validation_prompts"),
        packing=lambda wildcards: run_of(wildcards).phases[0].train.packing,
        virtual_tokens=lambda wildcards: (run_of(wildcards).peft or {}).get(
            "num_virtual_tokens"
        ),
        num_cpu_threads_per_process=lambda wildcards: run_of(
            wildcards
        ).launch.num_cpu_threads_per_process,
    shell:
        """
        zerotrain --log {log:q} cache_latents \
            --config {params.config_file:q} \
            --size {wildcards.size:q} \
            --dataset {input.dataset:q} \
            --base {input.base:q} \
            --output {output.manifest:q}
        """
