"""What a computation ran on: versions, switches, device."""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from zerotrain.machine import device as module
from zerotrain.machine.device import device_software, software


def test_versions_are_those_of_the_installed_packages() -> None:
    """A package counts with its complete version; one that is missing is left out."""
    found = software(("torch", "no-such-package"))
    assert found["versions.torch"] == version("torch")
    assert "versions.python" in found
    assert "versions.no-such-package" not in found


def test_only_switches_that_are_set_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that chooses other arithmetic is recorded with its value."""
    for name in module.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert not [name for name in software() if name.startswith("env.")]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert software()["env.NVIDIA_TF32_OVERRIDE"] == "0"


def test_a_gpu_is_named_with_its_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Device, driver and the libraries that torch was built with."""
    driver = tmp_path / "version"
    driver.write_text("570.86.15\n")
    monkeypatch.setattr(module, "DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.version, "hip", None)
    assert device_software(torch.device("cuda", 0)) == {
        "device": "NVIDIA H100",
        "driver": "570.86.15",
        "versions.cuda": "12.9",
        "versions.cudnn": "91002",
        "versions.nccl": "2.27.3",
    }


def test_a_cpu_has_no_driver() -> None:
    """A CPU is named by its kind alone."""
    assert device_software(torch.device("cpu")) == {"device": "cpu"}
