"""Step and epoch of a checkpoint, where trainers record them: files, headers of weights, names.

Sources: HF's Trainer (trainer_state.json), SimpleTuner (training_state.json), train_network.py of
kohya's sd-scripts (train_state.json), InternalModelSaverMixin of OneTrainer (meta.json), and
BaseSDTrainProcess of ai-toolkit (training_info in the header of weights).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import check_object, parse_json, read_bytes
from zerotrain.state.checkpoint_path import BACKUP_RECORD
from zerotrain.state.external.consistency import AGAIN, STEP_FILES, read_number

OF_STEP = re.compile(r"(?:^|[-_])(?:step|checkpoint)[-_]?(\d+)(?:-state)?$")
"""The step at the end of a name; kohya's scripts put `-state` behind it."""
RECORDS = {
    **dict.fromkeys(STEP_FILES, ("", "global_step", "epoch")),
    "train_state.json": ("", "current_step", "current_epoch"),
    BACKUP_RECORD: ("train_progress", "global_step", "epoch"),
}
"""Files in which trainers record step and epoch: the section, and the keys of both."""
INFO = "training_info"


@dataclass(frozen=True)
class Progress:
    """What a checkpoint says of its training, and where.

    Args:
        step: Updates of the weights; None if nothing says it.
        epoch: The epoch; None if nothing says it.
        source: The file, header or name that says it.
    """

    step: int | None = None
    epoch: float | None = None
    source: str = ""

    def describe(self, optimizer: str, counted: int) -> str:
        """Describe the step that a checkpoint counts as.

        Args:
            optimizer: The optimizer's file.
            counted: Its own count, which holds if nothing else says a step.
        """
        if self.step is None:
            if counted:
                return f"step {counted:,} of {optimizer}"
            return "step 0: no file, header, name or optimizer says it"
        epoch = "" if self.epoch is None else f" and epoch {self.epoch:g}"
        return f"step {self.step:,}{epoch} of {self.source}"


def read_progress(folder: Path) -> Progress:
    """Read step and epoch of a folder: of the first file that has a step, or of its name.

    Raises:
        PipelineError: a file is damaged, or its values are no numbers.
    """
    for name, (section, *keys) in RECORDS.items():
        path = folder / name
        if not path.is_file():
            continue
        text = read_bytes(path, follow_links=True, hint=AGAIN)
        values = check_object(parse_json(text, path, hint=AGAIN, cells=True), path, hint=AGAIN)
        values = values.get(section, {}) if section else values  # a loss in it may be NaN
        found = _read(values, keys[0], keys[1], path, name)
        if found.step is not None:
            return found
    return read_name(folder.resolve().name, "the folder's name")


def read_file_progress(path: Path, header: Mapping[str, str]) -> Progress:
    """Read step and epoch of a file of weights: of its header, of its name or its folder's.

    Raises:
        PipelineError: the header's record is damaged.
    """
    if INFO in header:
        where = f"{path}: {INFO}"
        values = check_object(parse_json(header[INFO], where, hint=AGAIN), where, hint=AGAIN)
        return _read(values, "step", "epoch", where, f"{INFO} in the header of {path.name}")
    own = read_name(path.stem, "the file's name")
    return (
        own if own.step is not None else read_name(path.resolve().parent.name, "its folder's name")
    )


def read_name(name: str, source: str) -> Progress:
    """Read the step at the end of a name."""
    found = OF_STEP.search(name)
    return Progress(int(found[1]), None, source) if found else Progress()


def _read(values: Any, step: str, epoch: str, where: Path | str, source: str) -> Progress:
    if not isinstance(values, dict):
        return Progress()
    numbers = [
        None if values.get(key) is None else read_number(values[key], where, key)
        for key in (step, epoch)
    ]
    return Progress(None if numbers[0] is None else int(numbers[0]), numbers[1], source)
