"""Swap folders belong to one training each; the dead leave nothing, the living lose nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.builders import refusals
from tests.builders.phases import make_swapped_phase
from tests.builders.processes import DEAD_PID

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError
from zerotrain.launch.files import write_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine import compiled_ops
from zerotrain.machine.file_lock import hold
from zerotrain.machine.processes import ProcessRecord, this_process
from zerotrain.training.process import launcher
from zerotrain.training.process.ending import read_exit_record
from zerotrain.training.process.swap_folder import OWNER, clear_dead, needed_bytes, swap_folder


def left_by(disk: Path, name: str, owner: ProcessRecord | None) -> Path:
    """A swap folder with a file of DeepSpeed's, as some training left it."""
    folder = disk / name
    (folder / "zero_stage_3" / "optimizer").mkdir(parents=True)
    (folder / "zero_stage_3" / "optimizer" / "0_2.tensor.swp").write_bytes(b"\0" * 4096)
    if owner:
        (folder / OWNER).write_text(json.dumps(asdict(owner)))
    return folder


def refused(phase: ResolvedPhase, needed: int = 0) -> PipelineError:
    """The error with which a phase gets no swap folder."""
    return refusals.refused(swap_folder(phase, needed).__enter__)


@pytest.fixture
def dead() -> ProcessRecord:
    """A process that has ended."""
    return replace(this_process(), pid=DEAD_PID)


def test_a_training_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """Two of one run and phase, too; and the folder is gone at the end."""
    phase = make_swapped_phase(tmp_path)
    with swap_folder(phase, 0) as (first, said), swap_folder(phase, 0) as (second, _):
        assert said == []
        assert first != second
        assert first.parent == second.parent == tmp_path
        assert first.name.startswith("zerotrain-tiny-swapped-")
        assert ProcessRecord(**json.loads((first / OWNER).read_text())).pid == os.getpid()
        (first / "zero_stage_3").mkdir()
        (first / "zero_stage_3" / "x.swp").touch()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_goes_when_training_fails(tmp_path: Path) -> None:
    """Whatever ends it."""
    with pytest.raises(KeyboardInterrupt), swap_folder(make_swapped_phase(tmp_path), 0):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_dead_owners_folder_is_cleared_at_any_start(tmp_path: Path, dead: ProcessRecord) -> None:
    """Whole, whatever run and stage wrote it; and reported."""
    left_by(tmp_path, "zerotrain-other-phase-x1", dead)
    with swap_folder(make_swapped_phase(tmp_path), 0) as (mine, said):
        assert list(tmp_path.iterdir()) == [mine]
    assert len(said) == 1
    assert f"pid {dead.pid}" in said[0]


def test_a_living_owners_folder_is_untouched(tmp_path: Path, sleeper) -> None:
    """Until its process has ended."""
    started = psutil.Process(sleeper.pid).create_time()
    owner = replace(this_process(), pid=sleeper.pid, started=started)
    folder = left_by(tmp_path, "zerotrain-a-b-x1", owner)
    assert clear_dead(tmp_path) == []
    assert (folder / "zero_stage_3" / "optimizer" / "0_2.tensor.swp").exists()
    sleeper.kill()
    sleeper.wait()
    assert len(clear_dead(tmp_path)) == 1


def test_another_hosts_folder_is_untouched(tmp_path: Path, dead: ProcessRecord) -> None:
    """Of its processes nothing is known here."""
    folder = left_by(tmp_path, "zerotrain-a-b-x1", replace(dead, host="elsewhere"))
    assert clear_dead(tmp_path) == []
    assert folder.exists()


def test_folder_of_another_container_is_cleared_when_no_process_holds_it(
    tmp_path: Path, dead: ProcessRecord
) -> None:
    """Its pid says nothing here; the lock on its owner's file does, as the disk is local."""
    twin = replace(dead, pid_namespace=dead.pid_namespace + 1)
    folder = left_by(tmp_path, "zerotrain-a-b-x1", twin)
    with hold(folder / OWNER):
        assert clear_dead(tmp_path) == []
        assert folder.exists()
    assert len(clear_dead(tmp_path)) == 1
    assert not folder.exists()


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", '{"host": "x"}'])
def test_a_folder_without_a_readable_owner_is_left_and_named(
    tmp_path: Path, text: str | None
) -> None:
    """It may be a user's own."""
    folder = left_by(tmp_path, "zerotrain-a-b-x1", None)
    if text is not None:
        (folder / OWNER).write_text(text)
    said = clear_dead(tmp_path)
    assert len(said) == 1
    assert f"{folder}: left alone" in said[0]
    assert (folder / "zero_stage_3").exists()


