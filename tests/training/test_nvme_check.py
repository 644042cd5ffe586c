"""`zerotrain doctor --nvme` compares NVMe offload with CPU offload, on this machine's disk."""

from __future__ import annotations

import inspect
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.builders.phases import make_swapped_phase, write_launch
from tests.builders.processes import is_running, wait_until

from zerotrain.errors import PipelineError
from zerotrain.machine import compiled_ops
from zerotrain.training.engines import zero_corrections
from zerotrain.training.process import nvme_check

LOSSES = [1.0, 0.9, 0.8, 0.7, 0.6]
EQUAL = nvme_check.Trial(cpu=LOSSES, nvme=LOSSES, state_deviation=0.0)


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    """The launch files of that phase."""
    return write_launch(tmp_path, make_swapped_phase(tmp_path))


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    """A swap folder."""
    folder = tmp_path / "swap"
    folder.mkdir()
    return folder


def test_the_check_leaves_the_disk_as_it_was(
    tmp_path: Path, launch: Path, swap: Path, fresh_ops: Path, stand_in: Path
) -> None:
    """The trial has a swap folder of its own, and the figures are in the message."""
    trial = json.dumps({"cpu": LOSSES, "nvme": LOSSES, "state_deviation": 0.0})
    # The trial's sixth word is its folder; the other calls build ops.
    script = f"""[ -d "$6" ] && echo '{trial}' > "$6/trial.json"; exit 0"""
    stand_in.write_text(script, encoding="utf-8")
    said = nvme_check.check(make_swapped_phase(swap), launch)
    assert "5 steps of a small model give the numbers of CPU offload" in said
    assert [*swap.iterdir()] == []


def test_other_numbers_are_refused_with_the_figures(tmp_path: Path) -> None:
    """Both losses of each step that differs."""
    wrong = replace(EQUAL, nvme=[1.0, 0.95, 0.8, 0.7, 0.65], state_deviation=0.02)
    with pytest.raises(PipelineError) as caught:
        nvme_check.judge(make_swapped_phase(tmp_path), wrong)
    assert "step 2: 0.95 instead of 0.9; step 5: 0.65 instead of 0.6" in caught.value.what
    assert "step 3" not in caught.value.what
    assert "deviate by 0.02" in caught.value.what
    assert "zero3_offload" in caught.value.hint


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e-6])
def test_a_state_that_differs_alone_is_refused(tmp_path: Path, value: float) -> None:
    """The losses of five steps may not show it yet."""
    with pytest.raises(PipelineError, match="losses agree, and master weights"):
        nvme_check.judge(make_swapped_phase(tmp_path), replace(EQUAL, state_deviation=value))


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """NaN compares unequal to everything, so it must not slip through."""
    trial = replace(EQUAL, nvme=[*LOSSES[:4], float("nan")])
    with pytest.raises(PipelineError, match=r"step 5: nan instead of 0\.6"):
        nvme_check.judge(make_swapped_phase(tmp_path), trial)


def test_a_crash_is_one_sentence(
    tmp_path: Path, launch: Path, swap: Path, fresh_ops: Path, stand_in: Path
) -> None:
    """With the error's own line, the log kept, and the packages that may be missing."""
    stand_in.write_text(
        "echo 'RuntimeError: libaio.so.1: cannot open'; echo bye; exit 3", encoding="utf-8"
    )
    with pytest.raises(PipelineError, match=r"ended with code 3.*libaio\.so\.1") as caught:
        nvme_check.run_trial(make_swapped_phase(tmp_path), launch, swap)
    assert "libaio-dev" in caught.value.hint
    assert "libaio-devel" in caught.value.hint
    assert "python -m zerotrain.machine.compiled_ops --async-io" in caught.value.hint
    assert "RuntimeError" in (fresh_ops / "nvme-check.log").read_text()


