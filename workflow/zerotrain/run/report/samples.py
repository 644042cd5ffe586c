"""Did it learn: the same prompts and seeds before, during and after the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from zerotrain.artifact import Artifact
from zerotrain.data.sheets import cut_rows
from zerotrain.evaluation.results import ANSWERS, BASE, RAW, compare_metrics, read_answers
from zerotrain.machine.regular_file import open_to_read
from zerotrain.run.phase import PhaseView
from zerotrain.run.report.figures import Missing, Picture, Table
from zerotrain.run.view import RunView

if TYPE_CHECKING:
    from zerotrain.config.models import EvaluateConfig, Phase

GRID, STEPS = "grid.png", "steps.png"
BASE_LABEL, AVERAGED = "base model", " (EMA)"
MOST_ANSWERS = 50
MOST_BYTES = 2_000_000
"""Bytes of all samples beyond which they are compressed with loss."""
QUALITY = 80
SAMPLING = ("images_per_prompt", "num_inference_steps", "guidance_scale", "scheduler")
"""Values that a validation and an evaluation share if they make the same images."""
Source = tuple[str, Artifact]
"""A label, such as the name of a phase, and an evaluation."""


@dataclass(frozen=True)
class Version:
    """The images that one set of weights makes of a prompt."""

    label: str
    picture: Picture
    size: tuple[int, int]
    """Width and height in pixels."""


@dataclass(frozen=True)
class SampleRow:
    """A prompt with its images by different weights."""

    prompt: str
    versions: Sequence[Version]


@dataclass(frozen=True)
class Grid:
    """Prompts with their images of one size."""

    size: str
    """As 1216x832; empty for squares."""
    rows: Sequence[SampleRow]


@dataclass(frozen=True)
class Samples:
    """The first chapter."""

    grids: Sequence[Grid]
    over_steps: Sequence[Version]
    """The grid of each phase that made images while it trained."""
    answers: Table | None
    """For text: prompts with what was expected and what each phase generated."""
    metrics: Table
    conditioned: bool
    """Whether rows start with conditioning images."""
    compressed: bool
    missing: Sequence[str]


def gather_samples(
    view: RunView, phases: Sequence[Phase], evaluate: EvaluateConfig, *, is_text: bool
) -> Samples:
    """Gather the samples of a run.

    Args:
        view: The run.
        phases: Its phases in the configuration, in order.
        evaluate: How images are made.
        is_text: Whether it trains a language model.
    """
    missing = Missing()
    _note_missing(view, missing)
    evaluated = [phase for phase in view.started if phase.evaluation]
    last = evaluated[-1] if evaluated else None
    grids: list[Grid] = []
    over_steps: list[Version] = []
    answers = None
    if is_text:
        answers = join_answers(
            [(f"phase {phase.name}", phase.evaluation) for phase in evaluated if phase.evaluation]
        )
    elif last is not None and last.evaluation is not None:
        base = _baseline(phases, view.started, evaluate)
        sources = [(_label(phase), phase.evaluation) for phase in evaluated if phase.evaluation]
        if not base and not any(BASE in evaluation.files for _, evaluation in sources):
            missing.note(
                "There are no images of the base model: the evaluation of the first phase makes "
                "them if the base is still there."
            )
        grids = [join_grids(size, sources, base) for size in grid_sizes(last.evaluation)]
        over_steps = list(_over_steps(view.started))
    grids, over_steps, compressed = compress(grids, over_steps)
    rows = compare_metrics([phase.metrics for phase in evaluated], learned=True)
    return Samples(
        grids=grids,
        over_steps=over_steps,
        answers=answers,
        metrics=Table(rows, ["", *(_label(phase) for phase in evaluated)], numbers=True),
        conditioned=last is not None
        and last.evaluation is not None
        and "conditioning_images" in last.evaluation.content,
        compressed=compressed,
        missing=missing.sentences,
    )


def _note_missing(view: RunView, missing: Missing) -> None:
    for name in view.unmeasured:
        missing.note(f"Phase {name} has not been evaluated.")
    for name in view.later:
        missing.note(f"Phase {name} has not started.")
    averaged = [
        phase.name
        for phase in view.started
        if phase.averaged and not (phase.evaluation and RAW in phase.evaluation.files)
    ]
    if averaged:
        both = bool(view.curves.series("val_loss_ema"))
        missing.note(
            f"The weights of {_list(averaged)} are averaged ones (EMA), and are what is shown; no "
            "images are made of the weights without averaging."
            + (" The curves compare their losses." if both else "")
        )


def _label(phase: PhaseView) -> str:
    return phase.name + AVERAGED if phase.averaged else phase.name


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def grid_sizes(evaluation: Artifact) -> list[str]:
    """Return the names of an evaluation's grids; that of squares is empty."""
    files = sorted(evaluation.files)
    own = [file[5:-4] for file in files if file.startswith("grid-") and file.endswith(".png")]
    return ([""] if GRID in files else []) + own


