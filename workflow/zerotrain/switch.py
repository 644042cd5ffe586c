"""`zerotrain switch`: end the phase that trains where it stands, and go on under another launch.

Only the configuration is edited. What the edit asks for, Snakemake does: it renders the cut phase's
launch, publishes its rolling checkpoint as its end (no step is trained) and exports it.

One switch of a run works at a time, from reading to the end. What others do to the configuration
meanwhile stays: the edit is made of the bytes that are there, and undone alone.
"""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from zerotrain import artifact, graph, snakemake_runs
from zerotrain.artifact.leftovers import beside
from zerotrain.config import RunConfig, read_config
from zerotrain.config.find import find_config
from zerotrain.config.replace import check_replaceable
from zerotrain.disk_errors import writing
from zerotrain.errors import PipelineError
from zerotrain.supervise import handling_signals, unwind
from zerotrain.switch_before import (
    Request,
    find_done,
    find_killed,
    name_switch,
    take_over_killed,
)
from zerotrain.switch_checks import check_switched, refuse_other_making
from zerotrain.switch_edit import SwitchEdit, remove_note
from zerotrain.switch_plan import Plan, check_plan, check_preset, plan_switch
from zerotrain.switch_point import RESULTS, phase_folder, unfinished_phase
from zerotrain.training import lock
from zerotrain.training.holder import Holder
from zerotrain.training.progress_folder import FINGERPRINT, saved_steps, write_fingerprint
from zerotrain.training.stop import stop_training, trainer_of

OWN_FOLDER = ".switch"
"""In a run's results: the lock of the switch that works, and its note."""


def switch(
    run: str,
    preset: str,
    *,
    at: str = "last",
    name: str | None = None,
    config: Path | None = None,
    offload_path: str | None = None,
    wait: float = 600.0,
    accept: bool = False,
    dry_run: bool = False,
) -> str:
    """End a run's unfinished phase at a saved step, export it, and append the rest under a preset.

    Args:
        run: The run's name, or its configuration file.
        preset: A file of config/launch, without .yaml.
        at: The step at which the phase ends: "last", or one that is saved.
        name: The new phase's name; default: that of the phase and the preset's.
        config: The configuration file, where several have the run.
        offload_path: The new phase's launch.offload_path.
        wait: Seconds to wait for a training that runs to stop.
        accept: Go on although code, data or values have changed since the phase was trained.
        dry_run: Say what would be done, and change nothing.

    Returns:
        What was done and the next command, or the difference that a dry run found.

    Raises:
        PipelineError: nothing to cut, it cannot be cut without loss, or another switch of the run
            is under way; the configuration is as it was, or the message says what it has.
    """
    if not Path("Snakefile").is_file():
        raise PipelineError(
            f"{Path.cwd()}: no Snakefile here", hint="call it in the folder of the project"
        )
    check_preset(preset)
    file = find_config(run, config)
    request = Request(preset, at, name, offload_path)
    folder = RESULTS / read_config(file).run / OWN_FOLDER
    refuse = partial(_refuse_other_switch, file)
    if dry_run:
        refuse(folder)
        return _dry_run(request, file, folder)
    with handling_signals(unwind):
        with writing(folder):
            held = lock.take(folder, refuse)
        try:
            return _switch(request, file, folder, wait, accept)
        finally:
            held.release()


def _refuse_other_switch(file: Path, folder: Path) -> Holder | None:
    holder = lock.holder_of(folder)
    if holder is None or not holder.lives():
        return holder
    raise PipelineError(
        f"{file}: another switch of it is under way: pid {holder.pid} on "
        f"{holder.host}{holder.details}",
        hint="wait until it has ended, and run this again if it failed; if that host is gone for "
        f"good, remove {folder}/{lock.LOCK}",
    )


