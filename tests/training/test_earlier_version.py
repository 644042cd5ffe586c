"""Progress and checkpoints that an earlier version made resume and are kept."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from zerotrain import artifact
from zerotrain.cache.layout import COLUMNS, INDEX, read_index, write_json_index
from zerotrain.state.position import read_position
from zerotrain.training.checkpointing import published
from zerotrain.training.checkpointing.progress_folder import saved_steps

ROOT = Path(__file__).parents[2]
EARLIER = "be226e0"
"""A commit whose progress had a fingerprint.json."""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as that commit has it."""
    words = ["git", "-C", str(ROOT), "archive", EARLIER, "workflow"]
    done = subprocess.run(words, capture_output=True)
    if done.returncode:
        pytest.skip(f"this clone has no commit {EARLIER}")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as found:
        found.extractall(folder, filter="data")
    return folder / "workflow"


def write_as_before(launch: Path, earlier: Path) -> None:
    """Leave out the values that the earlier version does not know."""
    known = (earlier / "zerotrain/launch/resolved.py").read_text()
    found = artifact.read(launch, "launch")
    lines, stays = [], True
    for line in found.path("run.yaml").read_text().splitlines(keepends=True):
        if not line.startswith(" "):
            stays = f"\n    {line.partition(':')[0]}:" in known
        lines += [line] if stays else []
    with artifact.publish(launch, "launch") as draft:
        for name in found.files:
            artifact.copy_new(launch / name, draft.folder / name)
        (draft.folder / "run.yaml").write_text("".join(lines))


def cache_as_before(cache: Path, folder: Path) -> Path:
    """Copy a cache with an index of the format that the earlier version knows."""
    found = artifact.read(cache, "cache")
    with artifact.publish(folder, "cache") as draft:
        draft.content = found.content
        for name in found.files.keys() - {INDEX, COLUMNS}:
            (draft.folder / name).parent.mkdir(parents=True, exist_ok=True)
            artifact.copy_new(cache / name, draft.folder / name)
        write_json_index(draft.folder, read_index(cache))
    return folder


def exported(checkpoint: Path, state: Path, package: Path) -> str:
    """The identity of the state that a version of the package exports."""
    code = """if True:
        import importlib, pathlib, sys
        from zerotrain import artifact
        reading, exporting = map(importlib.import_module, sys.argv[3:])
        checkpoint, state = map(pathlib.Path, sys.argv[1:3])
        exporting.export(reading.Checkpoint(checkpoint), checkpoint, None, state)
        print(artifact.read(state, "state").identity)"""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    moved = (package / "zerotrain/export/export.py").is_file()
    modules = ["state.checkpoint", "export.export"] if moved else ["checkpoint", "export"]
    named = [f"zerotrain.{name}" for name in modules]
    command = [sys.executable, "-c", code, str(checkpoint), str(state), *named]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.slow
def test_a_training_of_an_earlier_version_resumes_and_is_kept(
    earlier: Path, training: Any, tmp_path: Path
) -> None:
    """Its steps are not trained again, its published checkpoint keeps every byte, with its progress
    or without; the state says that other code trained on. A state exported from it again is the one
    from which the next phase started."""
    launch = training.folder / "old" / "launch"
    output, progress = training.folder / "old" / "checkpoint", training.progress("old")
    training.cache = cache_as_before(training.cache, tmp_path / "cache")
    values = {"gradient_accumulation_steps": 2}
    training.phase("old", "torch", 4, **values)
    write_as_before(launch, earlier)
    words = training.words("old", output=output)
    command = [sys.executable, "-m", "zerotrain", "train_phase", *words]
    environment = {**os.environ, "PYTHONPATH": str(earlier)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (progress / "fingerprint.json").is_file()
    manifest = (output / artifact.MANIFEST).read_bytes()
    assert b'"trains"' not in manifest

    before = exported(output, tmp_path / "before", earlier)
    assert exported(output, tmp_path / "now", ROOT / "workflow") == before

    training.phase("old", "torch", 4, **values)
    inputs = training.inputs("old")
    training.prepare("old")
    rolling = artifact.read(progress / "step-00000004", "checkpoint")
    published.publish(rolling, output, inputs, progress, early=False)
    assert (output / artifact.MANIFEST).read_bytes() == manifest

    away = progress.rename(progress.with_name("away"))
    progress.mkdir()
    assert published.keep(output, progress, inputs)
    assert (output / artifact.MANIFEST).read_bytes() == manifest
    (progress / "accepted.json").unlink()
    progress.rmdir()
    away.rename(progress)

    training.phase("old", "torch", 6, gradient_checkpointing=True)
    training.prepare("old")
    assert saved_steps(progress) == [4]
    training.train("old")
    assert len(training.losses("old")) == 6
    found = artifact.read(progress / "step-00000006", "checkpoint")
    changed = {
        one["key"]: (one["step"], one["old"], one["new"])
        for one in read_position(found, "checkpoint.json").history
    }
    assert changed.pop("code")[0] == 4
    assert changed == {
        "gradient_accumulation_steps": (4, 2, 1),
        "gradient_checkpointing": (4, False, True),
        "micro_batch_size": (4, 2, 4),
        "recorded": (4, None, "from here"),
    } | ({"threads": changed["threads"]} if "threads" in changed else {})
