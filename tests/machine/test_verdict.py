"""What may run where, for machines that are not here."""

from __future__ import annotations

import pytest
from tests.machine.fakes import A100, T4, machine

from zerotrain.machine.detect import (
    Accelerator,
    Machine,
    notices,
    usable_engines,
    usable_precisions,
)

CARD = A100.__class__(name="card")


@pytest.mark.parametrize("kind", ["cuda", "rocm", "npu", "cpu"])
def test_deepspeed_runs_everywhere_but_on_mps(kind: Accelerator) -> None:
    """And plain PyTorch everywhere."""
    assert usable_engines(machine(kind)) == {"torch": "", "deepspeed": ""}
    on_mps = usable_engines(machine("mps", CARD))
    assert on_mps["torch"] == ""
    assert on_mps["deepspeed"].startswith("DeepSpeed does not run on MPS")


@pytest.mark.parametrize(
    ("here", "bf16", "fp16"),
    [
        (machine("cuda", A100, A100), "", ""),
        (machine("cuda", A100, T4), "Tesla T4 (compute capability 7.5) does not compute bf16", ""),
        (machine("rocm", CARD), "", ""),
        (machine("cpu"), "", "DeepSpeed does not train fp16 on a CPU without instructions for it"),
        (machine("cpu", fp16=True), "", ""),
    ],
    ids=["A100", "a T4 among them", "ROCm", "CPU", "CPU with fp16"],
)
def test_precisions_under_deepspeed(here: Machine, bf16: str, fp16: str) -> None:
    """One card below Ampere is enough."""
    assert usable_precisions(here, "deepspeed") == {"no": "", "bf16": bf16, "fp16": fp16}
    assert usable_precisions(here, "torch") == {"no": "", "bf16": bf16, "fp16": ""}


def test_untested_accelerators_are_announced() -> None:
    """The tested ones are not."""
    assert notices(machine("cuda", A100)) == notices(machine()) == []
    for kind, name in (("rocm", "ROCm"), ("npu", "Ascend NPU"), ("mps", "MPS")):
        (said,) = notices(machine(kind, CARD))  # type: ignore[arg-type]
        assert said.startswith(f"{name}: untested")
