"""This part of the workflow encodes images and captions, or text, once.

OUTPUTS: results/data/<data.name>/cache/<size>/manifest.json
"""


rule cache_latents:
    """Encoding images at {wildcards.size} pixels and captions, or text in rows of as many tokens."""
    input:
        dataset=f"{DATA}/manifest.json",
        base=f"{RESULTS}/base/manifest.json",
        code=code("cache_latents", FAMILY),
    output:
        manifest=f"{DATA}/cache/{{size}}/manifest.json",
    log:
        f"{RESULTS}/logs/cache_latents.{{size}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/cache_latents.{{size}}.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: THREADS
    params:
        config_file=config_file,
        cache=RUN.cache.model_dump(mode="json"),
        validation_prompts=RUN.validation_prompts,
        packing=RUN.phases[0].train.packing,
        virtual_tokens=(RUN.peft or {}).get("num_virtual_tokens"),
        num_cpu_threads_per_process=RUN.launch.num_cpu_threads_per_process,
    shell:
        """
        zerotrain --log {log:q} cache_latents \
            --config {params.config_file:q} \
            --size {wildcards.size:q} \
            --dataset {input.dataset:q} \
            --base {input.base:q} \
            --output {output.manifest:q}
        """
