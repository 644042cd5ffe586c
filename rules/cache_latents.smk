"""This part of the workflow encodes images and captions, or text, once.

OUTPUTS: results/data/<data.name>/cache/<size>/manifest.json
"""


rule cache_latents:
    """Encoding images at {wildcards.size} pixels and captions, or text in rows of as many tokens."""
    input:
        settings=INPUTS.settings("cache_latents"),
        dataset=f"{DATA}/manifest.json",
        base=INPUTS.manifests("cache_latents", "base"),
        shards=INPUTS.manifests("cache_latents", "shards"),
    output:
        manifest=f"{DATA}/cache/{{size}}/manifest.json",
    log:
        f"{SHARED}/logs/cache_latents.{{size}}.log",
    benchmark:
        f"{SHARED}/benchmarks/cache_latents.{{size}}.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: RESOURCES.stage_threads
    resources:
        **RESOURCES.memory("cache_latents"),
        runtime=RESOURCES.minutes(480),
        gres="gpu:1",
    params:
        with_shards=options("--shards", "shards"),
    shell:
        """
        zerotrain --log {log:q} cache_latents \
            --settings {input.settings:q} \
            --size {wildcards.size:q} \
            --dataset {input.dataset:q} \
            --base {input.base:q} \
            --output {output.manifest:q} {params.with_shards}
        """
