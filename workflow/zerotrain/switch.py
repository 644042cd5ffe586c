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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ruamel.yaml import YAML

from zerotrain import artifact, graph, snakemake_runs
from zerotrain.artifact.leftovers import beside
from zerotrain.config import Phase, RunConfig, parse_config, read_config
from zerotrain.config.edit import Split
from zerotrain.config.find import CONFIGS, find_config
from zerotrain.config.replace import check_replaceable, explained
from zerotrain.errors import PipelineError
from zerotrain.supervise import handling_signals, unwind
from zerotrain.switch_checks import (
    check_switched,
    holds_split,
    refuse_other_jobs,
    refuse_other_making,
)
from zerotrain.switch_edit import SwitchEdit, read_note, remove_note
from zerotrain.switch_point import (
    RESULTS,
    choose_step,
    current_phase,
    is_exported,
    made_otherwise,
    phase_ends,
    phase_folder,
    unfinished_phase,
)
from zerotrain.training import lock
from zerotrain.training.holder import Holder
from zerotrain.training.progress_folder import (
    FINGERPRINT,
    saved_steps,
    step_folder,
    write_fingerprint,
)
from zerotrain.training.stop import stop_training, trainer_of

PRESETS = CONFIGS / "launch"
OWN_FOLDER = ".switch"
"""In a run's results: the lock of the switch that works, and its note."""


@dataclass(frozen=True)
class Request:
    """What a user asks for; see `switch`."""

    preset: str
    at: str = "last"
    name: str | None = None
    offload_path: str | None = None

    def is_met_by(self, step: int, name: str, launch: object) -> bool:
        """Whether a switch at a step, to a phase of this name and launch, is what is asked for."""
        values = launch if isinstance(launch, dict) else vars(launch)
        return (
            values["preset"] == self.preset
            and self.at in ("last", str(step))
            and self.name in (None, name)
            and self.offload_path in (None, values.get("offload_path"))
        )


@dataclass(frozen=True)
class Plan:
    """A switch that can be made."""

    config: RunConfig
    phase: Phase
    edit: SwitchEdit
    targets: list[str]
    jobs: dict[str, int]


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
    _check_preset(preset)
    file = find_config(run, config)
    request = Request(preset, at, name, offload_path)
    folder = RESULTS / read_config(file).run / OWN_FOLDER
    refuse = partial(_refuse_other_switch, file)
    if dry_run:
        refuse(folder)
        return _dry_run(request, file, folder)
    with handling_signals(unwind):
        with explained(folder):
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
    if killed := _killed(folder):
        return (
            f"{killed.file}: a {_name(killed)} was killed before its end: the same command without "
            "--dry-run completes it, another switch undoes it first"
        )
    config, text = _read(file)
    if done := _done_already(config, file, request):
        return done
    plan = _plan(config, text, file, folder, request)
    before, after = text.splitlines(), plan.edit.text.splitlines()
    lines = difflib.unified_diff(before, after, str(file), str(file), lineterm="")
    planned = ", ".join(plan.jobs) or "nothing to be done"
    return "\n".join([*lines, f"{graph.command(file, plan.targets)}: {planned}"])


def _switch(request: Request, file: Path, folder: Path, wait: float, accept: bool) -> str:
    check_replaceable(file)
    artifact.mend(folder / file.name)  # the copy that a killed one planned with
    pending = _pending(request, file, folder)
    while True:
        config, text = _read(file)
        if folder.parent != RESULTS / config.run:
            raise PipelineError(f"{file}: its run is {config.run} now", hint="run this again")
        if pending is None and (done := _done_already(config, file, request)):
            return done
        phase = config.phase(pending.split.phase) if pending else unfinished_phase(config, file)[0]
        progress = phase_folder(config, phase) / "progress"
        plan = None
        with _undone_on_failure(pending) if pending else nullcontext():
            # A training is stopped only for a switch that would succeed, as far as can be seen.
            if pending:
                plan = _check_plan(config, phase, pending, text, folder)
            elif saved_steps(progress) or not trainer_of(progress):
                plan = _plan(config, text, file, folder, request)
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
            f"{split.name} goes on to {plan.edit.until} under {request.preset}. "
            f"Next: {graph.train_command(file)}"
        )


def _pending(request: Request, file: Path, folder: Path) -> SwitchEdit | None:
    """Find the switch that was killed after its edit, if it is the one that is asked for.

    Another one is undone.

    Raises:
        PipelineError: it cannot be undone.
    """
    edit = _killed(folder)
    if edit is None:
        remove_note(folder)
        return None
    split = edit.split
    if edit.file == file and request.is_met_by(split.step, split.name, split.launch):
        _say(f"{file}: a {_name(edit)} was killed before its end; it is completed")
        return edit
    said = edit.undo()
    if holds_split(read_config(edit.file), split):
        raise PipelineError(
            f"a {_name(edit)} was killed before its end, and cannot be undone: {said}",
            hint="undo it by hand, or complete it with the command that was killed",
        )
    _say(f"a {_name(edit)} was killed before its end; it is undone: {said}")
    remove_note(folder)
    return None


