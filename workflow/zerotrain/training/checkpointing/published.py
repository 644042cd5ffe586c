"""A phase's published checkpoint: made from a rolling one, and kept as long as it fits the phase.

Its manifest says what the phase trains, as content["trains"], and after an early end the phase's
`until`, as content["until"]. Commit and code are among the records, which are not part of its
identity, so that nothing is exported again for them.

That of an earlier version has no `trains`, and its fingerprint.json is in the progress folder,
which may be gone. Its parents and its position still record some values; the others are unknown and
count as equal.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import MANIFEST, RECORDS, Artifact
from zerotrain.errors import PipelineError
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.schedules import learning_rate
from zerotrain.machine.output import print_message
from zerotrain.state.position import TrainerState, read_position
from zerotrain.training.checkpointing import conditions, set_aside
from zerotrain.training.checkpointing.conditions import Changes
from zerotrain.training.checkpointing.inputs import Inputs
from zerotrain.training.checkpointing.preflight import LAUNCH_KEYS
from zerotrain.training.checkpointing.progress_folder import saved_steps, step_folder

KIND = "checkpoint"
PARENTS = ("base", "cache", "start")


def keep(output: Path, progress: Path, inputs: Inputs) -> bool:
    """Keep a published checkpoint without progress, if it is what the phase trains.

    Otherwise, by the values it was trained with, it is put back into the progress folder, where
    train.on_change decides, or train.on_change is applied to the folder itself.

    Args:
        output: Folder of the published checkpoint.
        progress: Folder of the phase's progress, whose lock is held.
        inputs: What the phase is trained from.

    Returns:
        Whether it is all that the phase trains; otherwise steps are left to train.

    Raises:
        PipelineError: it is damaged, or train.on_change refuses what differs.
    """
    phase = inputs.phase
    if saved_steps(progress) or set_aside.is_moving(progress) or not _is_published(output):
        return False
    try:
        checkpoint = artifact.read(output, KIND)
        position = read_position(checkpoint, "checkpoint.json")
        recorded = conditions.read_conditions(output)
    except PipelineError as error:
        raise PipelineError(
            f"{output}: the phase's published checkpoint is damaged, and {progress} holds no other "
            f"({error.what})",
            hint="restore it from a copy; to train the phase from its start instead, move "
            f"{output} away",
        ) from error
    made = recorded or _read_earlier(checkpoint, position, progress, inputs)
    changed = conditions.changes(made, inputs.trains, inputs.parents["cache"].identity)
    if set_aside.is_accepted(progress, inputs.trains):
        changed = {}
    settled = bool(changed) and recorded is not None  # `prepare` does, once it is put back
    if not changed and _has_ended(checkpoint, position.step, phase):
        if recorded is None:  # the values of the first check count
            progress.mkdir(parents=True, exist_ok=True)
            set_aside.write_accepted(progress, inputs.trains)
        print_message(f"{phase.phase}: {output} is what the phase trains, up to step "
             f"{phase.derived.until_step}: it is kept")  # fmt: skip
        os.utime(output / MANIFEST)
        return True
    ended = checkpoint.content.get("until", position.step)
    extended = not changed and position.step == ended < phase.derived.until_step
    if not changed and not extended:
        changed = _end_changes(checkpoint, position.step, phase)
    resumes = position.step <= phase.derived.until_step
    if resumes and (extended or settled or phase.train.on_change == "continue"):
        progress.mkdir(parents=True, exist_ok=True)
        with artifact.publish(step_folder(progress, position.step), KIND) as draft:
            _link(checkpoint, draft)
            draft.content = conditions.manifest_content(made.trains)
        print_message(
            f"{phase.phase}: {progress} has no checkpoint: {output}, of step {position.step}, is "
            "put back into it"
        )
        return False
    _replace(output, position.step, changed, phase, resumes=resumes)
    return False


def _is_published(output: Path) -> bool:
    """Return whether a folder is published, after completing an interrupted replacement."""
    artifact.recover_interrupted_publish(output)
    return artifact.is_published(output)


def _read_earlier(
    checkpoint: Artifact, position: TrainerState, progress: Path, inputs: Inputs
) -> conditions.RecordedConditions:
    accepted = set_aside.read_accepted(progress)
    trains = read_earlier(checkpoint, position, inputs) if accepted is None else accepted
    return conditions.RecordedConditions(trains, {})


def _end_changes(checkpoint: Artifact, step: int, phase: ResolvedPhase) -> Changes:
    """Return how the phase's end differs from the end of a published checkpoint."""
    ends = {
        "until": (checkpoint.content.get("until", step), phase.derived.until_step),
        "validation": (checkpoint.content.get("validation"), phase.derived.validation),
    }
    if ends["validation"][0] is None:
        del ends["validation"]
    return {key: (old, new) for key, (old, new) in ends.items() if old != new}


