"""Small training programs as other people write them, for benchmarks/external_checkpoints.py.

Each module has `PROGRAMS`, and is what runs them: `python -m external_programs.NAME JOB.json`, or
under torchrun where a program has several processes. A program trains a model on the given batches,
saves a checkpoint with its own library, trains on, and records what it held at both moments.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODULES = ("accelerate_plain", "accelerate_deepspeed", "adapter", "trainer", "deepspeed_engine")
"""Modules of this package that have programs."""
SAVED_STEP, LAST_STEP = 5, 10
"""A program saves after so many steps, and ends after so many."""
BATCH = 4
"""Samples of a step, over all processes."""
RATE, DECAY, CLIP = 1e-3, 0.01, 1.0
BETAS, EPSILON = (0.9, 0.999), 1e-8
"""AdamW's values, which our configuration has as well."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One way to write a checkpoint, and how our run is configured that continues it."""

    name: str
    """The table's row: library and layout."""
    module: str
    """The module of this package that runs it."""
    family: str = "sdxl"
    processes: int = 1
    """Above 1 it runs under torchrun."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the module's `train` reads of it, JSON."""
    checkpoint: str = f"checkpoint-{SAVED_STEP}"
    """The checkpoint, relative to the folder that the program writes into."""
    resume: Mapping[str, Any] = field(default_factory=dict)
    """Options of `resume_from_checkpoint` in addition to the folder."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Our run's further keys, such as `lora`; values of `train` are added to the common ones."""
    preset: str = "torch"
    """The launch preset of our run."""
    without_moments: bool = False
    """The checkpoint has none: the program continues with a new optimizer, too."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the program's processes."""


def all_programs() -> list[Program]:
    """Return the programs of all modules, in the table's order."""
    return [
        program
        for module in MODULES
        for program in importlib.import_module(f"{__name__}.{module}").PROGRAMS
    ]
