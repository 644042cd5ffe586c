"""Settings files of stages, as a plan writes them."""

from __future__ import annotations

from pathlib import Path

from zerotrain.config import stage_settings
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import SETTINGS


def write_settings(path: Path, stage: str, run: RunConfig, phase: str = "") -> Path:
    """Write the settings of a stage of a run, or of its phase."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(stage_settings.render(stage, SETTINGS[stage].of(run, phase)), encoding="utf-8")
    return path
