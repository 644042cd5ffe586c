"""report: a run on one self-contained page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.config.data import ALPACA
from zerotrain.config.stage_settings import ReportSettings
from zerotrain.config.trackers import ALL, TENSORBOARD
from zerotrain.data.contact_sheet import draw_sheet, read_pictures
from zerotrain.data.conversation import read_conversations
from zerotrain.data.dataset import KIND as DATASET
from zerotrain.data.dataset import Sample, read_dataset
from zerotrain.data.dataset_folder import read_bad
from zerotrain.data.figures import Section, image_sections, text_sections
from zerotrain.data.open import open_source
from zerotrain.errors import PipelineError
from zerotrain.evaluation.report_page import PhaseFacts, render_page
from zerotrain.evaluation.results import ANSWERS, Answer, read_answers, spread
from zerotrain.export.formats.loading_code import loading_code
from zerotrain.launch.explain import launch_facts
from zerotrain.pipeline.lineage.facts import source_of
from zerotrain.state.position import read_position
from zerotrain.state.ran_on import RanOn
from zerotrain.training.reporting.grid import cut_rows

KIND = "report"
GRID = "grid.png"
POSITION = "checkpoint.json"
SHEET_SAMPLES = 24
"""Samples on the page's contact sheet, which is a part of the page's size."""


def report(settings: ReportSettings, folders: list[Path], output: Path) -> None:
    """Publish index.html (grid, curves, metrics, launch of each phase), and print the paths.

    Args:
        settings: What the stage reads of the configuration.
        folders: Folders of the phases, in order.
        output: Folder to publish.

    Raises:
        PipelineError: a phase has not been evaluated.
    """
    facts = [_phase(folder, settings) for folder in folders]
    parents = {
        folder.name: artifact.read(folder / "evaluation", "evaluation", verify=False)
        for folder in folders
    }
    evaluated = parents[folders[-1].name]
    with artifact.publish(output, KIND, parents=parents) as draft:
        page = render_page(
            settings.run,
            _summary(settings, folders[-1]),
            facts,
            *_data(settings, evaluated),
        )
        (draft.folder / "index.html").write_text(page, encoding="utf-8")
        draft.content = {"run": settings.run, "phases": [folder.name for folder in folders]}
    last = facts[-1]
    shown = "answers  " if settings.is_text else "grid     "
    made = folders[-1] / "evaluation" / (ANSWERS if settings.is_text else GRID)
    command = use_command(
        last.weights,
        evaluated.content,
        _resolution(settings, last.name),
        folders[-1] / "evaluation",
    )
    if settings.data.prompt_template == ALPACA:
        command.append("--raw")
    print(
        f"report   {output / 'index.html'}\n"
        f"weights  {last.weights}\n"
        f"{shown}{made}\n"
        f"metrics  {folders[-1] / 'metrics.json'}\n"
        f"curves   {_curves(settings, folders)}\n"
        f"use it   {shlex.join(command)}"
    )


def use_command(
    weights: Path, evaluated: Mapping[str, Any], resolution: int | None, folder: Path
) -> list[str]:
    """Return the command that tries the weights with the shortest prompt of an evaluation.

    Args:
        weights: Folder of the weights.
        evaluated: Content of the evaluation's manifest.
        resolution: Side of images in pixels; None for a language model.
        folder: Folder of the evaluation, with the conditioning images of its prompts.
    """
    prompts = evaluated["prompts"]
    place = min(range(len(prompts)), key=lambda place: len(prompts[place]))
    act = "generate" if resolution is None else "sample"
    command = ["zerotrain", act, str(weights), prompts[place]]
    if systems := evaluated.get("systems"):
        command += ["--system", systems[place]] if systems[place] else []
    if images := evaluated.get("conditioning_images"):
        command += [word for file in images[place] for word in ("--image", str(folder / file))]
    return command if resolution is None else [*command, "--resolution", str(resolution)]


def _resolution(settings: ReportSettings, name: str) -> int | None:
    """Return the side of a phase's images; None for text."""
    resolutions = {phase.name: phase.train.resolution for phase in settings.phases}
    return None if settings.is_text else resolutions[name]


def _curves(settings: ReportSettings, folders: list[Path]) -> str:
    named = {name for phase in settings.phases for name in phase.train.report_to}
    if named & {ALL, TENSORBOARD}:
        return f"tensorboard --logdir {shlex.quote(str(folders[-1].parent))}"
    return str(folders[-1] / "state" / "records" / "metrics.jsonl")


