"""Planning and running the stages with Snakemake and DVC, and the commands around a run."""
