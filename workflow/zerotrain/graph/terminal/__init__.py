"""The terminal's output while Snakemake runs the stages; machine/output.py is that of a stage."""