def _dry_run(request: Request, file: Path, folder: Path) -> str:
    if killed := find_killed(folder):
        return (
            f"{killed.file}: a {name_switch(killed)} was killed before its end: the same command "
            "without --dry-run completes it, another switch undoes it first"
        )
    config, text = _read(file)
    if done := find_done(config, file, request):
        return done
    plan = plan_switch(config, text, file, folder, request)
    before, after = text.splitlines(), plan.edit.text.splitlines()
    lines = difflib.unified_diff(before, after, str(file), str(file), lineterm="")
    planned = ", ".join(plan.jobs) or "nothing to be done"
    return "\n".join([*lines, f"{graph.command(file, plan.targets)}: {planned}"])


def _switch(request: Request, file: Path, folder: Path, wait: float, accept: bool) -> str:
    check_replaceable(file)
    artifact.mend(folder / file.name)  # the copy that a killed one planned with
    pending = take_over_killed(request, file, folder)
    while True:
        config, text = _read(file)
        if folder.parent != RESULTS / config.run:
            raise PipelineError(f"{file}: its run is {config.run} now", hint="run this again")
        if pending is None and (done := find_done(config, file, request)):
            return done
        phase = config.phase(pending.split.phase) if pending else unfinished_phase(config, file)[0]
        progress = phase_folder(config, phase) / "progress"
        plan = None
        with _undone_on_failure(pending) if pending else nullcontext():
            # A training is stopped only for a switch that would succeed, as far as can be seen.
            if pending:
                plan = check_plan(config, phase, pending, text, folder)
            elif saved_steps(progress) or not trainer_of(progress):
                plan = plan_switch(config, text, file, folder, request)
            stopped = stop_training(progress, wait)
        if plan is None or stopped:
            continue
        with _undone_on_failure(plan.edit):
            if not pending and not plan.edit.apply(folder):
                _say(f"{file}: was saved by another program meanwhile; it is read again")
                continue
            _end_phase(plan, accept)
        remove_note(folder)
        split = plan.edit.split
        return (
            f"{phase.name}: ends at step {split.step} (was {plan.edit.until}), exported; "
            f"{split.name} continues to {plan.edit.until} under {request.preset}. "
            f"Next: {graph.train_command(file)}"
        )


def _read(file: Path) -> tuple[RunConfig, str]:
    """Read a configuration, and the text that it has then."""
    while True:
        try:
            text = file.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            text = ""  # reading the values says what is wrong
        config = read_config(file)
        if file.read_bytes() == text.encode():
            return config, text


def _end_phase(plan: Plan, accept: bool) -> None:
    """Let Snakemake end the phase and export it, and check that it has."""
    file, folder = plan.edit.file, phase_folder(plan.config, plan.phase)
    snakemake_runs.wait_for_orphans()
    graph.make(file, [f"{folder}/launch/manifest.json"])
    with _accepted(folder / "progress") if accept else nullcontext():
        refuse_other_making(plan.config, plan.phase)
        graph.make(file, plan.targets)
        check_switched(file, plan.edit.split)


@contextmanager
def _undone_on_failure(edit: SwitchEdit) -> Iterator[None]:
    """Undo an edit of the configuration where the block fails, and say what the file is then."""
    try:
        yield
    except BaseException as error:
        with handling_signals(signal.SIG_IGN):
            said = edit.undo()
        if isinstance(error, PipelineError):
            raise PipelineError(f"{error.what}; {said}", hint=error.hint) from error
        _say(said)
        raise


@contextmanager
def _accepted(progress: Path) -> Iterator[None]:
    """Let progress go with whatever has changed; where the block fails, it does so no more."""
    path = progress / FINGERPRINT
    with _held(progress):  # not around the block: training takes it, too
        former = path.read_bytes() if path.is_file() else None
        write_fingerprint(progress, {"accepted": True})
    try:
        yield
    except BaseException:
        # Who trains there by now has put a fingerprint of its own in that one's place.
        with suppress(PipelineError), _held(progress):
            if former is None:
                path.unlink(missing_ok=True)
            else:
                draft = beside(path, "new")
                draft.write_bytes(former)
                draft.replace(path)
        raise


@contextmanager
def _held(progress: Path) -> Iterator[None]:
    held = lock.take(progress)
    try:
        yield
    finally:
        held.release()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