@pytest.mark.slow
def test_a_trial_that_hangs_is_ended(
    tmp_path: Path, launch: Path, swap: Path, fresh_ops: Path, stand_in: Path
) -> None:
    """With its children, after the time-out."""
    stand_in.write_text(f"sleep 60 & echo $! > {tmp_path}/pid; wait", encoding="utf-8")
    start = time.monotonic()
    with pytest.raises(PipelineError, match="did not end within 1 s"):
        nvme_check.run_trial(make_swapped_phase(tmp_path), launch, swap, timeout_s=1)
    assert time.monotonic() - start < 20
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(child), "the end of the trial's child")


def test_a_missing_op_names_the_package(fresh_ops: Path, stand_in: Path) -> None:
    """Built on demand; without libaio the sentence says what to install and to run."""
    stand_in.write_text(
        '[ "$4" != async_io ] || { echo "error: libaio is missing"; exit 1; }', encoding="utf-8"
    )
    with pytest.raises(PipelineError, match="async_io did not build: error: libaio") as caught:
        compiled_ops.build_swap_op()
    assert "libaio-dev" in caught.value.hint
    assert "libaio-devel" in caught.value.hint
    stand_in.write_text("", encoding="utf-8")
    compiled_ops.build_swap_op()
    stand_in.write_text("exit 1", encoding="utf-8")
    compiled_ops.build_swap_op()  # it is there: nothing is started


def test_launch_files_are_pointed_at_the_trainings_folder(launch: Path, swap: Path) -> None:
    """Every target that swaps, and nothing else."""
    config = json.loads((launch / "deepspeed.json").read_text())
    before = json.loads((launch / "deepspeed.json").read_text())
    zero_corrections.point_to(config, swap)
    for target in ("offload_optimizer", "offload_param"):
        assert config["zero_optimization"][target].pop("nvme_path") == str(swap)
        del before["zero_optimization"][target]["nvme_path"]
    assert config == before


class OneFile:
    """DeepSpeed's handle for reads; it notes where they went and gives ones."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        self.addresses.append(buffer.data_ptr())
        buffer.fill_(float(path))
        return 0

    def wait(self) -> int:
        return 1


def test_gradients_are_never_read_straight_to_their_place() -> None:
    """It is aligned by chance alone; what was read comes to it, and nothing else changes."""
    parts = {1: SimpleNamespace(path="3", offset=1, length=4)}
    info = SimpleNamespace(
        swapped_gradients={**parts, 6: SimpleNamespace(path="5", offset=6, length=2)}
    )
    swapper = SimpleNamespace(swap_params_info={"0_2": info}, _swap_in_pinned_gradients=None)
    zero_corrections.read_gradients_through_aligned_memory(
        SimpleNamespace(optimizer_swapper=swapper)
    )
    gradient, handle = torch.zeros(9), OneFile()
    swapper._swap_in_pinned_gradients(handle, SimpleNamespace(ds_id="0_2"), gradient)  # type: ignore[misc]
    assert gradient.tolist() == [0, 3, 3, 3, 3, 0, 5, 5, 0]
    inside = range(gradient.data_ptr(), gradient.data_ptr() + gradient.nbytes)
    assert not any(address in inside for address in handle.addresses)


def test_the_reads_that_are_fixed_are_deepspeeds_own() -> None:
    """A version that renames them would continue with wrong updates."""
    from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import (
        PartitionedOptimizerSwapper,
    )

    parameters = inspect.signature(PartitionedOptimizerSwapper._swap_in_pinned_gradients).parameters
    assert list(parameters) == ["self", "aio_handle", "parameter", "gradient_tensor"]


SWAP_OP = compiled_ops.ops_folder() / compiled_ops.SWAP_BUILT


@pytest.mark.slow
@pytest.mark.skipif(not SWAP_OP.exists(), reason=f"{compiled_ops.BUILD_SWAP_OP} was not run")
def test_the_real_check_passes(tmp_path: Path, swap: Path) -> None:
    """DeepSpeed's own op on this very disk: equal numbers."""
    phase = make_swapped_phase(tmp_path)
    launch = write_launch(tmp_path, phase)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    trial = nvme_check.run_trial(phase, launch, swap)
    assert "give the numbers of CPU offload" in nvme_check.judge(phase, trial)
    assert not (swap / "check").exists()
