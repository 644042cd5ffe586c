"""Folders of runs as stages and trainings leave them, without a training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from zerotrain.artifact.layout import LOG, DataFolder, RunFolder
from zerotrain.machine.processes import ProcessRecord, this_process
from zerotrain.training.process.lock import LOCK

PHASES = (("plain", 300, "torch"), ("offload", 700, "zero2_offload"))
STAGES = ("launch", "checkpoint", "weights", "state", "evaluation")


class WatchedRun:
    """A run of two phases in the working directory, with what it has made so far.

    Args:
        run: Its name.
        phases: Name, end and preset of each phase.
    """

    def __init__(
        self, run: str = "digits", phases: tuple[tuple[str, int, str], ...] = PHASES
    ) -> None:
        self.run, self.folder = run, RunFolder(run)
        listed = [{"name": n, "until": u, "launch": preset} for n, u, preset in phases]
        values = {"run": run, "base": "nano", "data": {"images": "photos"}, "phases": listed}
        self.file = Path("config") / f"{run}.yaml"
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(yaml.safe_dump({**values, "train": {"resolution": 32}}))

    def make(self, folder: Path, **content: Any) -> None:
        """Publish a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {"format": 1, "kind": folder.name, "content": content, "files": {}}
        (folder / "manifest.json").write_text(
            json.dumps({**manifest, "parents": {}, "made_by": {}})
        )

    def make_data(self) -> None:
        """Make dataset, base and cache."""
        data = DataFolder(self.run)
        for folder in (data.path, self.folder.base, data.cache(32)):
            self.make(folder)

    def finish(self, phase: str, until: int) -> None:
        """Make everything of a phase."""
        path = self.folder.phase(phase).path
        for name in STAGES:
            self.make(path / name, **({"until": until} if name == "checkpoint" else {}))
        (path / "metrics.json").write_text("{}")

    def log(self, phase: str, *steps: int, of: str | None = None) -> Path:
        """Append lines to a phase's metrics.jsonl, of 0.1 s a step; the loss is 1 / step.

        Args:
            phase: The phase whose file it is.
            steps: A line each.
            of: The phase of these steps; default: the same.
        """
        progress = self.folder.phase(phase).progress
        progress.mkdir(parents=True, exist_ok=True)
        with (progress / LOG).open("a") as stream:
            for step in steps:
                line = {
                    "phase": of or phase, "step": step, "loss": 1 / step, "grad_norm": 0.5,
                    "learning_rate": 1e-3, "epoch": step / 100, "seconds": step / 10,
                    "samples_per_second": 320.0, "seconds_forward": 0.03, "seconds_backward": 0.06,
                    "seconds_data": 0.01, "host_bytes": 2**30, "device_bytes": 0,
                }  # fmt: skip
                stream.write(json.dumps(line) + "\n")
        return progress / LOG

    def lock(self, phase: str, owner: ProcessRecord | None = None) -> Path:
        """Let a process train a phase; default: this one."""
        progress = self.folder.phase(phase).progress
        progress.mkdir(parents=True, exist_ok=True)
        (progress / LOCK).write_text(json.dumps(asdict(owner or this_process())))
        return progress

    def write_stage_log(self, name: str, text: str) -> Path:
        """Write the log of a stage."""
        path = self.folder.path / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path
