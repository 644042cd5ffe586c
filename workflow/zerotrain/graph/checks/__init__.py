"""Checks of a run before any stage starts; they load neither a model nor torch.

`zerotrain check` and the Snakefile call them, so both report the same, except that a plan reads no
captions. Each part returns the errors that a stage would raise later; they are reported together,
with the lines of the file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zerotrain import artifact
from zerotrain.artifact.documents import read_text
from zerotrain.artifact.layout import RunFolder
from zerotrain.config import optimizers
from zerotrain.config.data import DataConfig
from zerotrain.config.families import DEFAULT
from zerotrain.config.problems import InvalidConfigError, Problem, collect_errors, join_problems
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import read_runs
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.config.trackers import check_installed
from zerotrain.errors import PipelineError
from zerotrain.graph.checks.base import check_base, check_named_base, forget_bases
from zerotrain.graph.checks.data import (
    check_conditioning_images,
    check_data,
    check_source,
    forget_data,
)
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import ModelSizes
from zerotrain.state.position import TrainerState
from zerotrain.training.checkpointing.preflight import find_losses, state_slots

PATHS = frozenset((
    "base", "images", "mask_images", "conditioning_images", "path", "metadata", "folder", "names",
    "resume_from_checkpoint", "offload_path",
))  # fmt: skip
"""Keys whose texts are paths, in whatever section they are."""
MOST_NAME, MOST_PATH = 255, 4095
"""Bytes that Linux allows of a name and of a path."""


def check_paths(values: Any) -> list[PipelineError]:
    """List the paths of a configuration's values that cannot be looked for."""
    return [
        PipelineError(f"{key}: {text[:100]!r} {why}", hint="correct the name")
        for key, text in _paths(values, "")
        if (why := _find_error(text))
    ]


def _find_error(text: str) -> str | None:
    """Return the end of a sentence that begins with the path; None if it can be looked for."""
    if "\0" in text:
        return "holds a null byte"
    data = text.encode(errors="replace")
    if len(data) > MOST_PATH or max(map(len, data.split(b"/"))) > MOST_NAME:
        return f"is longer than the {MOST_NAME} bytes of a name, or the {MOST_PATH:,} of a path"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return "begins with the home folder of a user whom this machine does not know"
    return None


