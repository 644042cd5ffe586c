"""Ten corruptions of every small file of a phase's progress: a start resumes, or says why not.

A start is the stage's own up to its processes, and what they read of the folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import Training
from tests.training.measures import SETTINGS

from zerotrain.errors import PipelineError
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import MASTER
from zerotrain.training.checkpointing.preflight import Inputs
from zerotrain.training.checkpointing.progress_folder import end_step, newest_intact
from zerotrain.training.process import lock
from zerotrain.training.process.ending import read_exit_codes, read_exit_record
from zerotrain.training.process.start import prepare
from zerotrain.training.reporting import heartbeat, trackers
from zerotrain.training.reporting.log import Log
from zerotrain.training.reporting.validation_history import HISTORY, best_step, read_history

TRAINED, UNTIL = 6, 8
NEWEST = "step-00000006"
DEAD = {"host": os.uname().nodename, "pid": 2**22 + 1, "started": 1.0, "job": ""}
SYNTHETIC: dict[str, Any] = {
    "exit.json": {"code": 1, "reason": "the disk is full", "hint": "free some", "measured": {}},
    "ended-0.json": {"0": -9},
    "ranks/00000.json": {"rank": 0, "pid": 1},
    "lock": DEAD,
    "stop": "",
    "finished.json": {"step": 4, "reason": "no better", "validation": {"eval_steps": 1}},
    "tracker-wandb.json": {"run": "abc", "step": 6, "names": ["train/loss"]},
    "accepted.json": {"trains": {"learning_rate": 1.0}},
    "tensorboard/last_step.json": {"step": 6},
}
"""Files that not every training leaves."""
LARGE = ".safetensors"

Corruption = Callable[[Path, random.Random], None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, inputs: Path, server: Any) -> Training:
    """A phase of 8 steps that has trained 6 of them, with checkpoints of 2, 4 and 6."""
    training = Training(tmp_path_factory.mktemp("damaged"), inputs, server)
    values: dict[str, Any] = {"save_every": 2, "keep": 3, "log_every": 3, "validation": SETTINGS}
    training.phase("p", "torch", TRAINED, **values)
    progress = training.progress("p")
    training.prepare("p")
    training.train("p")
    training.phase("p", "torch", UNTIL, **values)
    for name, value in SYNTHETIC.items():
        (progress / name).parent.mkdir(exist_ok=True)
        (progress / name).write_text(json.dumps(value) if value else "")
    return training


def small_files(progress: Path) -> list[str]:
    """Every file but tensors, of which the newest checkpoint's stand for those of all."""
    names = [p.relative_to(progress).as_posix() for p in progress.rglob("*") if p.is_file()]
    return sorted(
        name
        for name in names
        if not name.endswith(LARGE) and (NEWEST in name or not name.startswith("step-"))
    )


