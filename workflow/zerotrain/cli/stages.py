"""The commands that the rules call, one per stage, of its name; `report` is for people, too.

Each reads its settings file, and returns at once if its folders are current.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerotrain.config.command_options import RUN_HELP, folder_of, folder_option
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.graph.currency import StageJob

Settings = Annotated[
    Path,
    typer.Option(metavar="FILE", help="Settings of the stage, which `snakemake -n` writes."),
]
Dataset = Annotated[Path, folder_option("Dataset folder.")]
Base = Annotated[Path, folder_option("Base model folder.")]
Cache = Annotated[Path, folder_option("Cache folder.")]
Launch = Annotated[Path, folder_option("Launch folder.")]
Weights = Annotated[Path, folder_option("Weights folder.")]
State = Annotated[Path, folder_option("State folder.")]
Output = Annotated[Path, folder_option("Folder to publish.")]


def _job(stage: str, file: Path, output: Path, **inputs: Path | None) -> StageJob:
    from zerotrain.graph.currency import StageJob

    return StageJob.read(stage, file, output, inputs)


def prepare_dataset(settings: Settings, output: Output) -> None:
    """Check images and captions, or text, and list them with their hashes."""
    job = _job("prepare_dataset", settings, output)
    if job.keep(output):
        return
    from zerotrain.stages.prepare_dataset import prepare_dataset

    prepare_dataset(job.settings.data, output, job.settings.resolution, job.recipe)


def build_base(
    settings: Settings,
    output: Output,
    dataset: Annotated[
        Path | None,
        folder_option("Dataset folder; presets need it."),
    ] = None,
) -> None:
    """Build the base model, or take it from a folder or hub."""
    job = _job("build_base", settings, output)
    if job.keep(output):
        return
    from zerotrain.stages.build_base import build_base

    build_base(job.settings, dataset, output, job.recipe)


def cache_latents(
    settings: Settings,
    size: Annotated[
        int, typer.Option(help="Side of the square images in pixels, or longest row in tokens.")
    ],
    dataset: Dataset,
    base: Base,
    output: Output,
    shards: Annotated[
        list[Path] | None,
        folder_option("Folder of a range that --shard encoded."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="NUMBER-of-COUNT", help="Encode only this range of the keys."),
    ] = None,
    cache: Annotated[
        Path | None,
        folder_option("With --shard: the cache, whose content is kept."),
    ] = None,
) -> None:
    """Encode images and captions, or text, once; what is encoded already is kept."""
    job = _job("cache_latents", settings, output, dataset=dataset, base=base)
    if job.keep(output):
        return
    from zerotrain.cache.key_ranges import parse_range
    from zerotrain.cache.layout import WHOLE
    from zerotrain.stages.cache_latents import cache_latents

    cache_latents(
        job.settings,
        size,
        dataset,
        base,
        output,
        shards=shards or (),
        only=parse_range(shard) if shard else WHOLE,
        cache=cache,
        recipe=job.recipe,
    )


def render_launch(
    settings: Settings,
    dataset: Dataset,
    preset: Annotated[Path, typer.Option(metavar="FILE", help="The launch preset.")],
    output: Output,
    cache: Annotated[
        Path | None,
        folder_option("Cache; text families need it."),
    ] = None,
    base: Annotated[
        Path | None,
        folder_option("Base model; ZeRO presets need it."),
    ] = None,
    start: Annotated[
        Path | None,
        folder_option("State that the run begins with."),
    ] = None,
) -> None:
    """Write a phase's accelerate.yaml, deepspeed.json and run.yaml."""
    inputs = {"dataset": dataset, "base": base, "cache": cache, "start": start}
    job = _job("render_launch", settings, output, **inputs)
    if job.keep(output):
        return
    from zerotrain.stages.render_launch import render_launch

    render_launch(job.settings, dataset, preset, base, start, output, cache, job.recipe)