def _paths(values: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(values, dict):
        for name, inner in values.items():
            yield from _paths(inner, str(name))
    elif isinstance(values, list | tuple):
        for inner in values:
            yield from _paths(inner, key)
    elif isinstance(values, str) and key in PATHS:
        yield key, values


PRESETS = Path("config/launch")
STAND_IN = ModelSizes(10**9, 10**9, 10**7, "weight", 10**7, 10**3)
"""A stand-in model; its sizes determine bucket sizes and cause no refusal."""
FAR = 10**9
"""Steps beyond any real end, for ends that depend on the length of an epoch."""


def check_phases(run: RunConfig) -> list[PipelineError]:
    """List what is wrong with the phases, individually and in sequence.

    render_launch resolves a phase once dataset and base exist. Here it is resolved with stand-ins
    for both, to refuse at once whatever depends on the configuration alone. Checks that depend on
    the length of an epoch are left to render_launch.
    """
    known = run if _ends_are_known(run) else _with_far_ends(run)
    resolved: list[ResolvedPhase | None] = []
    problems = []
    for phase in run.phases:
        try:
            resolved.append(_resolve(known, phase.name))
        except PipelineError as error:
            problems.append(error)
            resolved.append(None)
        if artifact.is_published(RunFolder(run.run).phase(phase.name).checkpoint):
            continue  # already trained, maybe on another machine: nothing is needed here
        problems += collect_errors(
            lambda phase=phase: check_installed(phase.train.report_to),  # type: ignore[misc]
            partial(_check_bitsandbytes, phase.name, phase.train.optimizer),
            partial(_check_offload_path, phase.name, phase.launch.offload_path),
        )
    for before, after in pairwise(resolved):
        if before and after:
            problems += collect_errors(partial(_check_switch, before, after))
    return problems


def _ends_are_known(run: RunConfig) -> bool:
    """Return whether each phase's end is independent of the dataset and of a checkpoint."""
    epochs = any(phase.until.endswith("epochs") for phase in run.phases)
    return not epochs and run.resume_from_checkpoint is None


def _with_far_ends(run: RunConfig) -> RunConfig:
    """Return the run with ends beyond any save, warm-up or step of its phases."""
    phases = [
        phase.model_copy(
            update={
                "until": f"{(place + 1) * FAR} steps",
                # Momentum grows by decay_mom_rate each step; by such an end it would exceed any
                # bound.
                "train": phase.train.model_copy(
                    update={
                        "lr_scheduler_args": {
                            key: value
                            for key, value in phase.train.lr_scheduler_args.items()
                            if key != "decay_mom_rate"
                        }
                    }
                ),
            }
        )
        for place, phase in enumerate(run.phases)
    ]
    return run.model_copy(update={"phases": phases})


def _resolve(run: RunConfig, name: str) -> ResolvedPhase | None:
    """Resolve a phase with stand-ins; None for `auto`, which depends on the machine."""
    preset = _preset(run.phase(name).launch.preset)
    if preset.engine == "auto":
        return None
    sizes = STAND_IN if preset.engine == "deepspeed" else None
    return resolve_phase(LaunchSettings.of(run, name), preset, 1, sizes)


@cache  # phases and runs share them
def _preset(name: str) -> Preset:
    return read_preset(PRESETS / f"{name}.yaml")


def _check_bitsandbytes(phase: str, optimizer: str) -> None:
    if optimizers.find(optimizer)[0].name != "adamw8bit":
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise PipelineError(
            f"phase {phase}: optimizer {optimizer} needs bitsandbytes, which is not installed",
            hint="install it (`pip install bitsandbytes`); or optimizer: adamw, with launch: "
            "zero2_offload where its moments do not fit the GPU",
        )


def _check_offload_path(phase: str, path: str | None) -> None:
    """Check that a path is no file. Variables are expanded only on the training machine."""
    if path is None or "$" in path:
        return
    folder = Path(path).expanduser()
    if folder.exists() and not folder.is_dir():
        raise PipelineError(
            f"phase {phase}: launch.offload_path: {path} is a file",
            hint="name a folder on a fast disk",
        )


def _check_switch(before: ResolvedPhase, after: ResolvedPhase) -> None:
    """Check that a switch loses no state but what the phase's `allow` names."""
    losses = find_losses(_position_after(before), state_slots(before), after)
    if refused := [text for name, text in losses.items() if name not in after.allow]:
        raise PipelineError(
            f"phase {after.phase}: {'; '.join(refused)} (after phase {before.phase})",
            hint=f"to continue without, write `allow: [{', '.join(losses)}]` into the phase "
            f"{after.phase}; to keep it, change the phase so that it fits the one before",
        )


def _position_after(phase: ResolvedPhase) -> TrainerState:
    """Return the position at a phase's end, with the fields that the next phase reads."""
    fp16 = phase.launch.fp16
    scaled = {"scale": fp16.loss_scale or 2.0**fp16.initial_scale_power}
    return TrainerState(
        run=phase.run,
        phase=phase.phase,
        step=phase.derived.until_step,
        samples=phase.derived.until_step * phase.train.global_batch_size,
        optimizer=phase.train.optimizer,
        optimizer_step=phase.derived.until_step,
        param_groups=[],
        lr_scheduler=phase.train.lr_scheduler,
        lr_scheduler_steps=phase.derived.lr_scheduler_steps,
        rng={},
        engine={},
        ran_on={},
        history=[],
        loss_scale=scaled if phase.launch.mixed_precision == "fp16" else None,
    )


def read_checked_runs(path: Path, *, captions: bool = False) -> dict[str, RunConfig]:
    """Read the runs of a configuration file as config.runs.read_runs does, and check them.

    Args:
        path: The file.
        captions: Whether to read rows of text, and caption files next to images, which takes a plan
            too long each time.

    Raises:
        PipelineError: all problems of the first file that has any, in its values and in what it
            names.
    """
    try:
        runs = read_runs(path)
    except InvalidConfigError as error:
        others = [Problem(p.what, p.hint) for p in _problems_of_values(error.raw)]
        raise join_problems(error.source, [*error.problems, *others], error.text) from error
    check_runs(runs, captions=captions)
    return runs


def check_runs(runs: Mapping[str, RunConfig], *, captions: bool = False) -> None:
    """Check what runs refer to: base, data, checkpoint, presets, launches, adapters.

    Args:
        runs: Valid configurations, by the files that hold them.
        captions: As of read_checked_runs.

    Raises:
        PipelineError: all problems of the first file that has any.
    """
    for file, run in runs.items():
        _raise_joined(Path(file), find_problems(run, captions=captions))


def check_launches(file: Path, run: RunConfig) -> None:
    """Check a run's phases alone, of which another part of the configuration was checked before.

    Raises:
        PipelineError: all problems of its phases.
    """
    _raise_joined(file, check_phases(run))


def _raise_joined(file: Path, problems: Sequence[PipelineError]) -> None:
    if problems:
        text = read_text(file, follow_links=True) if file.is_file() else None
        raise join_problems(str(file), [Problem(p.what, p.hint) for p in problems], text)


def forget_checks() -> None:
    """Look at folders again, of which this process has checked some; a command checks each once."""
    forget_bases()
    forget_data()


def _problems_of_values(raw: Mapping[str, Any]) -> list[PipelineError]:
    """List what is wrong with the base and the data of a file whose other values are invalid."""
    if found := check_paths(raw):
        return found
    found = list(check_named_base(raw.get("family", DEFAULT), raw.get("base"), raw.get("revision")))
    try:
        return [*found, *check_source(DataConfig.model_validate(raw.get("data")))]
    except ValidationError:
        return found


def find_problems(run: RunConfig, *, captions: bool = False) -> list[PipelineError]:
    """List what stages would refuse in a valid configuration, in the order of its file."""
    return check_paths(run.model_dump()) or [
        *check_base(run),
        *check_resume(run),
        *check_data(run, captions=captions),
        *check_conditioning_images(run),
        *check_phases(run),
    ]


def check_resume(run: RunConfig) -> list[PipelineError]:
    """List what is missing from resume_from_checkpoint, unless the run has already imported it."""
    resume = run.resume_from_checkpoint
    if resume is None or (RunFolder(run.run).imported_state / "manifest.json").is_file():
        return []
    return collect_errors(lambda: _check_folder(resume.folder), lambda: _check_names(resume.names))


def _check_folder(folder: str) -> None:
    path = Path(folder).expanduser()
    empty = path.is_dir() and not any(path.iterdir())
    if empty or not path.exists():
        raise PipelineError(
            f"resume_from_checkpoint: {path}: no such folder, or nothing in it",
            hint="name a folder that exists, or remove `resume_from_checkpoint`",
        )


def _check_names(names: str | None) -> None:
    if names not in (None, "module") and not Path(str(names)).expanduser().is_file():
        raise PipelineError(
            f"resume_from_checkpoint.names: {names}: no such file",
            hint="name a text file with a parameter's name a line, or write `module`",
        )