def truncate(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(max(1, path.stat().st_size))])


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def zero(path: Path, draw: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def garbage(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(max(16, path.stat().st_size)))


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def other_json(path: Path, draw: random.Random) -> None:
    path.write_text(draw.choice(["[]", "null", "7", '"text"', "{}", "[[]]"]), encoding="utf-8")


def torn(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data + data[: len(data) // 2])


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


def edit_json(path: Path, draw: random.Random, edit: Callable[[Any, Any], None]) -> None:
    """Change one value of a JSON file, or of one line of several."""
    if path.suffix not in (".json", ".jsonl") and path.name != lock.LOCK:
        return truncate(path, draw)
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = draw.randrange(len(lines))
    document = json.loads(lines[number])
    if found := list(places(document)):
        edit(*draw.choice(found))
    lines[number] = json.dumps(document)
    path.write_text("\n".join(lines), encoding="utf-8")
    return None


def swap_type(path: Path, draw: random.Random) -> None:
    other = draw.choice([None, "text", -1, [], {}, 0.5, True])
    edit_json(path, draw, lambda node, key: node.__setitem__(key, other))


def delete_key(path: Path, draw: random.Random) -> None:
    edit_json(path, draw, lambda node, key: node.__delitem__(key))


CORRUPTIONS: list[Corruption] = [
    *(truncate, flip, zero, empty, garbage, delete, other_json, torn, swap_type, delete_key)
]


def copied(trained: Training, folder: Path) -> Path:
    """A copy of the progress, whose tensors are links."""

    def copy(source: str, target: str) -> None:
        (os.link if source.endswith(LARGE) else shutil.copy2)(source, target)

    return Path(shutil.copytree(trained.progress("p"), folder / "progress", copy_function=copy))


def start(inputs: Inputs, progress: Path) -> int | None:
    """Do what a start does with its progress; return the step from which it resumes."""
    held = lock.take(progress)
    try:
        prepare(inputs, progress)
        resume = newest_intact(progress, UNTIL)
        assert end_step(progress, inputs.phase) is None
    finally:
        held.release()
    best_step(progress)
    assert (
        read_exit_record(progress),
        read_exit_codes(progress),
        heartbeat.read_statuses(progress),
    ) == (None, {}, [])
    trackers.LoggedPoints.read(trackers._read(progress / "tracker-wandb.json"))
    assert (trackers._read(progress / "tensorboard/last_step.json").step or 0) >= -1
    if resume is None:
        return None
    source = Checkpoint(resume)
    position = source.position
    log = Log(
        progress, inputs.phase, resume / "records", position.step, position.samples,
        torch.device("cpu"), same_phase=True,
    )  # fmt: skip
    log.close()
    return position.step


def check_resumed(
    trained: Training, progress: Path, step: int | None, said: str, damaged: str
) -> None:
    """Compare what a start resumes from with what was trained; records may be lost with a word."""
    of_newest = damaged.startswith(NEWEST)
    assert step is not None, "starts over"
    assert step == TRAINED or (step == 4 and of_newest and said), f"resumes from {step}: {said!r}"
    assert step == TRAINED or not is_record(damaged), f"resumes from {step}"
    name = f"step-{step:08d}"
    own, before = Checkpoint(progress / name), Checkpoint(trained.progress("p") / name)
    assert own.position == before.position, "another position"
    for parameter in before.names[:3]:
        assert torch.equal(own.tensor(parameter, MASTER), before.tensor(parameter, MASTER))
    assert read_history(progress / name) == read_history(trained.progress("p") / name)
    for record in ("metrics.jsonl", "pending.json", "resources.json"):
        path, kept = (folder / name / "records" / record for folder in
                      (progress, trained.progress("p")))  # fmt: skip
        equal = path.is_file() and path.read_bytes() == kept.read_bytes()
        assert equal or f"{name}/records/{record}" in said, f"{record} differs without a word"


def is_record(name: str) -> bool:
    """Whether a file is a record that no training depends on."""
    return name.startswith(f"{NEWEST}/records/") and not name.endswith(HISTORY)


def is_answer(error: PipelineError, name: str, progress: Path, only: bool) -> bool:
    """Whether a refusal is the right one for a damaged file, and says what to do."""
    if name == lock.LOCK:  # on the other host that a damaged lock names
        return "a training is running here already" in error.what
    said = NEWEST in error.what and f"move {progress} away" in str(error.hint)
    return only and said and not is_record(name)


def find_wrong(
    trained: Training, folder: Path, capsys: pytest.CaptureFixture[str], *, only: bool
) -> list[str]:
    """Try corruptions on every small file; list what a start answers wrongly.

    Args:
        trained: The phase.
        folder: Where copies are made.
        capsys: Of what is printed.
        only: Whether the newest checkpoint is the only one.
    """
    inputs, wrong = trained.inputs("p"), []
    names = small_files(trained.progress("p"))
    assert len(names) > 15
    for name in (name for name in names if not only or name.startswith(NEWEST)):
        for number, corrupt in enumerate(CORRUPTIONS):
            progress = copied(trained, folder / "copy")
            for other in ("step-00000002", "step-00000004") if only else ():
                shutil.rmtree(progress / other)
            corrupt(progress / name, random.Random(f"{name} {number}"))
            capsys.readouterr()
            try:
                step = start(inputs, progress)
                check_resumed(trained, progress, step, capsys.readouterr().err, name)
            except PipelineError as error:
                if not is_answer(error, name, progress, only):
                    wrong.append(f"{name}: {corrupt.__name__}: {error}")
            except Exception as error:
                wrong.append(f"{name}: {corrupt.__name__}: {error!r:.300}")
            shutil.rmtree(progress.parent, ignore_errors=True)
    return wrong


def change_value(trains: dict[str, Any]) -> None:
    trains["learning_rate"] *= 2


def rename_key(trains: dict[str, Any]) -> None:
    trains["learning_ratf"] = trains.pop("learning_rate")


@pytest.mark.parametrize("edit", [change_value, rename_key, dict.clear])
def test_damaged_values_of_a_manifest_are_no_edit(trained, tmp_path, capsys, edit):
    """The checkpoint before it is taken; where there is none, a sentence says what to do."""
    inputs, progress = trained.inputs("p"), copied(trained, tmp_path)
    path = progress / NEWEST / "manifest.json"
    document = json.loads(path.read_text())
    edit(document["content"]["trains"])
    path.write_text(json.dumps(document))
    assert start(inputs, progress) == 4
    assert f"{NEWEST}: manifest.json: trains" in (said := capsys.readouterr().err)
    assert f"set aside as damaged-{NEWEST}" in said
    assert not list(tmp_path.glob("progress.stale-*"))
    for name in ("step-00000002", "step-00000004"):
        shutil.rmtree(progress / name)
    (progress / f"damaged-{NEWEST}").rename(progress / NEWEST)
    with pytest.raises(PipelineError, match="no checkpoint is whole") as error:
        start(inputs, progress)
    assert f"{NEWEST}: manifest.json: trains" in error.value.what
    del document["content"]["trains_sha256"]
    path.write_text(json.dumps(document))
    with pytest.raises(PipelineError, match="no checkpoint is whole"):
        start(inputs, progress)


@pytest.mark.slow
@pytest.mark.parametrize(
    "only",
    [pytest.param(False, marks=pytest.mark.soak, id="of three"), pytest.param(True, id="alone")],
)
def test_corrupted_small_files(trained, tmp_path, capsys, only):
    """Of three checkpoints the newest that is intact is resumed from; where the damaged one is the
    only one, a sentence says how to restore it or start over. Damaged records cost no step."""
    wrong = find_wrong(trained, tmp_path, capsys, only=only)
    assert not wrong, "\n".join(wrong)