def test_other_programs_files_are_never_touched(tmp_path: Path, dead: ProcessRecord) -> None:
    """Not other names, not files, not what a link points to."""
    keep = tmp_path / "models"
    left_by(tmp_path, "models", dead)
    left_by(tmp_path, "zero_stage_3", dead)
    (tmp_path / "zerotrain-notes.txt").write_text("mine")
    (tmp_path / "zerotrain-link").symlink_to(keep)
    before = sorted(tmp_path.rglob("*"))
    assert clear_dead(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_cleared_folder_links_to_stays(tmp_path: Path, dead: ProcessRecord) -> None:
    """A link inside goes, its target does not."""
    target = tmp_path / "data"
    target.mkdir()
    (target / "image.png").touch()
    folder = left_by(tmp_path, "zerotrain-a-b-x1", dead)
    (folder / "link").symlink_to(target)
    clear_dead(tmp_path)
    assert not folder.exists()
    assert (target / "image.png").exists()


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """It is not made: a disk that is not mounted would go unnoticed."""
    error = refused(make_swapped_phase(tmp_path / "away"))
    assert "/away is no folder on this machine" in error.what
    assert "mkdir -p" in error.hint
    (tmp_path / "file").touch()
    assert "/file is a file" in refused(make_swapped_phase(tmp_path / "file")).what


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything else is tried."""

    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    error = refused(make_swapped_phase(tmp_path))
    assert "cannot be written: Permission denied" in error.what


def test_too_little_space_is_refused_with_the_figures(
    tmp_path: Path, dead: ProcessRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the dead left is cleared first: it may be what is missing. What fits exactly fits."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=46_214_000_000))
    with swap_folder(make_swapped_phase(tmp_path), 46_214_000_000):
        pass
    folder = left_by(tmp_path, "zerotrain-a-b-x1", dead)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=46_213_999_999))
    error = refused(make_swapped_phase(tmp_path), 46_214_000_000)
    assert "46.2 GB free, the phase swaps 46.2 GB" in error.what
    assert "16 bytes a trained parameter, 2 a parameter" in error.what
    assert not folder.exists()


@pytest.fixture
def base(inputs: Path) -> Artifact:
    """The tiny base model."""
    return artifact.read(inputs / "base", "base")


def parameters(base: Artifact) -> dict[str, int]:
    """The sizes of its parameters, by another reader of the files."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel.from_pretrained(base.folder / "unet")
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def test_space_is_counted_in_the_base_models_files(base: Artifact, tmp_path: Path) -> None:
    """By precision, and of frozen parameters the weights alone."""
    sizes = parameters(base)
    everything = sum(sizes.values())
    phase = make_swapped_phase(tmp_path)
    assert needed_bytes(phase, base) == 18 * everything
    assert needed_bytes(phase.with_values(mixed_precision="no"), base) == 20 * everything
    frozen = sum(size for name, size in sizes.items() if "down_blocks" in name)
    part = phase.with_values(frozen_parameters=["down_blocks"])
    assert needed_bytes(part, base) == 18 * everything - 16 * frozen
    assert needed_bytes(phase.with_values(offload_param="cpu"), base) == 16 * everything
    on_host = phase.with_values(offload_param="cpu", offload_optimizer="cpu")
    assert not on_host.swaps
    assert needed_bytes(on_host, base, "cpu") == 20 * everything
    on_host = on_host.with_values(offload_param="none")
    assert needed_bytes(on_host, base, "cpu") == 18 * everything
    smaller = on_host.with_values(bf16_optimizer_states=True)
    assert needed_bytes(smaller, base, "cpu") == 14 * everything


def test_space_of_an_adapter_is_the_adapters(base: Artifact, tmp_path: Path) -> None:
    """Counted as peft would make it."""
    from diffusers import UNet2DConditionModel

    from zerotrain.models.families.lora import add_adapter

    lora = {"rank": 3, "alpha": 3.0, "dropout": 0.0, "target_modules": ["to_k", "conv1"]}
    model = UNet2DConditionModel.from_pretrained(base.folder / "unet")
    everything = sum(parameter.numel() for parameter in model.parameters())
    add_adapter(model, seed=0, **lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    phase = make_swapped_phase(tmp_path).with_values(lora=lora)
    assert needed_bytes(phase, base) == 16 * trained + 2 * (everything + trained)


def test_the_stage_gives_the_ranks_their_folder(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the op, and for the time of the training."""
    asked: list[str] = []
    monkeypatch.setattr(compiled_ops, "build_swap_op", lambda: asked.append("op"))
    phase = make_swapped_phase(tmp_path)
    with launcher.swap_arguments(phase, inputs / "base") as words:
        assert words == ["--swap", str(next(tmp_path.iterdir()))]
        assert asked == ["op"]
    assert list(tmp_path.iterdir()) == []
    in_memory = phase.with_values(offload_optimizer="cpu", offload_param="cpu")
    with launcher.swap_arguments(in_memory, inputs / "base") as words:
        assert words == []


def test_each_machine_has_a_folder_and_room_for_its_share(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a phase of two machines; on one alone it swaps all there."""
    asked: list[int] = []
    module = "zerotrain.training.process.swap_folder"
    monkeypatch.setattr(f"{module}.check_disk", lambda _, needed: asked.append(needed))
    monkeypatch.setattr(compiled_ops, "build_swap_op", lambda: None)
    phase = make_swapped_phase(tmp_path).with_values(machines=2, num_processes=4)
    first, second, alone = (
        launcher.swap_arguments(phase, inputs / "base", machines) for machines in (2, 2, 1)
    )
    with first as one, second as other, alone:
        assert one[0] == other[0] == "--swap"
        assert one[1] != other[1]
    assert asked[0] == asked[1] == asked[2] // 2 > 0
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_job_is_found_on_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands below a variable is made there, where the variable's folder is; nothing else."""
    monkeypatch.setenv("JOB_DISK", str(tmp_path))
    phase = make_swapped_phase(tmp_path).with_values(offload_path="${JOB_DISK}/a/swap")
    with swap_folder(phase, 0) as (folder, _):
        assert folder.parent == tmp_path / "a" / "swap"
    monkeypatch.setenv("JOB_DISK", str(tmp_path / "away"))
    assert "/away/a/swap is no folder" in refused(phase).what
    monkeypatch.delenv("JOB_DISK")
    assert "JOB_DISK is not set on " in refused(phase).what
    assert not (tmp_path / "away").exists()


@pytest.mark.slow
def test_a_machine_that_cannot_swap_is_answered_by_its_launcher(
    inputs: Path, tmp_path: Path
) -> None:
    """In progress/, where the stage reads it: the launcher may be on another machine."""
    away = make_swapped_phase(tmp_path).with_values(offload_path="$NOWHERE/swap", engine="torch")
    write_run_yaml(away, tmp_path / "run.yaml")
    words = [
        *(sys.executable, "-m", "zerotrain.training.process.launcher", str(tmp_path)),
        *("--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"),
        *("--dynamo_backend", "no", "--module", "zerotrain.training.rank"),
        *("--launch", str(tmp_path), "--base", str(inputs / "base"), "--cache", str(tmp_path)),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    left = read_exit_record(tmp_path)
    assert left
    assert left.code == 2
    assert left.reason.startswith(
        "launch.offload_path $NOWHERE/swap: the variable NOWHERE is not set on "
    )
    assert left.hint


def test_a_missing_op_leaves_nothing(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it start a training."""

    def refuse() -> None:
        raise PipelineError("no libaio", hint="install it")

    monkeypatch.setattr(compiled_ops, "build_swap_op", refuse)
    with (
        pytest.raises(PipelineError, match="no libaio"),
        launcher.swap_arguments(make_swapped_phase(tmp_path), inputs / "base"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
