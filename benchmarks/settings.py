"""Settings files of stages, for benchmarks that call stages without Snakemake."""

from __future__ import annotations

from pathlib import Path

from zerotrain.config import stage_settings
from zerotrain.config.read import read_config
from zerotrain.config.stage_settings import SETTINGS


def settings_of(stage: str, config: Path, phase: str = "") -> Path:
    """Write what a stage reads of a configuration, next to it, and return the file."""
    text = stage_settings.render(stage, SETTINGS[stage].of(read_config(config), phase))
    file = config.with_name(f"{stage}.settings.json")
    file.write_text(text, encoding="utf-8")
    return file
