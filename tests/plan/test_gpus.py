"""Known GPUs, and the machine that a plan is for: the one that is described, in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.builders.refusals import refusal
from tests.builders.runs import make_run

from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.launch.planner import planner, report
from zerotrain.launch.planner.gpus import GPUS, find_gpu, read_gpu
from zerotrain.launch.planner.options import PlanOptions
from zerotrain.launch.planner.planner import PlannedMachine, described_machine, this_machine
from zerotrain.machine.detect import Device, Machine
from zerotrain.machine.host import Host

GIB, MIB = 2**30, 2**20
HOST = Host(memory=20 * GIB, available=10 * GIB, cores=2)
VALUES = {
    "family": "causal_lm", "base": "nano", "resolution": 64, "max_length": 64, "batch_size": 1,
    "precision": "bf16", "processes": 1, "lora_rank": None, "gradient_checkpointing": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with 20 GiB."""
    monkeypatch.setattr(planner, "detect", lambda: Machine(accelerator="cpu", host=HOST))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("4090", "RTX 4090"), ("rtx4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"), ("Tesla T4", "T4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("NVIDIA RTX A6000", "RTX A6000"),
        ("A6000", "RTX A6000"), ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("AMD Instinct MI300X", "MI300X"), ("a toaster", None), ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("", None),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_its_names(name: str, known: str | None) -> None:
    """Those of its driver and of people; a variant with other memory is another GPU."""
    found = find_gpu(name)
    assert (found.name if found else None) == known


def test_each_gpu_is_known_by_its_own_name() -> None:
    assert [read_gpu(gpu.name) for gpu in GPUS] == list(GPUS)
    assert [gpu.name for gpu in GPUS if not gpu.bf16] == ["V100", "T4", "RTX 2080 Ti"]


def test_a_name_tells_the_memory() -> None:
    """The size in the name chooses the variant; without one the smallest is safe."""
    sizes = {
        "RTX 4090": 24_564, "A100": 40_960, "NVIDIA A100-SXM4-80GB": 81_920,
        "Tesla V100-SXM2-32GB": 32_768,
    }  # fmt: skip
    found = {name: described_machine(None, None, name).device_memory for name in sizes}
    assert found == {name: mib * MIB for name, mib in sizes.items()}
    assert described_machine(8 * GIB, None, "RTX 4090").device_memory == 8 * GIB


def test_an_unknown_gpu_is_answered_with_the_nearest() -> None:
    text = refusal(described_machine, None, None, "RTX 4095")
    assert "--gpu RTX 4095: this GPU is not known" in text
    assert "did you mean RTX 4090" in text


@pytest.mark.parametrize(
    "given",
    [{"gpu": "RTX 4090"}, {"device_memory": "24 GiB"}, {"gpu": "T4", "device_memory": "1 GiB"}],
)
def test_the_hosts_memory_is_this_machines_unless_it_is_given(given: dict[str, Any]) -> None:
    """Whatever the GPU is; and the plan says so."""
    lines = " ".join(report.plan_report(PlanOptions(**VALUES, **given)))
    assert "and 20.0 GiB of host memory, this machine's" in lines
    lines = " ".join(report.plan_report(PlanOptions(**VALUES, **given, host_memory="64 GiB")))
    assert "and 64.0 GiB of host memory, with 1.0 GiB of the device in reserve" in lines


@pytest.mark.slow
def test_a_plan_does_not_recommend_what_the_host_cannot_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This machine's 2 MiB hold no offloaded optimizer; the way out is named. --fit agrees."""
    small = Machine(accelerator="cpu", host=replace(HOST, memory=2 * MIB))
    monkeypatch.setattr(planner, "detect", lambda: small)
    tight = GIB + 3 * MIB
    text = " ".join(report.plan_report(PlanOptions(**VALUES, device_memory=str(tight))))
    assert "Nothing fits" in text
    assert "of host memory, of 2.0 MiB" in text
    assert "--host-memory '64 GiB' plans for a machine with other host memory" in text
    with pytest.raises(PipelineError, match=r"2\.0 MiB of host memory, this machine's") as caught:
        report.plan_report(PlanOptions(**VALUES, device_memory=str(tight), fit=True))
    assert "--host-memory" in str(caught.value)


def test_host_memory_alone_is_that_of_this_machine_with_more() -> None:
    """On a CPU it is all that there is."""
    lines = " ".join(report.plan_report(PlanOptions(**VALUES, host_memory="3 GiB")))
    assert "+ fits 3.0 GiB of memory" in lines


def test_a_detected_gpu_is_planned_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own figure of memory; speed and link are the table's, and bf16 is asked for in vain."""
    device = Device(name="Tesla T4", total=15 * GIB)
    monkeypatch.setattr(
        planner, "detect", lambda: Machine(accelerator="cuda", host=HOST, devices=(device,))
    )
    lines = " ".join(report.plan_report(PlanOptions(**VALUES)))
    assert "fits 15.0 GiB (T4) and 20.0 GiB of host memory, with" in lines
    assert "40% of 65 TFLOP/s, PCIe 3.0" in lines
    assert "T4 does not compute bf16: set mixed_precision: fp16 (--precision fp16)." in lines


def test_auto_plans_for_the_memory_that_the_phase_names() -> None:
    """A login node renders for nodes that have more; without the key its own memory counts."""
    raw = make_run(family="causal_lm", data={"source": "sums"}, train={"max_length": 32})

    def machine(**launch: str) -> PlannedMachine:
        config = parse_config({**raw, "launch": {"preset": "auto", **launch}}, "c")
        return this_machine(config.phase("a"))

    named = machine(device_memory="24 GiB", host_memory="64 GiB")
    assert (named.device_memory, named.host_memory) == (24 * GIB, 64 * GIB)
    assert not named.host_is_ours
    own = machine(device_memory="24 GiB")
    assert (own.host_memory, own.host_is_ours) == (20 * GIB, True)
    assert machine(host_memory="64 GiB").device_memory == 64 * GIB  # a CPU's
    with pytest.raises(PipelineError, match="host_memory 68719476736, but only preset auto"):
        parse_config({**raw, "launch": {"preset": "zero2", "host_memory": "64 GiB"}}, "c")
