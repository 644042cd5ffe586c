"""What would happen to a phase's steps: trained, continued, trained again, or kept.

As zerotrain.training.process.start and published decide when the training starts, foreseen
from the plan: launch files that are not rendered yet cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zerotrain.artifact.damage import find_damage
from zerotrain.artifact.manifest import is_published, read_manifest
from zerotrain.artifact.recipe import Difference
from zerotrain.config.models import Phase
from zerotrain.config.section import Role
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import keys_of
from zerotrain.run.phase import PhaseView
from zerotrain.training.checkpointing.preflight import LAUNCH_KEYS
from zerotrain.training.checkpointing.progress_folder import saved_steps, step_folder

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
    phase: Phase,
    folder: Path,
    span: tuple[int, int] | None,
    changes: Iterable[Difference],
    other: bool,
) -> Training:
    """Foresee a phase's training.

    Args:
        phase: The phase, as configured.
        folder: Its folder, results/RUN/PHASE.
        span: Its first and last step; None if unknown.
        changes: Changed values that it trains with.
        other: Whether its data, its base or the state that it starts from is another.
    """
    published = _published_end(folder)
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


def foresee_restoring(folder: Path, span: tuple[int, int] | None) -> Training:
    """Foresee the training of a phase whose checkpoint is removed or damaged.

    Args:
        folder: Its folder, results/RUN/PHASE.
        span: Its first and last step; None if unknown.
    """
    progress = folder / "progress"
    steps = [step for step in saved_steps(progress) if span is None or step <= span[1]]
    whole = [step for step in steps if _is_whole(step_folder(progress, step))]
    if not whole and (steps or is_published(folder / "checkpoint")):
        return Training(f"is refused: {progress} holds no whole checkpoint either", 0, refused=True)
    if not whole:
        return Training("trains again from its start", span and span[1] - span[0])
    if span is None or whole[-1] == span[1]:
        return Training(f"publishes its step {whole[-1]:,} again, no step is trained", 0)
    return Training(f"continues from step {whole[-1]:,} to {span[1]:,}", span[1] - whole[-1])


def _published_end(folder: Path) -> int | None:
    try:
        return PhaseView(folder).end
    except PipelineError:  # it is damaged
        return None


def _is_whole(checkpoint: Path) -> bool:
    """Return whether all files of a rolling checkpoint are there, with their sizes."""
    try:
        return not any(find_damage(checkpoint, read_manifest(checkpoint, None).files, None))
    except PipelineError:
        return False


def counts(change: Difference) -> bool:
    """Return whether a changed value of a phase, other than its end, is one that it trains with."""
    section, _, key = change.key.rpartition(".")
    if key in SWITCHED:
        return True
    if section.startswith("validation") or change.key in ("until", "name", "phase"):
        return False
    return key not in keys_of(Role.UNTRAINED) | keys_of(Role.ROUNDING)
