"""This part of the workflow encodes images and captions, once.

OUTPUTS: results/data/<data.name>/cache/<pixels>/manifest.json
"""


rule cache_latents:
    """Encoding images at {wildcards.pixels} pixels and captions into the cache."""
    input:
        dataset=f"{DATA}/manifest.json",
        base=f"{RESULTS}/base/manifest.json",
        code=code("cache_latents", FAMILY),
    output:
        manifest=f"{DATA}/cache/{{pixels}}/manifest.json",
    log:
        f"{RESULTS}/logs/cache_latents.{{pixels}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/cache_latents.{{pixels}}.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: THREADS
    params:
        config_file=config_file,
        cache=RUN.cache.model_dump(mode="json"),
        num_cpu_threads_per_process=RUN.launch.num_cpu_threads_per_process,
    shell:
        """
        zerotrain --log {log:q} cache_latents \
            --config {params.config_file:q} \
            --pixels {wildcards.pixels:q} \
            --dataset {input.dataset:q} \
            --base {input.base:q} \
            --output {output.manifest:q}
        """
