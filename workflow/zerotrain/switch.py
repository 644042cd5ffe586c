"""`zerotrain switch`: end the phase that trains where it stands, and go on under another launch.

Only the configuration is edited. What the edit asks for, Snakemake does: it renders the cut phase's
launch, publishes its rolling checkpoint as its end (no step is trained) and exports it.
"""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from ruamel.yaml import YAML

from zerotrain import artifact, graph
from zerotrain.config import Phase, RunConfig, parse_config, read_config
from zerotrain.config.edit import Split, split_phase
from zerotrain.config.find import CONFIGS, find_config
from zerotrain.errors import PipelineError
from zerotrain.switch_checks import refuse_other_jobs, refuse_other_making
from zerotrain.switch_point import (
    RESULTS,
    choose_step,
    made_otherwise,
    phase_folder,
    unfinished_phase,
)
from zerotrain.training import lock
from zerotrain.training.progress_folder import FINGERPRINT, saved_steps, step_folder
from zerotrain.training.stop import stop_training, trainer_of

PRESETS = CONFIGS / "launch"


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
        PipelineError: nothing to cut, or it cannot be cut without loss; the configuration is as it
            was.
    """
    if not Path("Snakefile").is_file():
        raise PipelineError(
            f"{Path.cwd()}: no Snakefile here", hint="call it in the folder of the project"
        )
    _check_preset(preset)
    file = find_config(run, config)
    while True:
        parsed = read_config(file)
        phase, until = unfinished_phase(parsed, file)
        folder = phase_folder(parsed, phase)
        progress = folder / "progress"
        # A training is stopped only for a switch that would succeed, as far as can be seen before.
        if dry_run or saved_steps(progress) or not trainer_of(progress):
            step = choose_step(parsed, phase, at, until, file)
            split = _split(parsed, phase, step, preset, name, offload_path)
            former = file.read_bytes()
            text = split_phase(former.decode(), split).encode()
            _check_split(text, file, split)
            targets = [f"{folder}/{part}/manifest.json" for part in ("state", "weights")]
            jobs = refuse_other_jobs(text, file, parsed, phase, targets)
        if dry_run or not stop_training(progress, wait):
            break
    if dry_run:
        before, after = former.decode().splitlines(), text.decode().splitlines()
        lines = difflib.unified_diff(before, after, str(file), str(file), lineterm="")
        planned = ", ".join(jobs) or "nothing to be done"
        return "\n".join([*lines, f"{graph.command(file, targets)}: {planned}"])
    with _replaced(file, text):
        graph.make(file, [f"{folder}/launch/manifest.json"])
        with _accepted(progress) if accept else nullcontext():
            refuse_other_making(parsed, phase)
            graph.make(file, targets)
    return (
        f"{phase.name}: ends at step {step} (was {until}), exported; {split.name} goes on to "
        f"{until} under {preset}. Next: {graph.train_command(file)}"
    )


def _check_preset(preset: str) -> None:
    known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    if preset not in known:
        near = difflib.get_close_matches(preset, known, n=1)
        raise PipelineError(
            f"--to {preset}: no such launch preset",
            hint=(f"did you mean {near[0]}? " if near else "")
            + f"presets in {PRESETS}: {', '.join(known) or 'none'}",
        )


def _split(
    config: RunConfig,
    phase: Phase,
    step: int,
    preset: str,
    name: str | None,
    offload_path: str | None,
) -> Split:
    """What to edit. Where the file already has the new launch, the phase gets its own back."""
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
        name=name or _free_name(config, f"{phase.name}-{preset}"),
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
def _replaced(file: Path, text: bytes) -> Iterator[None]:
    """Let a file have another content at once; where the block fails, it gets its own back."""
    former = file.read_bytes()
    _write(file, text)
    try:
        yield
    except BaseException as error:
        _write(file, former)
        if isinstance(error, PipelineError):
            said = f"{error.what}; {file} is as it was"
            raise PipelineError(said, hint=error.hint) from error
        raise


@contextmanager
def _accepted(progress: Path) -> Iterator[None]:
    """Let progress go with whatever has changed; where the block fails, it does so no more."""
    path = progress / FINGERPRINT
    with _held(progress):  # not around the block: training takes it, too
        former = path.read_bytes() if path.is_file() else None
        artifact.write_json(path, {"accepted": True})
    try:
        yield
    except BaseException:
        # Who trains there by now has put a fingerprint of its own in that one's place.
        with suppress(PipelineError), _held(progress):
            if former is None:
                path.unlink(missing_ok=True)
            else:
                _write(path, former)
        raise


@contextmanager
def _held(progress: Path) -> Iterator[None]:
    held = lock.take(progress)
    try:
        yield
    finally:
        held.release()


def _write(file: Path, text: bytes) -> None:
    target = file.resolve()
    draft = target.with_name(f".{target.name}.switch-{os.getpid()}")
    draft.write_bytes(text)
    shutil.copymode(target, draft)
    draft.replace(target)
