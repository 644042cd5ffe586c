"""This part of the workflow provides the base whose encoders fill the cache of a dataset that is called
like a run which is not planned: that run's own, made from the same values.

OUTPUTS: results/<data.name>/base/manifest.json
"""

for name in OWNED:
    if base_of_data(name) == f"results/{name}/base/manifest.json":

        use rule build_base as build_base_of_data with:
            output:
                manifest=f"results/{name}/base/manifest.json",
            log:
                f"{RESULTS}/logs/build_base_of_data.log",
            benchmark:
                f"{RESULTS}/benchmarks/build_base_of_data.tsv"
