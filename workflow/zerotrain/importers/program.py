"""The supported programs: their values for "auto" and for missing keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerotrain.importers.keys import DIFFSYNTH, SIMPLETUNER, TRAINER
from zerotrain.launch.keys import Key


@dataclass(frozen=True)
class Program:
    """A program, with its given arguments."""

    name: str
    table: Mapping[str, Key] = field(default_factory=dict)
    """Its arguments; empty if only the file is known."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values in its code, by our keys."""
    known: bool = True
    """Whether the arguments are complete, so that all others have their defaults."""

    def value(self, ours: str) -> tuple[Any, str] | None:
        """Return its value of one of our keys, and its source; None if only its script knows."""
        if ours in self.fixed:
            return self.fixed[ours], f"in the code of {self.name}"
        rows = [key for key in self.table.values() if key.ours == ours]
        for key in rows:
            if key.name in self.arguments:
                return self.arguments[key.name], f"{self.name} takes it from {key.name}"
        for key in rows:
            if key.default is not None:
                return key.default, f"{self.name}'s own {key.name}"
        return None

    def argument(self, ours: str) -> str | None:
        """Return the argument that was given for one of our keys."""
        rows = [key.name for key in self.table.values() if key.ours == ours]
        return next((name for name in rows if name in self.arguments), None)

    def given(self, name: str) -> Any:
        """Return an argument, or None if it was not given."""
        return self.arguments.get(name)


ACCELERATE = Program("accelerate")
RUN = Program("the run")
"""A run that refers to a file: the run sets what the file does not give."""


def trainer(arguments: Mapping[str, Any] | None = None) -> Program:
    """Return the Trainer of transformers, which openMind's guide also uses."""
    return Program("HF Trainer", TRAINER, arguments or {}, known=arguments is not None)


def simpletuner(arguments: Mapping[str, Any]) -> Program:
    """Return SimpleTuner."""
    return Program("SimpleTuner", SIMPLETUNER, arguments)


def diffsynth(arguments: Mapping[str, Any]) -> Program:
    """Return DiffSynth-Studio, with batches of one sample and without gradient clipping."""
    fixed = {"train.global_batch_size": 1, "train.max_grad_norm": 0.0}
    return Program("DiffSynth-Studio", DIFFSYNTH, arguments, fixed)
