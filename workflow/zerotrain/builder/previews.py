"""The files of a launch before they are written: our phase, accelerate's YAML, DeepSpeed's JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from zerotrain.artifact.layout import RunFolder
from zerotrain.builder.draft import Draft
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.config.text import dump
from zerotrain.errors import PipelineError
from zerotrain.launch.files import accelerate_text
from zerotrain.launch.planner.planner import AUTO
from zerotrain.launch.planner.traced import TracedModel
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import ResolvedPhase

EPOCH = 1000
"""Samples that an epoch is taken to have; prepare_dataset counts them."""


@dataclass(frozen=True)
class Preview:
    """A file, and its lines that a change has made.

    Attributes:
        title: Its name.
        text: Its content; empty without one.
        note: Why it is empty, or what is not final.
        lines: The lines, and whether each is new.
    """

    title: str
    text: str
    note: str = ""
    lines: tuple[tuple[str, bool], ...] = field(default=())


def resolve(
    draft: Draft, run: RunConfig, traced: TracedModel | None, recommended: str
) -> ResolvedPhase:
    """Resolve the draft's phase as render_launch does.

    Raises:
        PipelineError: values do not fit together, or a size is not known yet.
    """
    phase = run.phases[draft.index]
    name = phase.launch.preset
    if name == "auto" and not recommended:
        raise PipelineError(
            "auto has not chosen a preset: none fits, or the model is still being traced",
            hint="choose a preset",
        )
    preset = read_preset(AUTO.with_name(f"{recommended if name == 'auto' else name}.yaml"))
    if preset.engine == "deepspeed" and traced is None:
        raise PipelineError(
            "DeepSpeed's buckets follow the model's sizes, which are not known yet",
            hint="wait for the trace",
        )
    why = "auto: chosen by the planner" if name == "auto" else ""
    settings = LaunchSettings.of(run, phase.name)
    return resolve_phase(settings, preset, EPOCH, traced.sizes if traced else None, why=why)


def preview(draft: Draft, resolved: ResolvedPhase | str) -> list[Preview]:
    """Return the three files of a phase; for what is not resolved, the launchers' say why."""
    shown = {key: value for key, value in draft.raw.items() if key in PHASE_SECTIONS}
    epochs = any(
        phase.until.endswith("epochs") for phase in (draft.run.phases if draft.run else ())
    )
    note = f"Steps of an epoch: taken for a dataset of {EPOCH} samples." if epochs else ""
    files = [Preview("Configuration", dump(shown), note)]
    if isinstance(resolved, str):
        return [*files, *(Preview(name, "", resolved) for name in FILES)]
    folder = RunFolder(resolved.run).phase(resolved.phase).launch
    files.append(Preview(FILES[0], accelerate_text(resolved, folder / "deepspeed.json")))
    if resolved.derived.engine == "deepspeed":
        files.append(Preview(FILES[1], json.dumps(resolved.derived.deepspeed, indent=2)))
    else:
        files.append(Preview(FILES[1], "", "Plain PyTorch has no DeepSpeed file."))
    return files


FILES = ("accelerate.yaml", "deepspeed.json")
PHASE_SECTIONS = ("run", "family", "base", "lora", "data", "train", "launch", "phases")
"""What the preview shows of a configuration."""


def mark_changes(before: list[Preview], after: list[Preview]) -> list[Preview]:
    """Return previews with the lines marked that the ones before do not have."""
    old = {one.title: one.text for one in before}
    return [
        Preview(one.title, one.text, one.note, _lines(old.get(one.title, one.text), one.text))
        for one in after
    ]


def _lines(before: str, after: str) -> tuple[tuple[str, bool], ...]:
    old, new = before.splitlines(), after.splitlines()
    marked = [True] * len(new)
    for _, start, size in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        marked[start : start + size] = [False] * size
    return tuple(zip(new, marked, strict=True))
