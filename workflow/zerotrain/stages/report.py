"""report: a run on one self-contained page, for its rule or by hand."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.layout import CONFIGS, RunFolder
from zerotrain.artifact.recipe import Recipe
from zerotrain.config.data import ALPACA
from zerotrain.config.read import read_config
from zerotrain.config.runs import find_config
from zerotrain.config.stage_settings import LaunchSettings, PlannedRun, ReportSettings
from zerotrain.config.trackers import ALL, TENSORBOARD
from zerotrain.data.conversation import read_conversations
from zerotrain.data.dataset import KIND as DATASET
from zerotrain.data.dataset import Sample, read_dataset
from zerotrain.data.dataset_folder import read_bad, read_left_out
from zerotrain.data.figures import Section, image_sections, text_sections
from zerotrain.data.open import open_source
from zerotrain.data.sheets import draw_sheet, read_pictures
from zerotrain.errors import PipelineError
from zerotrain.evaluation.results import ANSWERS, spread
from zerotrain.export.formats.loading_code import loading_code
from zerotrain.launch.planner.forecasts import find_base
from zerotrain.machine.regular_file import write_text
from zerotrain.run.doctor.report import redact
from zerotrain.run.lineage.chain import source_of
from zerotrain.run.phase import PhaseView
from zerotrain.run.report.costs import compare_forecasts, count_costs
from zerotrain.run.report.health import check_health
from zerotrain.run.report.origin import Sources, trace_origin, walk_lineage
from zerotrain.run.report.page import Page, in_short, render_page
from zerotrain.run.report.samples import GRID, gather_samples
from zerotrain.run.view import RunView

KIND = "report"
PAGE = "index.html"
SHEET_SAMPLES = 24
"""Samples on the page's contact sheet, which is a part of the page's size."""
HOMES = re.compile(r"(?<![\w.])/(?:home|Users)/[^/\s\"':,;)]+")
"""Home folders of anybody."""


def report(
    settings: ReportSettings,
    folders: list[Path],
    output: Path,
    config: Path | None = None,
    planned: Mapping[str, PlannedRun] | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Publish index.html, and print where the results are.

    Args:
        settings: What the stage reads of the configuration.
        folders: Folders of the phases, in order.
        output: Folder to publish.
        config: The configuration's file, which the page names.
        planned: What the planner reads of the configuration, by phase; none: no forecast.
        recipe: What the folder records of what it is made from.

    Raises:
        PipelineError: a phase has not been evaluated.
    """
    facts = RunView(settings.run, folders=folders)
    for name in [*facts.unmeasured, *facts.later]:
        folder = next(folder for folder in folders if folder.name == name)
        artifact.read(folder / "evaluation", "evaluation")  # says what is missing
    parents = {phase.name: phase.evaluation for phase in facts.started if phase.evaluation}
    with artifact.publish(output, KIND, parents=parents, recipe=recipe) as draft:
        page = _render(settings, facts, config, planned or {}, trace=False)
        write_text(draft.folder / PAGE, page)
        draft.content = {"run": settings.run, "phases": [folder.name for folder in folders]}
    _print_places(settings, facts, folders, output / PAGE)


def report_run(run: str, output: Path | None) -> None:
    """Write a page about a run as far as it has come, and print its path.

    Args:
        run: Its name, or its configuration file.
        output: HTML file to write, or a folder for index.html; default: report.html in the run's
            folder.

    Raises:
        PipelineError: no configuration defines the run, or none of its phases has started.
    """
    file = find_config(run)
    parsed = read_config(file)
    results = RunFolder(parsed.run)
    folders = [results.phase(phase.name).path for phase in parsed.phases]
    facts = RunView(parsed.run, folders=folders)
    if not facts.started:
        raise PipelineError(
            f"{results.path}: no phase of the run {parsed.run} has started, so there is nothing to "
            "report",
            hint=f"`snakemake --cores all train --configfile {shlex.quote(str(file))}` trains it",
        )
    planned = {phase.name: parsed for phase in parsed.phases}
    page = _render(ReportSettings.of(parsed), facts, file, planned, trace=True)
    path = output or results.path / "report.html"
    path = path / PAGE if path.is_dir() else path
    artifact.write_whole(path, page)
    print(f"report   {path}")


def planned_phases(config: Path) -> dict[str, PlannedRun]:
    """Return what the planner reads of a configuration, by phase."""
    run = read_config(config)
    return {phase.name: LaunchSettings.of(run, phase.name) for phase in run.phases}


def _render(
    settings: ReportSettings,
    facts: RunView,
    config: Path | None,
    planned: Mapping[str, PlannedRun],
    *,
    trace: bool,
) -> str:
    """Return the page; `trace` lets the planner trace models that no plan has traced yet."""
    nodes = walk_lineage(facts)
    evaluated = [phase for phase in facts.started if phase.evaluation]
    data, sheet = _data(settings, evaluated[-1].evaluation if evaluated else None)
    sources = Sources(
        data=data,
        sheet=sheet,
        commands=_commands(settings, facts, config),
        loading={phase.name: _loading(phase, settings) for phase in evaluated},
    )
    forecast = compare_forecasts(facts, planned, find_base(settings.run), trace=trace)
    page = Page(
        run=settings.run,
        summary=_summary(settings, facts),
        in_short=in_short(facts),
        samples=gather_samples(facts, settings.phases, settings.evaluate, is_text=settings.is_text),
        health=check_health(facts),
        cost=count_costs(facts, nodes, forecast),
        origin=trace_origin(facts, nodes, sources, is_text=settings.is_text),
    )
    return render_page(page, hide_places)


