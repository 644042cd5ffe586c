"""What DeepSpeed's start is spared, and that what is left gives the same."""

from __future__ import annotations

import json

import cpuinfo
import pytest
import torch

from zerotrain.training.engines import zero_corrections


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch, fresh_ops) -> list[int]:
    """A processor that is slow to look at, and how often somebody has."""
    calls: list[int] = []

    def get_cpu_info() -> dict[str, str]:
        calls.append(1)
        return {"arch": "X86_64"}

    get_cpu_info.__module__ = "cpuinfo.cpuinfo"
    fresh_ops.mkdir(parents=True)
    monkeypatch.setattr(cpuinfo, "get_cpu_info", get_cpu_info)
    return calls


def test_the_processor_is_looked_at_once(looked, fresh_ops, monkeypatch):
    """Once in all: later questions, and later processes, get the answer that was written down."""
    slow = cpuinfo.get_cpu_info
    zero_corrections.remember_processor()
    assert [cpuinfo.get_cpu_info(), cpuinfo.get_cpu_info()] == [{"arch": "X86_64"}] * 2
    assert len(looked) == 1
    monkeypatch.setattr(cpuinfo, "get_cpu_info", slow)
    zero_corrections.remember_processor()
    assert cpuinfo.get_cpu_info() == {"arch": "X86_64"}
    assert len(looked) == 1


def test_a_spoilt_note_is_written_again(looked, fresh_ops):
    """What a power cut left of the note is no answer."""
    (fresh_ops / zero_corrections.PROCESSOR).write_text('{"arch"')
    zero_corrections.remember_processor()
    assert cpuinfo.get_cpu_info() == {"arch": "X86_64"}
    assert json.loads((fresh_ops / zero_corrections.PROCESSOR).read_text()) == {"arch": "X86_64"}


def test_muon_is_imported_without_the_compiler(monkeypatch):
    """While DeepSpeed's Muon is imported, torch.compile gives functions back; then it is itself."""
    compiler, seen = torch.compile, []

    def import_module(name: str) -> None:
        seen.append(name)
        assert torch.compile(len) is len
        assert torch.compile(dynamic=True)(len) is len
        raise ImportError

    monkeypatch.setattr(zero_corrections.importlib, "import_module", import_module)
    with pytest.raises(ImportError):
        zero_corrections.import_muon()
    assert torch.compile is compiler
    assert seen == [zero_corrections.MUON]
