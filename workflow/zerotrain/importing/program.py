"""The programs whose configurations are read: what each puts in place of "auto" and of nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerotrain.importing.keys import Key
from zerotrain.importing.keys_programs import DIFFSYNTH, SIMPLETUNER, TRAINER


@dataclass(frozen=True)
class Program:
    """A program, with the arguments it was given."""

    name: str
    table: Mapping[str, Key] = field(default_factory=dict)
    """Its arguments; without them only the file is known."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values in its code, by our keys."""
    known: bool = True
    """Whether the arguments are all that it was given, so that others have their defaults."""

    def value(self, ours: str) -> tuple[Any, str] | None:
        """What it would take for one of our keys, and why; None where only its script knows."""
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
        """The argument that was given for one of our keys."""
        rows = [key.name for key in self.table.values() if key.ours == ours]
        return next((name for name in rows if name in self.arguments), None)

    def given(self, name: str) -> Any:
        """An argument, or None where it was not given."""
        return self.arguments.get(name)


ACCELERATE = Program("accelerate")
RUN = Program("the run")
"""A run of ours that points at a file: what the file leaves open, the run says."""


def trainer(arguments: Mapping[str, Any] | None = None) -> Program:
    """The Trainer of transformers, which openMind's guide uses too."""
    return Program("HF Trainer", TRAINER, arguments or {}, known=arguments is not None)


def simpletuner(arguments: Mapping[str, Any]) -> Program:
    """SimpleTuner."""
    return Program("SimpleTuner", SIMPLETUNER, arguments)


def diffsynth(arguments: Mapping[str, Any]) -> Program:
    """DiffSynth-Studio, whose batches are of one sample."""
    return Program("DiffSynth-Studio", DIFFSYNTH, arguments, {"train.global_batch_size": 1})