def join_grids(size: str, sources: Sequence[Source], base: Mapping[str, Version]) -> Grid:
    """Return each prompt with its images from all sources that have the prompt.

    Those of the base model and of weights without averaging come before their source's own.

    Args:
        size: Name of the grids.
        sources: The evaluations, in order.
        base: The images of the base model by their prompts.
    """
    prompts = {label: evaluation.content.get("prompts", []) for label, evaluation in sources}
    found: dict[str, list[Version]] = {}
    if not size:
        known = {prompt for own in prompts.values() for prompt in own}
        found = {prompt: [version] for prompt, version in base.items() if prompt in known}
    for label, evaluation in sources:
        for shown, file in _files(label, size):
            if file in evaluation.files:
                for prompt, image in _rows(evaluation.path(file), prompts[label]):
                    version, versions = _version(shown, prompt, image), found.setdefault(prompt, [])
                    # Runs that are compared may share their base.
                    if not (file == BASE and prompt in base) and version not in versions:
                        versions.append(version)
    # In the order of the last evaluation, whose prompts are the configuration's.
    order = list(dict.fromkeys([*prompts[sources[-1][0]], *found]))
    rows = [SampleRow(prompt, found[prompt]) for prompt in order if prompt in found]
    return Grid(size, rows)


def _files(label: str, size: str) -> list[tuple[str, str]]:
    """Return labels and names of an evaluation's grids of a size, in the order of the page."""
    if size:
        return [(label, f"grid-{size}.png")]
    raw = f"{label.removesuffix(AVERAGED)}, without averaging"
    return [(BASE_LABEL, BASE), (raw, RAW), (label, GRID)]


def _rows(path: Path, prompts: Sequence[str]) -> list[tuple[str, Image.Image]]:
    with open_to_read(path) as stream, Image.open(stream, formats=["PNG"]) as grid:
        return list(zip(prompts, cut_rows(grid, len(prompts)), strict=True)) if prompts else []


def _baseline(
    phases: Sequence[Phase], views: Sequence[PhaseView], evaluate: EvaluateConfig
) -> dict[str, Version]:
    """Return images of the weights before the first step by their prompts; empty without any."""
    if not views or views[0].name != phases[0].name or views[0].launch is None:
        return {}
    validation = phases[0].validation
    if validation is None or any(
        getattr(validation, key) != getattr(evaluate, key) for key in SAMPLING
    ):
        return {}
    step = views[0].launch.derived.start_step
    path = views[0].places.progress / "samples" / f"step-{step:08d}.png"
    if not path.is_file():
        return {}
    prompts = [one if isinstance(one, str) else one[0] for one in validation.asked]
    label = BASE_LABEL if step == 0 else f"before step {step + 1:,}"
    return {prompt: _version(label, prompt, image) for prompt, image in _rows(path, prompts)}


def _over_steps(views: Sequence[PhaseView]) -> Iterator[Version]:
    """Yield the grids that phases made while they trained, a column for each validation."""
    for phase in views:
        path = phase.places.progress / "samples" / STEPS
        if path.is_file():
            with open_to_read(path) as stream, Image.open(stream, formats=["PNG"]) as image:
                alt = f"The first image of each prompt from step to step of phase {phase.name}"
                picture = Picture(alt, _png(image))
                yield Version(phase.name, picture, image.size)


def _version(label: str, prompt: str, image: Image.Image) -> Version:
    alt = f"Images of {prompt or 'the empty prompt'!r} by {label}"
    return Version(label, Picture(alt, _png(image)), image.size)


def _png(image: Image.Image) -> bytes:
    written = BytesIO()
    image.save(written, format="PNG", optimize=True)
    return written.getvalue()


def compress(
    grids: list[Grid], over_steps: list[Version]
) -> tuple[list[Grid], list[Version], bool]:
    """Compress the pictures if they are large; and return whether they were."""
    rows = [row for grid in grids for row in grid.rows]
    versions = [*over_steps, *(version for row in rows for version in row.versions)]
    if sum(len(version.picture.light) for version in versions) <= MOST_BYTES:
        return grids, over_steps, False
    smaller = [replace(grid, rows=[_compressed(row) for row in grid.rows]) for grid in grids]
    return smaller, [_smaller(version) for version in over_steps], True


def _compressed(row: SampleRow) -> SampleRow:
    return replace(row, versions=[_smaller(version) for version in row.versions])


def _smaller(version: Version) -> Version:
    picture = version.picture
    return replace(version, picture=replace(picture, light=webp(picture.light)))


def webp(png: bytes) -> bytes:
    """Compress a PNG with loss."""
    written = BytesIO()
    with Image.open(BytesIO(png), formats=["PNG"]) as image:
        image.convert("RGB").save(written, format="WEBP", quality=QUALITY)
    return written.getvalue()


def join_answers(sources: Sequence[Source]) -> Table | None:
    """Return prompts with the answers of each source, wrong ones of the last source first."""
    found = {
        label: read_answers(evaluation.path(ANSWERS))
        for label, evaluation in sources
        if ANSWERS in evaluation.files
    }
    if not found:
        return None
    last = next(reversed(found.values()))
    wrong = [answer for answer in last if answer.expected not in (None, answer.generated)]
    right = [answer for answer in last if answer.expected in (None, answer.generated)]
    by_source = {
        label: {(one.prompt, one.expected): one.generated for one in answers}
        for label, answers in found.items()
    }
    rows = [
        [
            one.prompt,
            one.expected or "",
            *(by_source[label].get((one.prompt, one.expected), "") for label in found),
        ]
        for one in [*wrong, *right][:MOST_ANSWERS]
    ]
    return Table(rows, ["prompt", "expected", *found])
