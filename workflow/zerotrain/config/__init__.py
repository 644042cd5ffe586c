"""The run's configuration: typed, validated, with messages that name file, key, value and fix."""

from pathlib import Path

MAIN_CONFIG = Path("config/config.yaml")
"""The file that the Snakefile reads by default, and commands where no run is named."""
