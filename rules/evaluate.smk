"""This part of the workflow evaluates the weights of a phase.

OUTPUTS: results/<run>/<phase>/evaluation/manifest.json (grid.png, base.png, raw.png, loss.csv,
loss.png, learning_rate.png), results/<run>/<phase>/metrics.json
"""


rule evaluate:
    """Sampling a grid from the weights of phase {wildcards.phase} and measuring them."""
    input:
        # The base is read, too: the weights are made from it, so a change of it makes them again.
        settings=f"{RESULTS}/{{phase}}/settings/evaluate.json",
        dataset=INPUTS.manifests("evaluate", "dataset"),
        cache=INPUTS.manifests("evaluate", "cache"),
        weights=f"{RESULTS}/{{phase}}/weights/manifest.json",
        state=f"{RESULTS}/{{phase}}/state/manifest.json",
    output:
        manifest=f"{RESULTS}/{{phase}}/evaluation/manifest.json",
        metrics=f"{RESULTS}/{{phase}}/metrics.json",
    log:
        f"{RESULTS}/logs/evaluate.{{phase}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/evaluate.{{phase}}.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: RESOURCES.phase_threads
    resources:
        **RESOURCES.memory("evaluate"),
        runtime=RESOURCES.minutes(240),
        gres="gpu:1",
    shell:
        """
        zerotrain --log {log:q} evaluate \
            --settings {input.settings:q} \
            --dataset {input.dataset:q} \
            --cache {input.cache:q} \
            --weights {input.weights:q} \
            --state {input.state:q} \
            --output {output.manifest:q} \
            --metrics {output.metrics:q}
        """
