"""The run that pages of the report are about, and the launch of one of its phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.builders.phases import PRESETS

from zerotrain import artifact
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.launch.files import write_launch_files, write_run_yaml
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase

RUN: dict[str, Any] = {
    "run": "digits",
    "base": "nano",
    "data": {"source": "digits"},
    "train": {"resolution": 32},
    "phases": [{"name": "plain", "until": 3}, {"name": "offload", "until": 7}],
}


def launched(folder: Path, config: RunConfig) -> None:
    """Publish the launch files of a phase."""
    settings = LaunchSettings.of(config, folder.name)
    resolved = resolve_phase(settings, read_preset(PRESETS / "torch.yaml"), epoch_size=906)
    with artifact.publish(folder / "launch", "launch") as draft:
        write_run_yaml(resolved, draft.folder / "run.yaml")
        write_launch_files(resolved, draft.folder, folder / "launch")
