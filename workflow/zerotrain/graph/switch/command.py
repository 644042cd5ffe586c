"""`zerotrain switch`: end the current phase at a checkpoint, and continue with another launch.

Only the configuration is edited; Snakemake does the rest: it renders the cut phase's launch,
publishes its rolling checkpoint as its end (no step is trained) and exports it.

Only one switch of a run works at a time, from reading the configuration to the end. Edits by others
in the meantime are preserved: the switch edits the current bytes, and undoes only its edit.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact.documents import DocumentError, read_bytes, read_record, read_text
from zerotrain.artifact.layout import RunFolder
from zerotrain.artifact.links import check_run_links
from zerotrain.artifact.whole_file import check_replaceable
from zerotrain.config.models import Phase
from zerotrain.config.read import read_config
from zerotrain.config.relaunch import check_relaunch
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import find_config, train_command
from zerotrain.config.text import diff
from zerotrain.errors import PipelineError
from zerotrain.graph import snakemake
from zerotrain.graph.options import SwitchOptions
from zerotrain.graph.switch.edit import SwitchEdit, remove_note
from zerotrain.graph.switch.plan import (
    Plan,
    check_plan,
    check_preset,
    describe_new,
    find_done,
    find_killed,
    name_switch,
    plan_switch,
    relaunch_of,
    take_over_killed,
)
from zerotrain.graph.switch.point import (
    check_same_launch,
    check_switched,
    phase_folder,
    read_present,
    unfinished_phase,
    view_phase,
)
from zerotrain.machine.child_process import handling_signals, unwind
from zerotrain.machine.disk_errors import writing
from zerotrain.machine.file_lock import is_held, lock_stream
from zerotrain.machine.output import print_message
from zerotrain.machine.processes import ProcessRecord, this_process
from zerotrain.machine.regular_file import open_to_change
from zerotrain.training.checkpointing import set_aside
from zerotrain.training.process.stop import stop_training

OWN_FOLDER, LOCK = ".switch", "lock"
"""The folder in a run's results with the note of the running switch, and the file that it locks."""


def switch(options: SwitchOptions) -> str:
    """End a run's unfinished phase at a saved step, export it, and append the rest under a preset.

    Returns:
        What was done and the next command, or the diff of a dry run.

    Raises:
        PipelineError: there is nothing to cut, it cannot be cut without loss, or another switch of
            the run is in progress; the configuration is unchanged, or the message describes it.
    """
    snakemake.check_project()
    relaunch = relaunch_of(options)
    if options.to is None and not relaunch.flags():
        raise PipelineError(
            "nothing to switch is named",
            hint="give --to PRESET, --num-processes N, --machines N or --mixed-precision "
            "no|bf16|fp16",
        )
    if options.to is not None:
        check_preset(options.to)
    check_relaunch(relaunch)
    file = find_config(options.run)
    config = read_config(file)
    check_run_links(config.run, data=config.data_name)
    folder = RunFolder(config.run).path / OWN_FOLDER
    if options.dry_run:
        if is_switching(config.run):
            raise _other_switch(file, folder)
        return _dry_run(options, file, folder)
    with handling_signals(unwind), _alone(file, folder):
        return _switch(options, file, folder)


def is_switching(run: str) -> bool:
    """Return whether a switch of a run is under way."""
    return is_held(RunFolder(run).path / OWN_FOLDER / LOCK) is True


