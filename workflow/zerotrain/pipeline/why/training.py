"""What would happen to a phase's steps: trained, continued, trained again, or kept.

As zerotrain.training.checkpointing.edited and published decide when the training starts, foreseen
from the plan: launch files that are not rendered yet cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zerotrain.config.models import Phase
from zerotrain.config.section import Role
from zerotrain.launch.resolved import keys_of
from zerotrain.pipeline.switch.point import published_end
from zerotrain.pipeline.terminal.changes import Change
from zerotrain.training.checkpointing.preflight import LAUNCH_KEYS
from zerotrain.training.checkpointing.progress_folder import saved_steps

SWITCHED = {"preset", *LAUNCH_KEYS}
"""Keys of a phase that only a switch may change once it has steps."""


@dataclass(frozen=True)
class Training:
    """What a phase's job does.

    Args:
        what: In a sentence's words.
        steps: Steps that it trains; None if a value decides that cannot be known yet.
        restarts: Whether steps that exist are set aside.
        refused: Whether the job would end with an error.
        other_end: Whether an earlier step becomes its result.
    """

    what: str
    steps: int | None
    restarts: bool = False
    refused: bool = False
    other_end: bool = False


def foresee_training(
    phase: Phase, folder: Path, span: tuple[int, int] | None, changes: Iterable[Change], other: bool
) -> Training:
    """Foresee a phase's training.

    Args:
        phase: The phase, as configured.
        folder: Its folder, results/RUN/PHASE.
        span: Its first and last step; None if unknown.
        changes: Changed values that it trains with.
        other: Whether its data, its base or the state that it starts from is another.
    """
    published = published_end(folder / "checkpoint")
    saved = sorted({*saved_steps(folder / "progress"), *([published] if published else [])})
    if span is None:
        known = f"its {saved[-1]:,} steps" if saved else "nothing is trained yet"
        return Training(f"trains to {phase.until} ({known})", None)
    start, end = span
    whole = f"from step {start:,} to {end:,}"
    if not saved:
        return Training(f"trains {whole}", end - start)
    values = [change for change in changes if counts(change)]
    switched = [one.key for one in values if one.key.rpartition(".")[2] in SWITCHED]
    if switched:
        return Training(
            f"is refused: its {saved[-1]:,} steps have another {', '.join(switched)}; "
            "`zerotrain switch` continues them",
            0,
            refused=True,
        )
    newest = max((step for step in saved if step <= end), default=None)
    if (values or other) and phase.train.on_change == "stop":
        return Training("is refused: train.on_change: stop", 0, refused=True)
    if (values or other) and phase.train.on_change == "restart":
        aside = f"trains again {whole}; its steps up to {saved[-1]:,} are set aside"
        return Training(aside, end - start, restarts=True)
    if newest is None:
        return Training(f"trains again {whole}: its steps are all after {end:,}", end - start, True)
    if newest == end and published not in (None, end):
        return Training(f"publishes its step {end:,}, no step is trained", 0, other_end=True)
    if newest == end:
        return Training("is kept: what it trains is the same", 0)
    return Training(f"continues from step {newest:,} to {end:,}", end - newest)


def counts(change: Change) -> bool:
    """Return whether a changed value of a phase, other than its end, is one that it trains with."""
    section, _, key = change.key.rpartition(".")
    if key in SWITCHED:
        return True
    if section.startswith("validation") or change.key in ("until", "name", "phase"):
        return False
    return key not in keys_of(Role.UNTRAINED) | keys_of(Role.ROUNDING)