def _replace(
    output: Path, step: int, changed: Changes, phase: ResolvedPhase, *, resumes: bool
) -> None:
    """Move aside a published checkpoint that the phase does not continue from, or refuse to."""
    values = "; ".join(conditions.format_changes(changed))
    what = (
        f"{output}: its {step:,} steps are those of other values than phase {phase.phase} has now "
        f"({values})"
    )
    if phase.train.on_change == "continue":
        raise PipelineError(
            f"{what}; train.on_change: continue, but they end after step "
            f"{phase.derived.until_step}",
            hint=f"set the phase's `until` to {step} or later; or set train.on_change: restart, "
            "which moves them aside and trains from the start",
        )
    if phase.train.on_change == "stop":
        more = "continue, which resumes with the new ones, or " if resumes else ""
        raise PipelineError(
            f"{what}; train.on_change: stop",
            hint=f"write the former values back; or set train.on_change: {more}restart, which "
            "moves them aside and trains from the start",
        )
    aside = set_aside.next_aside_folder(output.parent)
    aside.mkdir()
    output.rename(aside / output.name)
    back = set_aside.restore_command(output.parent, aside)
    print_message(
        f"{what}: they are moved to {aside}, and training restarts from the start of the phase. "
        f"To restore them, write the former values back and run `{back}`"
    )


def is_current(
    launch: Path, base: Path, cache: Path, start: Path | None, progress: Path, output: Path
) -> bool:
    """Return whether a published checkpoint is what its phase trains, according to manifests.

    Nothing is verified or written: this is for planning, and the stage checks again. If neither the
    checkpoint nor its progress records the values it was trained with, the answer is no.
    """
    try:
        parents = {
            "base": artifact.read(base, "base", verify=False),
            "cache": artifact.read(cache, "cache", verify=False),
        }
        if start is not None:
            parents["start"] = artifact.read(start, "state", verify=False)
        launched = artifact.read(launch, "launch", verify=False)
        inputs = Inputs(read_run_yaml(launched.path("run.yaml")), parents)
        checkpoint = artifact.read(output, KIND, verify=False)
        position = read_position(checkpoint, "checkpoint.json")
        recorded = conditions.read_conditions(output)
        rolling = step_folder(progress, position.step)
        if recorded is None and artifact.is_published(rolling):
            same = _hashes(artifact.read(rolling, KIND, verify=False)) == _hashes(checkpoint)
            recorded = conditions.read_conditions(rolling) if same else None
    except (PipelineError, OSError):
        return False
    if recorded is None:
        return False
    cached = parents["cache"].identity
    differing = conditions.changes(recorded, inputs.trains, cached)
    accepted = set_aside.read_accepted(progress) == inputs.trains
    return _has_ended(checkpoint, position.step, inputs.phase) and (accepted or not differing)


