"""The command that continues a phase's steps under its current launch."""

from __future__ import annotations

import shlex
from collections.abc import Collection

from zerotrain.launch.resolved import ResolvedPhase

OF_PRESET = {"engine", "zero_stage", "offload_optimizer", "offload_param"}
"""Keys that a preset sets."""


def switch_command(phase: ResolvedPhase, differing: Collection[str]) -> str:
    """Return the `zerotrain switch` line that continues a phase under its current launch.

    Args:
        phase: The phase, with its current launch.
        differing: Keys whose values differ in the launch of its saved steps, such as "zero_stage".

    Returns:
        The command with an option for each key that has one; without any, with the preset.
    """
    words = ["zerotrain", "switch", phase.run]
    own = {
        "num_processes": ("--num-processes", phase.launch.num_processes),
        "mixed_precision": ("--mixed-precision", phase.launch.mixed_precision),
    }
    named = own.keys() & set(differing)
    if OF_PRESET & set(differing) or not named:
        words += ["--to", phase.launch.preset]
    for key, (flag, value) in own.items():
        if key in named:
            words += [flag, str(value)]
    return shlex.join(words)
