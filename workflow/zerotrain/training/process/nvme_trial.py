"""Trains a small model with CPU offload, then with NVMe offload; nvme_check compares them.

python -m zerotrain.training.process.nvme_trial --launch LAUNCH --folder FOLDER

The tensors exceed DeepSpeed's threshold of 1 MiB, so they are really swapped. Their sizes are odd,
several share a sub-group, and the training with NVMe offload is exported and resumed midway.
Output: FOLDER/trial.json with the losses of both trainings and the largest relative difference of
the master weights and moments.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch

from zerotrain.artifact import write_json
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.child_process import end_with_parent
from zerotrain.state.position import MASTER
from zerotrain.state.state import parts_of
from zerotrain.training.engines.zero_engine import ZeroEngine
from zerotrain.training.process.nvme_check import TRIAL
from zerotrain.training.reporting.validation_history import finite_or_none

WIDTHS = (509, 1031, 521, 1049, 13)
"""The first three layers have more than 2^19 weights: over 1 MiB in 16 bits too."""
SUB_GROUP = 1_000_000
"""Elements of a sub-group: two layers fit into one."""
STEPS = 5
RESUMED_AFTER = 3
MICRO_BATCH, ACCUMULATION = 2, 2
LEARNING_RATE = 1e-3

State = dict[str, dict[str, torch.Tensor]]


def main(argv: list[str] | None = None) -> None:
    """Run both trainings and write their results."""
    parser = argparse.ArgumentParser(
        prog="zerotrain.training.process.nvme_trial", description=__doc__
    )
    parser.add_argument("--launch", type=Path, required=True, help="folder of the launch files")
    parser.add_argument("--folder", type=Path, required=True, help="a folder on the disk to check")
    arguments = parser.parse_args(argv)
    end_with_parent()
    phase = read_run_yaml(arguments.launch / "run.yaml")
    zero = phase.derived.deepspeed["zero_optimization"]
    folder: Path = arguments.folder
    weights = {name: p.detach().clone() for name, p in _model().named_parameters()}
    cpu = _train(phase, zero, folder / "cpu", "cpu", range(STEPS), weights)
    first = _train(phase, zero, folder / "first", "nvme", range(RESUMED_AFTER), weights)
    rest = _train(
        phase, zero, folder / "rest", "nvme", range(RESUMED_AFTER, STEPS), weights, first[1]
    )
    deviation = max(
        _deviation(rest[1][name][slot], values)
        for name, slots in cpu[1].items()
        for slot, values in slots.items()
    )
    trial = {
        "cpu": [*map(finite_or_none, cpu[0])],
        "nvme": [*map(finite_or_none, first[0] + rest[0])],
        "state_deviation": finite_or_none(deviation),
    }
    write_json(folder / TRIAL, trial)


def _train(
    phase: ResolvedPhase,
    zero: dict[str, Any],
    folder: Path,
    device: str,
    steps: range,
    weights: dict[str, torch.Tensor],
    state: State | None = None,
) -> tuple[list[float], State]:
    """Train some steps under stage 3, from weights or a state; return losses and final state."""
    folder.mkdir()
    small = _trial_phase(phase, device)
    write_json(folder / "deepspeed.json", _config(small, _zero(zero, device)))
    model = _model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name][MASTER].view_as(parameter) if state else weights[name])
    engine = ZeroEngine(model, small, folder / "deepspeed.json", exact=not state, swap=folder)
    if state:
        known = state
        engine.load_masters(parts_of(lambda name, slot: known[name][slot]))
        engine.load_moments(parts_of(lambda name, slot: known[name][slot]), steps.start)
    losses = []
    for step in steps:
        total = 0.0
        for part in range(ACCUMULATION):
            inputs, targets = _batch(step * ACCUMULATION + part)
            output = engine.model(inputs.to(engine.device, _dtype(phase)))
            loss = (output.float() - targets.to(engine.device)).square().mean()
            engine.backward(loss)
            total += loss.item() / ACCUMULATION
        engine.step(LEARNING_RATE)
        losses.append(total)
    tensors = {f.name: {s: v.cpu().clone() for s, v in f.slots.items()} for f in engine.fragments()}
    engine.model.destroy()  # type: ignore[operator]
    return losses, tensors


def _trial_phase(phase: ResolvedPhase, device: str) -> ResolvedPhase:
    """Return the phase scaled to the model, with biases in a group that is never swapped."""
    optimizer, param = phase.derived.offload_optimizer, phase.derived.offload_param
    biases = {"parameters": ["bias"], "learning_rate": LEARNING_RATE, "adam_weight_decay": 0.0}
    return phase.with_values(
        num_processes=1,
        global_batch_size=MICRO_BATCH * ACCUMULATION,
        micro_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=LEARNING_RATE,
        max_grad_norm=1.0,
        param_groups=[biases],
        offload_optimizer=device if optimizer == "nvme" else optimizer,
        offload_param=device if param == "nvme" else param,
    )


def _config(small: ResolvedPhase, zero: dict[str, Any]) -> dict[str, Any]:
    """Return the launch's DeepSpeed configuration, adapted to the small model."""
    return {
        **small.derived.deepspeed,
        "train_batch_size": small.train.global_batch_size,
        "train_micro_batch_size_per_gpu": small.derived.micro_batch_size,
        "gradient_accumulation_steps": small.train.gradient_accumulation_steps,
        "gradient_clipping": small.train.max_grad_norm,
        "zero_optimization": zero,
    }


def _zero(section: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the launch's ZeRO settings, changed to swap everything, with suitable buffers."""
    zero = {key: dict(v) if isinstance(v, dict) else v for key, v in section.items()}
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device") == "nvme":
            zero[key]["device"] = device
            zero[key].pop("nvme_path", None)
    if zero.get("offload_param", {}).get("device") == "nvme":
        zero["offload_param"] |= {"buffer_size": SUB_GROUP, "max_in_cpu": 0}
    whole = ("stage3_param_persistence_threshold", "stage3_max_live_parameters",
             "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")  # fmt: skip
    return zero | dict.fromkeys(whole, 0) | {"sub_group_size": SUB_GROUP}


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    pairs = itertools.pairwise(WIDTHS)
    layers = [m for a, b in pairs for m in (torch.nn.Linear(a, b), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers[:-1])


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(number)
    first, last = WIDTHS[0], WIDTHS[-1]
    inputs = torch.randn(MICRO_BATCH, first, generator=source)
    return inputs, torch.randn(MICRO_BATCH, last, generator=source)


def _dtype(phase: ResolvedPhase) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        phase.launch.mixed_precision, torch.float32
    )


def _deviation(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    largest = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((values - expected).abs().max() / largest)


if __name__ == "__main__":
    main()
