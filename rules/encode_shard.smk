"""This part of the workflow encodes a range of a cache's keys, where several jobs share the encoding.

OUTPUTS: results/data/<data.name>/cache_shards/<size>/<range>/manifest.json
"""


# It keeps what the cache in `params.published` has already; without that everything is encoded.
rule encode_shard:
    """Encoding images and captions at {wildcards.size} pixels, range {wildcards.shard} of the keys."""
    input:
        settings=INPUTS.settings("cache_latents"),
        dataset=f"{DATA}/manifest.json",
        base=INPUTS.manifests("cache_latents", "base"),
    output:
        manifest=f"{DATA}/cache_shards/{{size}}/{{shard}}/manifest.json",
    log:
        f"{SHARED}/logs/encode_shard.{{size}}.{{shard}}.log",
    benchmark:
        f"{SHARED}/benchmarks/encode_shard.{{size}}.{{shard}}.tsv"
    wildcard_constraints:
        shard=r"\d+-of-\d+",
    conda:
        "../envs/zerotrain.yaml"
    threads: RESOURCES.stage_threads
    resources:
        **RESOURCES.memory("cache_latents"),
        runtime=RESOURCES.minutes(480),
        gres="gpu:1",
    params:
        published=f"{DATA}/cache/{{size}}",
    shell:
        """
        zerotrain --log {log:q} cache_latents \
            --settings {input.settings:q} \
            --size {wildcards.size:q} \
            --dataset {input.dataset:q} \
            --base {input.base:q} \
            --shard {wildcards.shard:q} \
            --cache {params.published:q} \
            --output {output.manifest:q}
        """
