"""The commands that the rules call, one per stage, of its name; `report` is for people, too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zerotrain.config.command_options import RUN_HELP, ConfigFile, folder_of, folder_option
from zerotrain.errors import PipelineError

PhaseName = Annotated[str, typer.Option("--phase", help="Name of the phase.")]
Dataset = Annotated[Path, folder_option("Dataset folder.")]
Base = Annotated[Path, folder_option("Base model folder.")]
Cache = Annotated[Path, folder_option("Cache folder.")]
Launch = Annotated[Path, folder_option("Launch folder.")]
Weights = Annotated[Path, folder_option("Weights folder.")]
State = Annotated[Path, folder_option("State folder.")]
Output = Annotated[Path, folder_option("Folder to publish.")]


def _settings(stage: str, config: Path, phase: str = "") -> Any:
    from zerotrain.config.read import read_config
    from zerotrain.config.stage_settings import SETTINGS

    return SETTINGS[stage].of(read_config(config), phase)


def prepare_dataset(config: ConfigFile, output: Output) -> None:
    """Check images and captions, or text, and list them with their hashes."""
    from zerotrain.config.read import read_config
    from zerotrain.stages.prepare_dataset import prepare_dataset

    run = read_config(config)
    prepare_dataset(run.data, output, max(phase.train.resolution for phase in run.phases))


def build_base(
    config: ConfigFile,
    output: Output,
    dataset: Annotated[
        Path | None,
        folder_option("Dataset folder; presets need it."),
    ] = None,
) -> None:
    """Build the base model, or take it from a folder or hub."""
    from zerotrain.stages.build_base import build_base

    build_base(_settings("build_base", config), dataset, output)


def cache_latents(
    config: ConfigFile,
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
    from zerotrain.cache.key_ranges import parse_range
    from zerotrain.cache.layout import WHOLE
    from zerotrain.stages.cache_latents import cache_latents

    cache_latents(
        _settings("cache_latents", config),
        size,
        dataset,
        base,
        output,
        shards=shards or (),
        only=parse_range(shard) if shard else WHOLE,
        cache=cache,
    )


def render_launch(
    config: ConfigFile,
    phase: PhaseName,
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
    from zerotrain.stages.render_launch import render_launch

    settings = _settings("render_launch", config, phase)
    render_launch(settings, dataset, preset, base, start, output, cache)


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
) -> None:
    """Train a phase, or continue it. Exit code 85: stopped on request, unfinished."""
    from zerotrain.stages.train_phase import train_phase

    raise typer.Exit(train_phase(launch, base, cache, start, progress, output))


def export_weights(
    config: ConfigFile,
    checkpoint: Annotated[Path, folder_option("Checkpoint folder.")],
    base: Base,
    weights: Weights,
    state: State,
) -> None:
    """Turn a phase's checkpoint into weights for use and a state for the next phase."""
    from zerotrain.stages.export_weights import export_weights

    export_weights(_settings("export_weights", config), checkpoint, base, weights, state)


def import_checkpoint(
    config: ConfigFile,
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
    from zerotrain.stages.import_checkpoint import import_checkpoint

    settings = _settings("import_checkpoint", config)
    import_checkpoint(settings, checkpoint, base, state, trust_pickle=trust_pickle)


def evaluate(
    config: ConfigFile,
    phase: PhaseName,
    dataset: Dataset,
    cache: Cache,
    weights: Weights,
    state: State,
    output: Output,
    metrics: Annotated[Path, typer.Option(metavar="FILE", help="metrics.json to write.")],
) -> None:
    """Sample a grid, measure held-out loss and accuracy, draw the loss curve."""
    from zerotrain.stages.evaluate import evaluate

    settings = _settings("evaluate", config, phase)
    evaluate(settings, dataset, cache, weights, state, output, metrics)


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
    from zerotrain.stages.report import planned_phases, report, report_run

    folders = [Path(place) for place in places]
    if config is not None and output is not None and all(folder.is_dir() for folder in folders):
        report(_settings("report", config), folders, output, config, planned_phases(config))
    elif config is None and len(places) == 1:
        report_run(places[0], output)
    else:
        raise PipelineError(
            f"report {' '.join(places)}: a page is about one run, named by its name or its file",
            hint="zerotrain report RUN; the rule's form takes --config, --output and the folders "
            "of all phases of a run",
        )
