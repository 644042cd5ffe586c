"""A phase's published checkpoint: made from a rolling one, and kept as long as it fits the phase.

Its manifest says what the phase trains, as content["trains"], and after an early end the phase's
`until`, as content["until"]. Commit and code are among the records, which are not part of its
identity, so that nothing is exported again for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import MANIFEST, RECORDS, Artifact
from zerotrain.artifact.recipe import Difference, Recipe, format_differences, setting_differences
from zerotrain.errors import PipelineError
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.disk_errors import writing
from zerotrain.machine.output import print_message
from zerotrain.state.position import read_position
from zerotrain.training.checkpointing import conditions, set_aside
from zerotrain.training.checkpointing.preflight import Inputs
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
        made = conditions.read_conditions(output)
    except PipelineError as error:
        raise PipelineError(
            f"{output}: the phase's published checkpoint is damaged, and {progress} holds no other "
            f"({error.what})",
            hint="restore it from a copy; to train the phase from its start instead, move "
            f"{output} away",
        ) from error
    # Of an edit train.on_change decides once the checkpoint is put back.
    accepted = set_aside.is_accepted(progress, inputs.trains)
    edited = [] if accepted else conditions.changes(made, inputs.trains)
    moved = _end_changes(checkpoint, position.step, phase)
    if not edited and not moved:
        print_message(f"{phase.phase}: {output} is what the phase trains, up to step "
             f"{phase.derived.until_step}: it is kept")  # fmt: skip
        os.utime(output / MANIFEST)
        return True
    ended = checkpoint.content.get("until", position.step)
    extended = position.step == ended < phase.derived.until_step
    resumes = position.step <= phase.derived.until_step
    if resumes and (extended or edited or phase.train.on_change == "continue"):
        progress.mkdir(parents=True, exist_ok=True)
        with artifact.publish(step_folder(progress, position.step), KIND) as draft:
            _link(checkpoint, draft)
            draft.content = conditions.manifest_content(made.trains)
        print_message(
            f"{phase.phase}: {progress} has no checkpoint: {output}, of step {position.step}, is "
            "put back into it"
        )
        return False
    _replace(output, position.step, edited or moved, phase, resumes=resumes)
    return False


def _is_published(output: Path) -> bool:
    """Return whether a folder is published, after completing an interrupted replacement."""
    artifact.recover_interrupted_publish(output)
    return artifact.is_published(output)


def _end_changes(checkpoint: Artifact, step: int, phase: ResolvedPhase) -> list[Difference]:
    """List how the phase's end differs from the end of a published checkpoint."""
    now = {"until": phase.derived.until_step, "validation": phase.derived.validation}
    made = {"until": step, "validation": now["validation"]}
    recorded = {key: checkpoint.content[key] for key in made if checkpoint.content.get(key)}
    return setting_differences(made | recorded, now)


def _replace(
    output: Path, step: int, changed: list[Difference], phase: ResolvedPhase, *, resumes: bool
) -> None:
    """Move aside a published checkpoint that the phase does not continue from, or refuse to."""
    what = (
        f"{output}: its {step:,} steps are those of other values than phase {phase.phase} has now "
        f"({format_differences(changed)})"
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


def differences(
    inputs: Mapping[str, Artifact], progress: Path, checkpoint: Artifact
) -> list[Difference]:
    """List how what a phase trains differs from its published checkpoint, according to manifests.

    No file is hashed and nothing is written: this is for planning, and the stage checks again.

    Args:
        inputs: The folders `launch`, `base`, `cache` and, if there is one, `start`.
        progress: Folder of the phase's progress.
        checkpoint: The published checkpoint.

    Raises:
        PipelineError: a file is missing or damaged.
    """
    launched = Inputs(read_run_yaml(inputs["launch"].path("run.yaml")), dict(inputs))
    position = read_position(checkpoint, "checkpoint.json")
    changed = _end_changes(checkpoint, position.step, launched.phase)
    if set_aside.read_accepted(progress) != launched.trains:
        recorded = conditions.read_conditions(checkpoint.folder)
        changed += conditions.changes(recorded, launched.trains)
    return changed


def is_current(
    launch: Path, base: Path, cache: Path, start: Path | None, progress: Path, output: Path
) -> bool:
    """Return whether a published checkpoint is whole and what its phase trains, by manifests."""
    folders = {"launch": launch, "base": base, "cache": cache}
    folders |= {} if start is None else {"start": start}
    kinds = {"start": "state"}
    try:
        inputs = {
            name: artifact.read(folder, kinds.get(name, name), verify=False)
            for name, folder in folders.items()
        }
        return not differences(inputs, progress, artifact.read(output, KIND, verify=False))
    except (PipelineError, OSError):
        return False


def publish_again(output: Path) -> None:
    """Publish a current checkpoint again as it is: Snakemake waits for its manifest."""
    artifact.read_manifest(output, KIND)
    with writing(output):
        os.utime(output / MANIFEST)
    print_message(f"{output}: current, kept")


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
    recorded = conditions.read_conditions(rolling.folder)
    changed = conditions.changes(recorded, inputs.trains)
    content = conditions.manifest_content(recorded.trains)
    if early:  # it completes what these settings request
        content |= {
            "until": inputs.phase.derived.until_step,
            "validation": inputs.phase.derived.validation,
        }
    if changed:
        set_aside.write_accepted(progress, inputs.trains)
        values = format_differences(changed)
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
    recipe = Recipe("train_phase", int(recorded.ran_on.get("version") or 0), {}, {})
    with artifact.publish(output, KIND, parents=parents, recipe=recipe) as draft:
        _link(rolling, draft)
        draft.content = content


def _is_equal_published(output: Path, rolling: Artifact, content: dict[str, Any]) -> bool:
    """Return whether a checkpoint is already published."""
    try:
        checkpoint = artifact.read(output, KIND, verify=False)
    except (PipelineError, OSError):
        return False
    return checkpoint.content == content and _hashes(checkpoint) == _hashes(rolling)


def _hashes(checkpoint: Artifact) -> dict[str, str]:
    return {n: one["sha256"] for n, one in checkpoint.files.items() if not n.startswith(RECORDS)}


def _link(checkpoint: Artifact, draft: artifact.UnpublishedFolder) -> None:
    for name, entry in checkpoint.files.items():
        artifact.link_or_copy(checkpoint.path(name), draft.folder / name)
        draft.known[name] = entry["sha256"]