def train_phase(
    launch: Launch,
    base: Base,
    cache: Cache,
    progress: Annotated[Path, typer.Option(metavar="FOLDER", help="Rolling checkpoints.")],
    output: Output,
    start: Annotated[
        Path | None,
        folder_option("State of the phase before."),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Says whether a current checkpoint is published again."),
    ] = None,
) -> None:
    """Train a phase, or continue it. Exit code 85: stopped on request, unfinished."""
    from zerotrain.config.stage_settings import read_mark
    from zerotrain.training.checkpointing import published

    rebuild = settings is not None and read_mark(settings) is not None
    if not rebuild and published.is_current(launch, base, cache, start, progress, output):
        published.publish_again(output)
        return
    from zerotrain.stages.train_phase import train_phase

    raise typer.Exit(train_phase(launch, base, cache, start, progress, output))


def export_weights(
    settings: Settings,
    checkpoint: Annotated[Path, folder_option("Checkpoint folder.")],
    base: Base,
    weights: Weights,
    state: State,
) -> None:
    """Turn a phase's checkpoint into weights for use and a state for the next phase."""
    job = _job("export_weights", settings, weights, checkpoint=checkpoint, base=base)
    if job.keep(weights, state):
        return
    from zerotrain.stages.export_weights import export_weights

    export_weights(job.settings, checkpoint, base, weights, state, job.recipe)


def import_checkpoint(
    settings: Settings,
    checkpoint: Annotated[
        Path, typer.Option(metavar="PATH", help="Checkpoint of another program, or a state.")
    ],
    base: Base,
    state: State,
    trust_pickle: Annotated[
        bool, typer.Option(help="Let pickles of the checkpoint run code: only where you trust it.")
    ] = False,
) -> None:
    """Turn another program's checkpoint into the state that a run begins with."""
    job = _job("import_checkpoint", settings, state, base=base)
    if job.keep(state):
        return
    from zerotrain.stages.import_checkpoint import import_checkpoint

    import_checkpoint(
        job.settings, checkpoint, base, state, trust_pickle=trust_pickle, recipe=job.recipe
    )


def evaluate(
    settings: Settings,
    dataset: Dataset,
    cache: Cache,
    weights: Weights,
    state: State,
    output: Output,
    metrics: Annotated[Path, typer.Option(metavar="FILE", help="metrics.json to write.")],
) -> None:
    """Sample a grid, measure held-out loss and accuracy, draw the loss curve."""
    from zerotrain.evaluation.results import METRICS

    inputs = {"dataset": dataset, "cache": cache, "weights": weights, "state": state}
    job = _job("evaluate", settings, output, **inputs)
    if job.keep(output, copies={metrics: output / METRICS}):
        return
    from zerotrain.stages.evaluate import evaluate

    evaluate(job.settings, dataset, cache, weights, state, output, metrics, job.recipe)


def report(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|PHASE_FOLDER...",
            help=f"{RUN_HELP} The rule names the folders of its phases.",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of the rule: the run's config."),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of the rule: the settings of the stage."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            parser=folder_of,
            metavar="PATH",
            help="HTML file to write; default: results/RUN/report.html. Of the rule: a folder.",
        ),
    ] = None,
) -> None:
    """Put images, curves, costs and origin of a run on one page, also while it trains."""
    folders = [Path(place) for place in places]
    if config is not None and output is not None and settings is not None:
        names = ("evaluation", "launch")
        inputs = {f"{place.name}/{name}": place / name for place in folders for name in names}
        job = _job("report", settings, output, **inputs)
        if job.keep(output):
            return
        from zerotrain.stages.report import planned_phases, report

        report(job.settings, folders, output, config, planned_phases(config), job.recipe)
    elif config is None and len(places) == 1:
        from zerotrain.stages.report import report_run

        report_run(places[0], output)
    else:
        raise PipelineError(
            f"report {' '.join(places)}: a page is about one run, named by its name or its file",
            hint="zerotrain report RUN; the rule's form takes --settings, --config, --output and "
            "the folders of all phases of a run",
        )