def _phase(folder: Path, settings: ReportSettings) -> PhaseFacts:
    evaluation = artifact.read(folder / "evaluation", "evaluation")
    launch, metrics = folder / "launch", folder / "metrics.json"
    if launch.is_dir():  # a phase that was launched by hand has none
        artifact.read(launch, "launch")
    if not metrics.is_file():
        raise PipelineError(
            f"{metrics}: missing, so phase {folder.name} has not been evaluated",
            hint="run `snakemake --cores all report`, which evaluates every phase first",
        )
    return PhaseFacts(
        name=folder.name,
        metrics=json.loads(metrics.read_text()),
        samples=_samples(evaluation),
        other_sizes={
            file.removeprefix("grid-").removesuffix(".png"): _samples(evaluation, file)
            for file in sorted(evaluation.files)
            if file.startswith("grid-")
        },
        answers=_answers(evaluation),
        conditioned="conditioning_images" in evaluation.content,
        loss=evaluation.path("loss.png").read_bytes(),
        learning_rate=evaluation.path("learning_rate.png").read_bytes(),
        launch=launch_facts(launch / "run.yaml"),
        weights=folder / "weights",
        ran_on=_ran_on(folder / "checkpoint"),
        loading=loading_code(
            folder / "weights",
            settings.family,
            evaluation.content["prompts"][0],
            resolution=_resolution(settings, folder.name),
            max_sequence_length=settings.max_sequence_length,
            long_captions=settings.long_captions,
            raw=settings.data.prompt_template == ALPACA,
            system=evaluation.content.get("systems", [None])[0],
            images=[
                (folder / "evaluation" / file).as_posix()
                for file in evaluation.content.get("conditioning_images", [[]])[0]
            ]
            or None,
        ),
    )


def _ran_on(checkpoint: Path) -> RanOn | None:
    """Return what a phase's last steps ran on; None without a checkpoint with a position."""
    if not artifact.is_published(checkpoint):
        return None
    found = artifact.read(checkpoint, "checkpoint", verify=False)
    return RanOn.of(read_position(found, POSITION)) if POSITION in found.files else None


def _samples(evaluation: Artifact, file: str = GRID) -> list[tuple[str, bytes]]:
    """Return each prompt with a PNG of its images in a grid; nothing for text."""
    if file not in evaluation.files:
        return []
    prompts = evaluation.content["prompts"]
    with Image.open(evaluation.path(file), formats=["PNG"]) as grid:
        rows = cut_rows(grid, len(prompts))
    return [(prompt, _png(row)) for prompt, row in zip(prompts, rows, strict=True)]


def _png(image: Image.Image) -> bytes:
    written = BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


def _answers(evaluation: Artifact) -> list[Answer]:
    return read_answers(evaluation.path(ANSWERS)) if ANSWERS in evaluation.files else []


def _summary(settings: ReportSettings, folder: Path) -> list[tuple[str, str]]:
    evaluate = settings.evaluate
    scale = "default" if evaluate.guidance_scale is None else f"{evaluate.guidance_scale:g}"
    sampling = (
        f"{evaluate.num_inference_steps} steps, guidance {scale}, scheduler {evaluate.scheduler}"
    )
    rows = [
        ("family", settings.family),
        ("base", settings.base + (f" at {settings.revision}" if settings.revision else "")),
        ("data", settings.data.place),
        ("seed", str(settings.seed)),
        ("sampling", "greedy" if settings.is_text else sampling),
        ("report of", f"{datetime.now(UTC):%Y-%m-%d}"),
    ]
    if artifact.is_published(folder / "checkpoint"):
        made_by = source_of(artifact.read(folder / "checkpoint", "checkpoint", verify=False))
        commit, _, dirty = (made_by.get("commit") or "").partition("-")
        rows += [("commit", commit[:10] + (" with local changes" if dirty else ""))] * bool(commit)
    return rows


def _data(settings: ReportSettings, evaluation: Artifact) -> tuple[list[Section], bytes | None]:
    """Return the figures of the dataset and a contact sheet; nothing if the dataset is gone."""
    parent = evaluation.parents.get("dataset")
    if parent is None or not artifact.is_published(folder := Path(parent["path"])):
        return [], None
    dataset = artifact.read(folder, DATASET, verify=False)
    if dataset.identity != parent["identity"]:
        return [], None
    bad = read_bad(dataset)
    if settings.is_text:
        return text_sections(read_conversations(folder).samples, bad), None
    samples = read_dataset(folder).samples
    resolution = max(phase.train.resolution for phase in settings.phases)
    data = settings.data
    sections = image_sections(
        samples, bad, resolution=resolution, buckets=data.aspect_buckets, own=data.resolutions
    )
    return sections, _sheet(settings, samples)


def _sheet(settings: ReportSettings, samples: Sequence[Sample]) -> bytes | None:
    """Return a PNG of some samples; None if their images are not what was trained on."""
    try:
        pictures = read_pictures(spread(samples, SHEET_SAMPLES), open_source(settings.data))
    except PipelineError as error:
        print(f"WARNING: the report has no contact sheet: {error.what}", file=sys.stderr)
        return None
    return _png(draw_sheet(pictures)) if pictures else None
