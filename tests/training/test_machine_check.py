"""A phase that the machine cannot train is refused before a process is launched."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.builders.phases import make_phase
from tests.builders.refusals import refusal
from tests.machine.fakes import A100, GIB, T4, machine

from zerotrain.errors import PipelineError
from zerotrain.stages import train_phase as stage
from zerotrain.training.process.machine_check import (
    check,
    check_host_memory,
    check_locked_memory,
    main_process_port,
)

CARD = replace(T4, name="card", capability=None)


def test_deepspeed_on_mps_names_what_to_write() -> None:
    """Plain PyTorch is let through, and announced as untested."""
    assert refusal(check, make_phase("zero2"), machine("mps", CARD)) == (
        "ERROR: phase plain: preset zero2 cannot run here: DeepSpeed does not run on MPS: it has "
        "neither collectives nor compiled ops for it\n"
        "  Hint: write `launch: torch` into the phase plain; `launch: auto` would choose the same"
    )
    (said,) = check(make_phase(), machine("mps", CARD))
    assert said.startswith("plain: MPS: untested")


@pytest.mark.parametrize("kind", ["rocm", "npu"])
def test_rocm_and_npu_are_untested_not_refused(kind: Any) -> None:
    """Said once, at the start."""
    assert len(check(make_phase("zero3"), machine(kind, CARD))) == 1


def test_bf16_below_ampere_names_what_to_use() -> None:
    """Under any engine; Ampere passes without a word."""
    for preset in ("torch", "zero2"):
        asked = make_phase(preset, mixed_precision="bf16")
        text = refusal(check, asked, machine("cuda", T4))
        assert "mixed_precision bf16, but Tesla T4 (compute capability 7.5)" in text
        assert "Hint: use mixed_precision: fp16, or no" in text
        assert check(asked, machine("cuda", A100)) == []


def test_fp16_on_a_cpu_is_plain_pytorchs() -> None:
    """As DeepSpeed itself has it."""
    text = refusal(check, make_phase("zero2", mixed_precision="fp16"), machine())
    assert "DeepSpeed does not train fp16 on a CPU" in text
    assert "use mixed_precision: bf16, or no; plain PyTorch (launch: torch) trains fp16" in text
    assert check(make_phase(mixed_precision="fp16"), machine()) == []


def test_weights_of_32_bits_are_not_swapped_on_a_cpu() -> None:
    """DeepSpeed's buffers there are of 16; in memory, on a GPU or in bf16 there is no question."""
    swapping = make_phase("zero3_offload", offload_param="nvme")
    text = refusal(check, swapping, machine())
    assert "mixed_precision no, but on this CPU DeepSpeed swaps weights of 16 bits alone" in text
    assert "use mixed_precision: bf16, or zero3_offload" in text
    for asked, here in (
        (swapping.with_values(mixed_precision="bf16"), machine()),
        (swapping, machine("cuda", A100)),
        (make_phase("zero3_offload"), machine()),
    ):
        assert check(asked, here) == []


def test_more_processes_than_devices_are_refused() -> None:
    """CPU processes share what there is."""
    text = refusal(check, make_phase("zero2", num_processes=3), machine("cuda", A100, A100))
    assert "3 of its processes are to run here, but this machine has 2 CUDA devices" in text
    assert "give launch.num_processes at most that" in text
    eight = make_phase("zero2", num_processes=8, machines=2)
    assert check(eight, machine("cuda", *[A100] * 4), eight.processes_per_machine) == []
    text = refusal(check, eight, machine("cuda", A100), eight.processes_per_machine)
    assert "4 of its processes are to run here, but this machine has 1 CUDA device to" in text
    assert "give launch.processes_per_machine at most that" in text
    assert check(make_phase("zero2", num_processes=2), machine("cuda", A100, A100)) == []
    assert check(make_phase("zero2", num_processes=3), machine()) == []


def test_host_memory_is_refused_beyond_the_limit_and_reported_beyond_what_is_free() -> None:
    """SDXL's 43 GiB on 32, on 64 with 40 free, and on 64."""
    offload, needed = make_phase("zero2_offload"), 43 * GIB
    small = machine(memory=32 * GIB, limit=32 * GIB)
    text = refusal(check_host_memory, offload, small, needed)
    assert "keeps 43.0 GiB in host memory, and this machine has 32.0 GiB, a limit of its" in text
    smaller = "set launch.bf16_optimizer_states: true (4 bytes a trained parameter less)"
    assert smaller in text
    text = refusal(
        check_host_memory, offload.with_values(bf16_optimizer_states=True), small, needed
    )
    assert smaller not in text
    (said,) = check_host_memory(offload, machine(available=40 * GIB), needed)
    assert "43.0 GiB will be kept in host memory, and 40.0 GiB are available now" in said
    assert check_host_memory(offload, machine(), needed) == []


def test_buffers_that_may_not_be_locked_are_refused(tmp_path: Path) -> None:
    """Of 5 x 1e8 elements in 16 bits; without NVMe there are none."""
    section: dict[str, Any] = {
        "offload_param": {"device": "nvme", "buffer_count": 5, "buffer_size": 10**8}
    }
    (tmp_path / "deepspeed.json").write_text(json.dumps({"zero_optimization": section}))
    swapping = make_phase("zero3_offload", mixed_precision="bf16")
    text = refusal(check_locked_memory, swapping, machine(lockable=8 * 2**20), tmp_path)
    assert "locks buffers of 953.7 MiB into memory, and this user may lock 8.0 MiB" in text
    check_locked_memory(swapping, machine(lockable=10**9), tmp_path)
    check_locked_memory(swapping, machine(lockable=None), tmp_path)
    section["offload_param"]["device"] = "cpu"
    (tmp_path / "deepspeed.json").write_text(json.dumps({"zero_optimization": section}))
    check_locked_memory(swapping, machine(lockable=0), tmp_path)


def test_a_port_that_is_named_is_taken_or_refused(tmp_path: Path) -> None:
    """Unnamed, one is found."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump({"main_process_port": port}))
        with pytest.raises(PipelineError, match=f"main_process_port {port} cannot be used"):
            main_process_port(make_phase(), tmp_path)
    assert main_process_port(make_phase(), tmp_path) == port
    (tmp_path / "accelerate.yaml").write_text("num_processes: 1\n")
    assert main_process_port(make_phase(), tmp_path) > 0


def test_the_stage_asks_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: Path
) -> None:
    """Neither ops nor processes."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was started")

    monkeypatch.setattr(stage.compiled_ops, "build", never)
    monkeypatch.setattr(stage, "supervise", never)
    monkeypatch.setattr(stage, "detect", lambda: machine("mps", CARD))
    with pytest.raises(PipelineError, match="cannot run here"):
        stage._launch(
            make_phase("zero2"), tmp_path, inputs / "base", tmp_path, None, None, tmp_path
        )
    monkeypatch.setattr(stage, "detect", lambda: machine(memory=1))
    with pytest.raises(PipelineError, match="in host memory"):
        stage._launch(
            make_phase("zero2_offload"), tmp_path, inputs / "base", tmp_path, None, None, tmp_path
        )
