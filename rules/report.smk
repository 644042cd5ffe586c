"""This part of the workflow puts a run on one page.

OUTPUTS: results/<run>/report/manifest.json (index.html)
"""


localrules:
    report,


rule report:
    """Putting grids, curves and metrics of all phases on one page."""
    input:
        evaluation=of_phases("evaluation/manifest.json"),
        metrics=of_phases("metrics.json"),
        launch=of_phases("launch/manifest.json"),
        code=sources("report"),
    output:
        manifest=f"{RESULTS}/report/manifest.json",
    log:
        f"{RESULTS}/logs/report.log",
    benchmark:
        f"{RESULTS}/benchmarks/report.tsv"
    conda:
        "../envs/zerotrain.yaml"
    params:
        config_file=config_file,
        folders=of_phases(),
    shell:
        """
        zerotrain --log {log:q} report \
            --config {params.config_file:q} \
            --output {output.manifest:q} \
            {params.folders:q}
        """