def _killed(folder: Path) -> SwitchEdit | None:
    """Find the switch whose edit is made and whose export is not."""
    edit = read_note(folder)
    if edit is None or not edit.file.is_file():
        return None
    config, split = read_config(edit.file), edit.split
    if not holds_split(config, split):
        return None
    return None if is_exported(config, config.phase(split.phase), split.step) else edit


def _name(edit: SwitchEdit) -> str:
    return f"`zerotrain switch` to {edit.split.launch['preset']}"


def _done_already(config: RunConfig, file: Path, request: Request) -> str | None:
    """What to say where the switch that is asked for was done before; None where it was not."""
    phase, until = current_phase(config)
    before = config.phase_before(phase.name)
    if before is None:
        return None
    end = dict((one.name, end) for one, end in phase_ends(config))[before.name]
    steps = saved_steps(progress := phase_folder(config, phase) / "progress")
    if (
        not request.is_met_by(end, phase.name, phase.launch)
        or not is_exported(config, before, end)
        or (steps and any(made_otherwise(step_folder(progress, steps[-1]), phase)))
    ):
        return None
    done = f"done already: {before.name} ended at step {end}, {phase.name}"
    if is_exported(config, phase, until):
        return f"{done} ended at step {until} under {request.preset}; the run is finished"
    return f"{done} continues to {until} under {request.preset}. Next: {graph.train_command(file)}"


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


def _plan(config: RunConfig, text: str, file: Path, folder: Path, request: Request) -> Plan:
    phase, until = unfinished_phase(config, file)
    step = choose_step(config, phase, request.at, until, file)
    split = _split(config, phase, step, request)
    edit = SwitchEdit(file=file, former=text, split=split, until=until)
    _check_split(edit.text.encode(), file, split)
    return _check_plan(config, phase, edit, edit.text, folder)


def _check_plan(config: RunConfig, phase: Phase, edit: SwitchEdit, text: str, folder: Path) -> Plan:
    """Check what Snakemake would do with a configuration that has the edit."""
    targets = [
        f"{phase_folder(config, phase)}/{part}/manifest.json" for part in ("state", "weights")
    ]
    jobs = refuse_other_jobs(text, edit.file, config, phase, targets, folder)
    return Plan(config, phase, edit, targets, jobs)


def _end_phase(plan: Plan, accept: bool) -> None:
    """Let Snakemake end the phase and export it, and check that it has."""
    file, folder = plan.edit.file, phase_folder(plan.config, plan.phase)
    snakemake_runs.wait_for_orphans()
    graph.make(file, [f"{folder}/launch/manifest.json"])
    with _accepted(folder / "progress") if accept else nullcontext():
        refuse_other_making(plan.config, plan.phase)
        graph.make(file, plan.targets)
        check_switched(file, plan.edit.split)


def _check_preset(preset: str) -> None:
    known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    if preset not in known:
        near = difflib.get_close_matches(preset, known, n=1)
        raise PipelineError(
            f"--to {preset}: no such launch preset",
            hint=(f"did you mean {near[0]}? " if near else "")
            + f"presets in {PRESETS}: {', '.join(known) or 'none'}",
        )


def _split(config: RunConfig, phase: Phase, step: int, request: Request) -> Split:
    """What to edit. Where the file already has the new launch, the phase gets its own back."""
    preset, offload_path = request.preset, request.offload_path
    rolling = step_folder(phase_folder(config, phase) / "progress", step)
    launch, ended = made_otherwise(rolling, phase)
    if phase.launch.preset == preset and not launch and not ended:
        raise PipelineError(
            f"{config.run}/{phase.name} trains under {preset} already",
            hint="start it again, and it goes on where it stopped; to switch something else, write "
            "it into the phase first",
        )
    path = {} if offload_path is None else {"offload_path": offload_path}
    return Split(
        phase=phase.name,
        step=step,
        name=request.name or _free_name(config, f"{phase.name}-{preset}"),
        launch={"preset": preset, **path},
        ended=ended,
        ended_launch=launch,
    )


def _free_name(config: RunConfig, base: str) -> str:
    taken = {phase.name for phase in config.phases}
    name, count = base, 1
    while name in taken or (RESULTS / config.run / name).exists():
        count += 1
        name = f"{base}-{count}"
    return name


def _check_split(text: bytes, file: Path, split: Split) -> None:
    try:
        parse_config(YAML(typ="safe").load(text.decode()), str(file))
    except PipelineError as error:
        hint = f"{error.hint}; {file} is as it was"
        if "offload_path" in error.what and "offload_path" not in split.launch:
            hint = f"name the folder with --offload-path; {file} is as it was"
        raise PipelineError(f"with the new phase {split.name}, {error.what}", hint=hint) from error


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
