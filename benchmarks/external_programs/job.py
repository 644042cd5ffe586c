"""What a program is given, and where it records what it held."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from external_programs import BATCH
from zerotrain.cache.reader import read_cache
from zerotrain.launch.files import read_run_yaml
from zerotrain.models.families import load_family
from zerotrain.training.batches import Batches

SLOTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Job:
    """One run of a program, in one of its processes."""

    base: Path
    """The model, in diffusers' or transformers' layout."""
    cache: Path
    launch: Path
    """Launch folder of a run of ours: seed and objective."""
    out: Path
    """The program's own folder."""
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.rank, self.world = (
            int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        phase = read_run_yaml(self.launch / "run.yaml")
        self._family = load_family(phase.family)
        self._batches = Batches(read_cache(self.cache, verify=False), phase)
        self._objective: Any = self._family.objective(self.base, phase.derived.objective)
        self._losses: list[float] = []
        self._held: dict[str, Any] = {}

    def load_model(self) -> torch.nn.Module:
        """Load the untrained model, in train mode."""
        model: torch.nn.Module = self._family.load_model(self.base)
        return model.train()

    def batch(self, step: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return this process's part of the samples of a step, counted from 0."""
        part = BATCH // self.world
        return self._batches.batch(step * BATCH + self.rank * part, part, torch.device(device))

    def loss(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss over a batch."""
        loss: torch.Tensor = self._objective.loss(model, batch).mean()
        return loss

    def record_loss(self, loss: float) -> None:
        """Note the loss of the next step."""
        self._losses.append(loss)

    def record(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        read: Callable[[str, torch.nn.Parameter], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Note what is held after so many steps: weights and moments of every trained parameter.

        Args:
            step: Steps done.
            model: The program's own module, whose parameters' names count.
            optimizer: A torch optimizer over the module's own parameters.
            read: Gives `master`, `exp_avg` and `exp_avg_sq` where no torch optimizer has them.
        """
        held: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if read is not None:
                slots = read(name, parameter)
            else:
                state = optimizer.state[parameter] if optimizer else {}
                slots = {"master": parameter, **{s: state[s] for s in SLOTS if s in state}}
            held[name] = {slot: t.detach().float().cpu().clone() for slot, t in slots.items()}
        self._held[str(step)] = held

    def finish(self) -> None:
        """Write what was noted; process 0 does."""
        if self.rank == 0:
            torch.save({"losses": self._losses, "held": self._held}, self.out / "recorded.pt")


def run(train: Callable[[Job], None]) -> None:
    """Run a module's program on the job that the command line names."""
    torch.set_num_threads(1)
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    options = document.pop("options")
    job = Job(**{key: Path(value) for key, value in document.items()}, options=options)
    train(job)
    job.finish()
