"""Buffers that change while a model trains are refused: no checkpoint holds them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from zerotrain.errors import PipelineError
from zerotrain.models.quantized_linear import QuantizedLinear
from zerotrain.training import checks
from zerotrain.training.checks import Buffers

PHASE = SimpleNamespace(phase="plain")


class Table(torch.nn.Module):
    """A table that forward passes may change, as a rotary embedding's."""

    def __init__(self, rope_type: str = "default") -> None:
        super().__init__()
        self.rope_type = rope_type
        self.register_buffer("inv_freq", torch.ones(3), persistent=False)
        self.register_buffer("none", None)


def test_statistics_are_refused_by_name() -> None:
    """BatchNorm's, which torch writes without counting it; evaluated, they stay."""
    model = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"norm": torch.nn.BatchNorm1d(3)})})
    held = Buffers(model)
    norm = model["module"]["norm"]
    norm.eval()(torch.randn(4, 3))
    held.check_unchanged(PHASE)
    norm.train()(torch.randn(4, 3))
    with pytest.raises(PipelineError) as caught:
        held.check_unchanged(PHASE)
    assert caught.value.what == (
        "phase plain: training changes 3 buffers of the model: norm.num_batches_tracked, "
        "norm.running_mean, norm.running_var; no checkpoint holds buffers, so a resume or a switch "
        "would begin with the base's"
    )
    assert "rope_type" in str(caught.value)


def test_large_buffers_that_nothing_writes_are_hashed_once(monkeypatch) -> None:
    """A table of positions has 200 MiB. Another write of the same values, as DDP's of those of the
    first process, changes nothing."""
    hashed = []
    digest = checks.compute_digest
    monkeypatch.setattr(checks, "compute_digest", lambda one: hashed.append(1) or digest(one))
    monkeypatch.setattr(checks, "LARGE", 8)
    table = Table()
    held = Buffers(table)
    for _ in range(5):
        held.check_unchanged(PHASE)
    assert len(hashed) == 1
    table.inv_freq.copy_(torch.ones(3))
    held.check_unchanged(PHASE)
    assert len(hashed) == 2
    table.inv_freq = torch.tensor([1.0, 1.0, -0.0])
    with pytest.raises(PipelineError, match="changes 1 buffer of the model: inv_freq;"):
        held.check_unchanged(PHASE)


def test_what_each_batch_decides_again_is_no_history() -> None:
    """longrope has one of two tables, by the batch alone; dynamic keeps the longest seen."""
    for rope_type, refused in (
        ("longrope", False),
        ({"full": "longrope"}, False),
        ("dynamic", True),
        ({"full": "longrope", "own": "dynamic"}, True),
    ):
        table = Table(rope_type)
        held = Buffers(table)
        table.inv_freq.mul_(2)
        assert bool(held.list_changed()) is refused


def test_codes_of_frozen_weights_are_not_read() -> None:
    """They are as large as the model, and nothing writes them."""
    layer = QuantizedLinear(torch.nn.Linear(64, 64), "int8-quanto")
    assert dict(layer.named_buffers())
    assert not Buffers(torch.nn.Sequential(layer)).names


@pytest.mark.parametrize(
    ("preset", "processes"),
    [("torch", 1), pytest.param("zero2_offload", 2, marks=pytest.mark.slow)],
)
def test_a_training_with_running_statistics_is_refused(training, preset, processes) -> None:
    """At its first step, before a checkpoint, with exit code 2; frozen by the base, it trains."""
    training.phase("a", preset, 3, family="running", num_processes=processes, save_every=1)
    for process in training.start_ranks("a", processes):
        process.join(120)
    said = training.output.read_text()
    left = json.loads((training.progress("a") / "exit.json").read_text())
    assert left["code"] == 2
    assert "changes 3 buffers of the model: statistics.num_batches_tracked, " in left["reason"]
    assert "Traceback" not in said
    assert not list(training.progress("a").glob("step-*"))
    assert not (training.progress("a") / "metrics.jsonl").read_text()
