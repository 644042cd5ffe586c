"""Every accelerator is found by what its driver leaves, and none is claimed that torch lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.machine.fakes import A100, GIB, T4, machine

from zerotrain.machine import detect
from zerotrain.machine.detect import (
    Accelerator,
    Machine,
    TorchBuild,
    notices,
    usable_engines,
    usable_precisions,
)

HOST = machine().host
CUDA = TorchBuild("2.13.0", cuda="12.8")
CPU = TorchBuild("2.13.0+cpu")
CARDS = """\
GPU-aa, NVIDIA A100-SXM4-40GB, 40960, 40000, 8.0, 570.86.15
GPU-bb, Tesla T4, 15360, 15000, 7.5, 570.86.15
"""


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device file of this machine is seen, and nothing is hidden."""
    nowhere = {kind: (str(tmp_path / kind),) for kind in detect.DEVICE_FILES}
    monkeypatch.setattr(detect, "DEVICE_FILES", nowhere)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def driver(kind: str) -> None:
    Path(detect.DEVICE_FILES[kind][0]).touch()


def answering(monkeypatch: pytest.MonkeyPatch, **answer: Any) -> None:
    monkeypatch.setattr(detect, "probe", lambda: {"error": "", **answer})


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with NVIDIA's driver, whose nvidia-smi is a script of ours."""
    driver("cuda")
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\ncat {tmp_path}/cards\n')
    program.chmod(0o755)
    (tmp_path / "cards").write_text(CARDS)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return program


def test_without_a_driver_it_is_a_cpu() -> None:
    """And nothing is reported."""
    found = detect._detect(HOST, CPU)
    assert (found.accelerator, found.devices, found.unused) == ("cpu", (), "")


def test_nvidia_smi_gives_memory_and_capability(nvidia_smi: Path, tmp_path: Path) -> None:
    """Without torch being imported for it."""
    found = detect._detect(HOST, CUDA)
    assert (found.accelerator, found.driver) == ("cuda", "570.86.15")
    first, second = found.devices
    assert (first.name, first.total, first.free) == (
        "NVIDIA A100-SXM4-40GB", 40 * GIB, 40000 * 2**20,
    )  # fmt: skip
    assert (first.capability, second.capability) == ((8, 0), (7, 5))
    assert found.below_ampere == second
    assert "compute_cap" in (tmp_path / "asked").read_text()


@pytest.mark.parametrize(
    ("visible", "names"),
    [("1", ["Tesla T4"]), ("1,0", ["Tesla T4", "NVIDIA A100-SXM4-40GB"]), ("GPU-bb", ["Tesla T4"]),
     ("0,7,1", ["NVIDIA A100-SXM4-40GB"])],
)  # fmt: skip
def test_hidden_gpus_are_not_counted(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    """CUDA takes no more at the first that it does not know."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [device.name for device in detect._detect(HOST, CUDA).devices] == names


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_cpu_run_on_a_machine_with_gpus_says_so(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    """It was the user's wish, and shall not surprise later."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = detect._detect(HOST, CUDA)
    assert found.accelerator == "cpu"
    assert found.unused == f"CUDA_VISIBLE_DEVICES={visible!r} hides the GPUs"


def test_a_gpu_under_torch_for_the_cpu_is_reported(nvidia_smi: Path) -> None:
    """Else a training would take a week in silence."""
    found = detect._detect(HOST, CPU)
    assert found.accelerator == "cpu"
    assert found.unused == (
        "an NVIDIA GPU is here, but torch 2.13.0+cpu is built for the CPU alone: it needs torch of "
        "a CUDA build"
    )
    assert "torch is missing" in detect._detect(HOST, None).unused


def test_memory_that_is_shared_with_the_host_has_no_size(nvidia_smi: Path, tmp_path: Path) -> None:
    """nvidia-smi says so in words."""
    (tmp_path / "cards").write_text("GPU-aa, NVIDIA GB10, [N/A], [N/A], 12.1, 580.95\n")
    (device,) = detect._detect(HOST, CUDA).devices
    assert (device.total, device.capability) == (None, (12, 1))


def test_where_nvidia_smi_does_not_answer_torch_is_asked(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a driver that is older than the question, and one that is broken."""
    nvidia_smi.write_text(
        "#!/bin/sh\necho 'Field \"compute_cap\" is not a valid field'; exit 2\n", encoding="utf-8"
    )
    card = {"name": "Tesla V100", "total": 16 * GIB, "free": None, "capability": [7, 0]}
    answering(monkeypatch, accelerator="cuda", devices=[card])
    found = detect._detect(HOST, CUDA)
    assert (found.accelerator, found.devices[0].capability) == ("cuda", (7, 0))
    answering(monkeypatch, accelerator="cpu", devices=[])
    found = detect._detect(HOST, CUDA)
    assert (found.accelerator, found.unused) == ("cpu", "torch cannot use it: it finds none")


@pytest.mark.parametrize(
    ("kind", "build"), [("rocm", TorchBuild("2.13.0+rocm6.4", hip="6.4")), ("npu", CPU)]
)
def test_amd_and_ascend_are_asked_of_torch(
    monkeypatch: pytest.MonkeyPatch, kind: str, build: TorchBuild
) -> None:
    """Each behind its own driver's file."""
    driver(kind)
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda _: object())
    card = {"name": "card", "total": GIB, "free": GIB, "capability": None}
    answering(monkeypatch, accelerator=kind, devices=[card])
    found = detect._detect(HOST, build)
    assert (found.accelerator, [d.name for d in found.devices]) == (kind, ["card"])


def test_amd_and_ascend_without_their_torch_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is needed."""
    driver("rocm")
    assert "needs torch of a ROCm build" in detect._detect(HOST, CUDA).unused
    Path(detect.DEVICE_FILES["rocm"][0]).unlink()
    driver("npu")
    assert detect._detect(HOST, CPU).unused.endswith("it needs torch_npu")


def test_apple_silicon_is_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is the host's."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(detect.platform, "machine", lambda: "arm64")
    found = detect._detect(HOST, CPU)
    assert (found.accelerator, found.devices[0].total) == ("mps", HOST.memory)


def test_detection_holds_no_torch() -> None:
    """Rendering launch files and the stage that trains ask it."""
    code = "import sys\nfrom zerotrain.machine.detect import detect\ndetect()\n"
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_builds_target_is_read_without_importing_torch() -> None:
    """It is what torch itself says."""
    import torch

    found = detect.torch_build()
    assert found is not None
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda)


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