@contextmanager
def _alone(file: Path, folder: Path) -> Iterator[None]:
    """Let no other switch of the run work during the block."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stream = open_to_change(folder / LOCK, make=True)
    with stream:
        if lock_stream(stream) is False:
            raise _other_switch(file, folder)
        with writing(folder):
            stream.truncate()
            json.dump(asdict(this_process()), stream)
            stream.flush()
        yield


def _other_switch(file: Path, folder: Path) -> PipelineError:
    try:
        who = read_record(folder / LOCK, ProcessRecord)
    except (OSError, ValueError):
        by = "an unknown process"
    else:
        by = f"pid {who.pid} on {who.host}{who.details}"
    return PipelineError(
        f"{file}: another switch of it is under way: {by}",
        hint="wait until it has ended, and run this again if it failed",
    )


def _dry_run(request: SwitchOptions, file: Path, folder: Path) -> str:
    if killed := find_killed(folder):
        return (
            f"{killed.file}: a {name_switch(killed)} was killed before its end: the same command "
            "without --dry-run completes it, another switch undoes it first"
        )
    config, text = _read(file)
    if done := find_done(config, file, request):
        return done
    plan = plan_switch(config, text, file, request)
    planned = ", ".join(plan.jobs) or "nothing to be done"
    lines = diff(text, plan.edit.text, str(file))
    return "\n".join([*lines, f"{snakemake.command(file, plan.targets)}: {planned}"])


def _switch(request: SwitchOptions, file: Path, folder: Path) -> str:
    check_replaceable(file)
    pending = take_over_killed(request, file, folder)
    while True:
        config, text = _read(file)
        if folder.parent != RunFolder(config.run).path:
            raise PipelineError(f"{file}: its run is {config.run} now", hint="run this again")
        if pending is None and (done := find_done(config, file, request)):
            return done
        phase = config.phase(pending.split.phase) if pending else unfinished_phase(config, file)[0]
        view, plan = view_phase(config, phase), None
        with _undone_on_failure(pending) if pending else nullcontext():
            # Stop a training only for a switch that is expected to succeed.
            if pending:
                plan = check_plan(config, phase, pending, config)
            elif view.steps or not view.trainer:
                plan = plan_switch(config, text, file, request)
            stopped = stop_training(view.places.progress, request.wait)
        if plan is None or stopped:
            continue
        with _undone_on_failure(plan.edit):
            if not pending and not plan.edit.apply(folder):
                print_message(f"{file}: was saved by another program meanwhile; it is read again")
                continue
            _end_phase(plan, request.accept)
        remove_note(folder)
        split = plan.edit.split
        return (
            f"{phase.name}: ends at step {split.step} (was {plan.edit.until}), exported; "
            f"{split.name} continues to {plan.edit.until} under {describe_new(plan)}. "
            f"Next: {train_command(file)}"
        )


def _read(file: Path) -> tuple[RunConfig, str]:
    """Read a configuration, and its text at that time."""
    while True:
        try:
            text = read_text(file, follow_links=True)
        except (OSError, DocumentError):
            text = ""  # read_config reports the error
        config = read_config(file)
        if read_bytes(file, follow_links=True) == text.encode():
            return config, text


def _end_phase(plan: Plan, accept: bool) -> None:
    """Let Snakemake end the phase and export it, and check the result."""
    file, folder = plan.edit.file, phase_folder(plan.config, plan.phase)
    snakemake.make(file, [f"{folder}/launch/manifest.json"])
    with _accepted(plan.config, plan.phase) if accept else nullcontext():
        check_same_launch(plan.config, plan.phase)
        snakemake.make(file, plan.targets)
        check_switched(file, plan.edit.split)


@contextmanager
def _undone_on_failure(edit: SwitchEdit) -> Iterator[None]:
    """Undo an edit of the configuration if the block fails, and report the file's state."""
    try:
        yield
    except BaseException as error:
        with handling_signals(signal.SIG_IGN):
            undone = edit.undo()
        if isinstance(error, PipelineError):
            raise PipelineError(f"{error.what}; {undone}", hint=error.hint) from error
        print_message(undone)
        raise


@contextmanager
def _accepted(config: RunConfig, phase: Phase) -> Iterator[None]:
    """Accept the phase's progress for its current values, for the block's processes only."""
    accepted = artifact.digest(read_present(config, phase).trains)
    former = os.environ.get(set_aside.ENVIRONMENT)
    os.environ[set_aside.ENVIRONMENT] = accepted
    try:
        yield
    finally:
        if former is None:
            del os.environ[set_aside.ENVIRONMENT]
        else:
            os.environ[set_aside.ENVIRONMENT] = former
