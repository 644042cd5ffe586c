"""A reproducible training pipeline: stages are commands, results are folders."""

__version__ = "0.1.0"
