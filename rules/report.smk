"""This part of the workflow puts a run on one page.

OUTPUTS: results/<run>/report/manifest.json (index.html)
"""


rule report:
    """Putting grids, curves and metrics of all phases on one page."""
    input:
        evaluation=expand(f"{RESULTS}/{{phase}}/evaluation/manifest.json", phase=PHASES),
        metrics=expand(f"{RESULTS}/{{phase}}/metrics.json", phase=PHASES),
        launch=expand(f"{RESULTS}/{{phase}}/launch/manifest.json", phase=PHASES),
        code=code("report"),
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
        folders=expand(f"{RESULTS}/{{phase}}", phase=PHASES),
    shell:
        """
        zerotrain --log {log:q} report \
            --config {params.config_file:q} \
            --output {output.manifest:q} \
            {params.folders:q}
        """
