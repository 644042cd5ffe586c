"""This part of the workflow summarizes a run on one page.

OUTPUTS: results/<run>/report/manifest.json (index.html)
"""


localrules:
    report,


rule report:
    """Putting grids, curves and metrics of all phases on one page."""
    input:
        # Checkpoints, states, weights, caches and the dataset are read, too. `evaluate` and the rules
        # before it are made from them, so a change of any makes the evaluation again.
        settings=f"{RESULTS}/settings/report.json",
        evaluation=INPUTS.of_phases("evaluation/manifest.json"),
        metrics=INPUTS.of_phases("metrics.json"),
        launch=INPUTS.of_phases("launch/manifest.json"),
    output:
        manifest=report(
            f"{RESULTS}/report/manifest.json",
            caption="captions/report.rst",
            category="Page",
            labels={"result": "manifest"},
        ),
    log:
        f"{RESULTS}/logs/report.log",
    benchmark:
        f"{RESULTS}/benchmarks/report.tsv"
    conda:
        "../envs/zerotrain.yaml"
    params:
        config_file=INPUTS.config_file,
        folders=INPUTS.of_phases(),
    shell:
        """
        zerotrain --log {log:q} report \
            --settings {input.settings:q} \
            --config {params.config_file:q} \
            --output {output.manifest:q} \
            {params.folders:q}
        """