def hide_places(text: str) -> str:
    """Remove the project's folder, home folders and likely secrets from a text."""
    project = str(Path.cwd())
    if project != "/":
        text = text.replace(f"{project}/", "")
    return redact(HOMES.sub("~", redact(text)))


def _print_places(
    settings: ReportSettings, facts: RunView, folders: Sequence[Path], page: Path
) -> None:
    last = facts.started[-1]
    assert last.evaluation is not None
    shown = "answers  " if settings.is_text else "grid     "
    made = last.folder / "evaluation" / (ANSWERS if settings.is_text else GRID)
    print(
        f"report   {page}\n"
        f"weights  {last.folder / 'weights'}\n"
        f"{shown}{made}\n"
        f"metrics  {last.folder / 'metrics.json'}\n"
        f"curves   {_curves(settings, folders)}\n"
        f"use it   {shlex.join(_use_command(settings, last))}"
    )


def _use_command(settings: ReportSettings, phase: PhaseView) -> list[str]:
    assert phase.evaluation is not None
    command = use_command(
        phase.folder / "weights",
        phase.evaluation.content,
        _resolution(settings, phase.name),
        phase.folder / "evaluation",
    )
    return [*command, "--raw"] if settings.data.prompt_template == ALPACA else command


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


def _curves(settings: ReportSettings, folders: Sequence[Path]) -> str:
    named = {name for phase in settings.phases for name in phase.train.report_to}
    if named & {ALL, TENSORBOARD}:
        return f"tensorboard --logdir {shlex.quote(str(folders[-1].parent))}"
    return str(folders[-1] / "state" / "records" / "metrics.jsonl")


def _loading(phase: PhaseView, settings: ReportSettings) -> str:
    """Return Python code that loads a phase's weights and asks as its evaluation did."""
    assert phase.evaluation is not None
    content = phase.evaluation.content
    images = content.get("conditioning_images", [[]])[0]
    return loading_code(
        phase.folder / "weights",
        settings.family,
        content["prompts"][0],
        resolution=_resolution(settings, phase.name),
        max_sequence_length=settings.max_sequence_length,
        long_captions=settings.long_captions,
        raw=settings.data.prompt_template == ALPACA,
        system=content.get("systems", [None])[0],
        images=[(phase.folder / "evaluation" / file).as_posix() for file in images] or None,
    )


def _commands(settings: ReportSettings, facts: RunView, config: Path | None) -> list[str]:
    """Return the commands that make the run again, verify it and use it."""
    commit, _, dirty = _commit(facts).partition("-")
    commands = []
    if commit:
        note = "  # with local changes, which are in no commit" if dirty else ""
        commands.append(f"git checkout {commit[:10]}{note}")
    train = ["snakemake", "--cores", "all", "train"]
    if config is not None and config != CONFIGS / "config.yaml":
        train += ["--configfile", str(config)]
    commands.append(shlex.join(train))
    if facts.started and facts.started[-1].weights:
        last = facts.started[-1]
        commands.append(shlex.join(["zerotrain", "trace", str(last.folder / "weights")]))
        if last.evaluation:
            commands.append(shlex.join(_use_command(settings, last)))
    return commands


def _commit(facts: RunView) -> str:
    """Return the commit that trained the last phase, `-dirty` with local changes."""
    published = [phase.checkpoint for phase in facts.started if phase.checkpoint]
    return str(source_of(published[-1]).get("commit") or "") if published else ""


def _png(image: Any) -> bytes:
    written = BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


def _summary(settings: ReportSettings, facts: RunView) -> list[tuple[str, str]]:
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
    commit, _, dirty = _commit(facts).partition("-")
    return rows + [("commit", commit[:10] + (" with local changes" if dirty else ""))] * bool(
        commit
    )


def _data(
    settings: ReportSettings, evaluation: Artifact | None
) -> tuple[list[Section], bytes | None]:
    """Return the figures of the dataset and a contact sheet; nothing if the dataset is gone."""
    parent = evaluation.parents.get("dataset") if evaluation else None
    if parent is None or not artifact.is_published(folder := Path(parent["path"])):
        return [], None
    dataset = artifact.read(folder, DATASET, verify=False)
    if dataset.identity != parent["identity"]:
        return [], None
    bad, left_out = read_bad(dataset), [*read_left_out(dataset).rows()]
    if settings.is_text:
        return text_sections(read_conversations(folder).samples, bad, left_out), None
    samples = read_dataset(folder).samples
    resolution = max(phase.train.resolution for phase in settings.phases)
    data = settings.data
    sections = image_sections(
        samples,
        bad,
        resolution=resolution,
        buckets=data.aspect_buckets,
        own=data.resolutions,
        left_out=left_out,
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
