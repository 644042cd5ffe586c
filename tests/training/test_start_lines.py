"""What a training says it will do is what it does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.builders.phases import make_tiny_phase

from zerotrain.machine.host import gib
from zerotrain.models.quantized_linear import quantize_linear_layers
from zerotrain.training.process.start_lines import format_count, start_details, start_lines


def lines(tmp_path: Path, model: torch.nn.Module, **changes: Any) -> list[str]:
    """The terminal's lines of an engine that trains what requires a gradient, then the log's."""
    phase = make_tiny_phase("a", "torch", 100).with_values(**changes)
    shapes = {n: list(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    engine: Any = SimpleNamespace(
        shapes=shapes, world_size=phase.launch.num_processes, device=torch.device("cpu")
    )
    shown = start_lines(model, engine, phase, 10, tmp_path)
    return [*shown, "log:", *start_details(engine, phase, 10, tmp_path)]


def test_the_lines_say_what_is_trained_on_what_and_what_is_saved(tmp_path) -> None:
    """All of a model: parameters, samples, epochs, disk, and where the curves are."""
    said = lines(tmp_path, torch.nn.Linear(1023, 1000))
    assert said[:3] == [
        "torch on cpu, steps 10 to 100, global batch 4",
        "trains all 1.02 M parameters on 360 samples: 15 epochs of 24",
        "log:",
    ]
    # 1,024,000 weights and two moments of 4 bytes; the steps 10 to 100 save once
    assert said[3].startswith("saves 11.7 MiB every 100 steps and keeps 2: up to 11.7 MiB of the ")
    assert said[4] == (
        f"curves: {tmp_path}/metrics.jsonl, `tensorboard --logdir {tmp_path}/tensorboard`; "
        "time left: after the first steps"
    )


def test_a_disk_that_is_too_small_is_not_called_large_enough(tmp_path, monkeypatch) -> None:
    """Three checkpoints while the third is written; what happens where they do not fit is
    reported."""
    monkeypatch.setattr(
        "zerotrain.training.process.start_lines.shutil.disk_usage",
        lambda _: SimpleNamespace(free=24 << 20),
    )
    said = lines(tmp_path, torch.nn.Linear(1023, 1000), save_every=10)
    assert said[3] == "log:"
    assert said[2] == (
        "saves 11.7 MiB every 10 steps and keeps 2: up to 35.2 MiB, more than the 24.0 MiB "
        f"that are free in {tmp_path}: the oldest are removed before their time"
    )


def test_those_kept_for_good_and_the_best_are_format_count(tmp_path) -> None:
    """keep_every keeps steps 30, 60 and 90, validation the best one; two and one are as ever."""
    model = torch.nn.Linear(1023, 1000)
    said = lines(tmp_path, model, keep_every=30, save_every=30, validation={"eval_steps": 10})
    assert f"up to {gib(12_288_000 * 7)} of the " in said[3]


def test_an_adapter_is_named_as_a_share_of_all(tmp_path) -> None:
    """And a batch by what it is made of, processes by their number."""
    model = torch.nn.Sequential(torch.nn.Linear(999, 1000), torch.nn.Linear(1000, 10, bias=False))
    model[0].requires_grad_(False)
    said = lines(
        tmp_path, model, num_processes=2, gradient_accumulation_steps=2, micro_batch_size=1
    )
    assert said[0] == (
        "torch on 2 processes, steps 10 to 100, global batch 4 (1 x 2 accumulated x 2 processes)"
    )
    assert said[1] == "trains 10 k of 1.01 M parameters (0.99%) on 360 samples: 15 epochs of 24"


def test_quantized_layers_count_as_parameters(tmp_path) -> None:
    """And the line says how many there are and what they take."""
    model = torch.nn.Sequential(torch.nn.Linear(999, 1000), torch.nn.Linear(1000, 10, bias=False))
    model[0].requires_grad_(False)
    quantize_linear_layers(model, "nf4", ["1"])
    said = lines(tmp_path, model)
    begin = "trains 10 k of 1.01 M parameters (0.99%), 1 frozen layers in nf4 (0.5 MiB) on"
    assert said[1].startswith(begin), said[1]


def test_what_auto_has_planned_is_repeated(tmp_path) -> None:
    """The planner's own words, and no line where no one has planned."""
    sources: Any = {"preset": ("derived", "needs 20.5 GiB of 24.0 GiB")}
    model = torch.nn.Linear(4, 4)
    assert "memory: needs 20.5 GiB of 24.0 GiB" in lines(tmp_path, model, sources=sources)
    assert not any(line.startswith("memory") for line in lines(tmp_path, model))


def test_other_trackers_are_named(tmp_path) -> None:
    """After the files that are here."""
    said = lines(tmp_path, torch.nn.Linear(4, 4), report_to=["wandb", "mlflow"])
    assert said[-1] == (
        f"curves: {tmp_path}/metrics.jsonl, wandb, mlflow; time left: after the first steps"
    )


def test_counts_as_people_read_them() -> None:
    """Three digits and a letter."""
    assert [format_count(n) for n in (999, 1500, 23_200_000, 2_567_463_684)] == [
        "999", "1.5 k", "23.2 M", "2.57 B",
    ]  # fmt: skip
