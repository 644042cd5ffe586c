"""This part of the workflow provides the base whose encoders fill the cache of a dataset that has the
name of a run that is not planned: that run's own base, made from the same values.

OUTPUTS: results/<data.name>/base/manifest.json
"""

for name in RUNS.owned:
    if RUNS.base_of_data(name) == f"results/{name}/base/manifest.json":

        use rule build_base as build_base_of_data with:
            input:
                settings=f"results/{name}/settings/build_base.json",
                dataset=INPUTS.dataset_of_base(
                    f"results/{name}/settings/build_base.json"
                ),
            output:
                manifest=f"results/{name}/base/manifest.json",
            log:
                f"{RESULTS}/logs/build_base_of_data.log",
            benchmark:
                f"{RESULTS}/benchmarks/build_base_of_data.tsv"