def publish(
    rolling: Artifact, output: Path, inputs: Inputs, progress: Path, *, early: bool
) -> None:
    """Publish a rolling checkpoint as the phase's; an equal published one stays as it is.

    Args:
        rolling: The rolling checkpoint.
        output: Folder to publish.
        inputs: What the phase is trained from.
        progress: Folder of the phase's progress.
        early: Whether the rolling checkpoint's step is before the phase's `until`.

    Raises:
        PipelineError: it cannot be written.
    """
    # A phase that is already at its end trains nothing with values that changed since.
    present, cache = inputs.trains, inputs.parents["cache"].identity
    recorded = conditions.read_conditions(rolling.folder)
    changed = conditions.changes(recorded, present, cache) if recorded else {}
    trained = conditions.complete(recorded, present, cache) if recorded else present
    content: dict[str, Any] = {conditions.TRAINS: trained}
    if early:  # it completes what these settings request
        content |= {
            "until": inputs.phase.derived.until_step,
            "validation": inputs.phase.derived.validation,
        }
    if changed:
        set_aside.write_accepted(progress, present)
        values = "; ".join(conditions.format_changes(changed))
        message = (
            f"what is published was trained with other values ({values})"
            if early
            else f"finished with its former values ({values}); nothing is trained"
        )
        print_message(f"{inputs.phase.phase}: {message}")
    if _is_equal_published(output, rolling, content):
        os.utime(output / MANIFEST)
        return
    parents = {name: one for name, one in inputs.parents.items() if name in PARENTS}
    with artifact.publish(output, KIND, parents=parents) as draft:
        _link(rolling, draft)
        draft.content = content


def _has_ended(checkpoint: Artifact, step: int, phase: ResolvedPhase) -> bool:
    """Return whether a published checkpoint of a step is of the phase's end."""
    ended = checkpoint.content.get("until", step) == phase.derived.until_step
    return ended and checkpoint.content.get("validation") in (None, phase.derived.validation)


def _is_equal_published(output: Path, rolling: Artifact, content: dict[str, Any]) -> bool:
    """Return whether a checkpoint is already published; earlier versions did not write `trains`."""
    try:
        checkpoint = artifact.read(output, KIND, verify=False)
    except (PipelineError, OSError):
        return False
    there = {conditions.TRAINS: content[conditions.TRAINS], **checkpoint.content}
    if there != content and there != {k: v for k, v in content.items() if k != "validation"}:
        return False
    return _hashes(checkpoint) == _hashes(rolling)


def _hashes(checkpoint: Artifact) -> dict[str, str]:
    return {n: one["sha256"] for n, one in checkpoint.files.items() if not n.startswith(RECORDS)}


def _link(checkpoint: Artifact, draft: artifact.UnpublishedFolder) -> None:
    for name, entry in checkpoint.files.items():
        artifact.link_or_copy(checkpoint.path(name), draft.folder / name)
        draft.known[name] = entry["sha256"]


def read_earlier(checkpoint: Artifact, position: TrainerState, inputs: Inputs) -> dict[str, Any]:
    """Describe what a published checkpoint was trained with, as far as it says so.

    Args:
        checkpoint: The published checkpoint.
        position: Its position.
        inputs: What the phase is trained from now.

    Returns:
        The present values, except for those that differ in the checkpoint: there a base or a
        dataset is its identity, and a learning rate that of its step.
    """
    phase, trains = inputs.phase, dict(inputs.trains)
    for name, key in {"base": "base", "cache": "data", "start": "start"}.items():
        old = checkpoint.parents[name]["identity"] if name in checkpoint.parents else None
        present = inputs.parents[name].identity if name in inputs.parents else None
        if old != present:
            trains[key] = old
    engine = {**position.engine, "num_processes": position.engine.get("world_size")}
    known = {key: engine[key] for key in LAUNCH_KEYS if engine.get(key) is not None}
    known |= {"optimizer": position.optimizer, "lr_scheduler": position.lr_scheduler}
    known |= {"seed": position.rng.get("seed", phase.seed)}
    trains |= {key: value for key, value in known.items() if trains.get(key) != value}
    if (rate := _other_rate(position, inputs)) is not None:
        trains["learning_rate"] = f"{rate:g} at step {position.step}"
    return trains


def _other_rate(position: TrainerState, inputs: Inputs) -> float | None:
    """Return a group's learning rate, if none of the phase's groups has it at this step."""
    phase = inputs.phase
    rate = learning_rate(phase.train, position.step, position.lr_scheduler_steps)
    peak = phase.train.learning_rate
    own = [one.learning_rate for one in phase.train.param_groups]
    rates = [rate, *(rate * one / peak for one in own if one is not None and peak)]
    for group in position.param_groups:
        own_rate = group.get("lr")
        if isinstance(own_rate, int | float) and not any(
            math.isclose(own_rate, one, rel_tol=1e-9, abs_tol=1e-18) for one in rates
        ):
            return float(own_rate)
    return None
