"""DVC, which stores what Snakemake makes.

`zerotrain dvc generate` writes dvc.yaml: a stage for each dataset, cache, base and phase, whose
command is a call of Snakemake. After `snakemake`, stages that are up to date are recorded, as by
`dvc commit`. `zerotrain restore` finds the commit that made weights, and brings its results back.
DVC's own commands work on these stages as on any.
"""
