"""Commands of one word for people: from a new run to the use of its weights; and those of data."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.config import MAIN_CONFIG
from zerotrain.config.command_options import RUN_HELP, AnyRunFile, RunFile, config_of
from zerotrain.export.options import (
    ExportOptions,
    GenerateOptions,
    PublishOptions,
    SampleOptions,
)
from zerotrain.graph.options import NewOptions, SwitchOptions
from zerotrain.launch.planner.options import PlanOptions

data_app = typer.Typer(
    name="data",
    help="Datasets: look at one (show), take over another program's (import).",
    no_args_is_help=True,
)


def new(options: NewOptions) -> None:
    """Write a commented configuration for your own images or text."""
    from zerotrain.graph.new_run import new

    path = new(options)
    print(f"wrote {path}; look at it, then: make train CONFIG={path}")


def check(config: RunFile) -> None:
    """Check a configuration and the data that it names; print what was checked."""
    from zerotrain.graph.checks import read_checked_runs
    from zerotrain.graph.checks.base import describe_dependency
    from zerotrain.graph.checks.data import describe_data

    runs = [*read_checked_runs(config, captions=True).values()]
    lines = [*describe_data(runs), *map(describe_dependency, runs)]
    for line in dict.fromkeys(filter(None, lines)):
        print(line)
    checked = f"run {runs[0].run} is" if len(runs) == 1 else f"{len(runs)} runs are"
    print(
        f"{config}: {checked} valid: keys and values, and the base, the data and the launches "
        "that they name"
    )


def plan(options: PlanOptions) -> None:
    """Predict memory, traffic and time of every preset, without a GPU or weights; say what fits."""
    from zerotrain.launch.planner.report import plan_report

    gc.disable()  # traces make millions of objects that live to the end
    lines = plan_report(options, width=shutil.get_terminal_size((100, 40)).columns)
    print("\n".join(lines))


def builder(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Listen there; by default for this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = 8417,
) -> None:
    """Open a local page that plans a launch, shows what it takes and writes it."""
    from zerotrain.builder.app import serve

    serve(host, port)


def sweep(
    config: RunFile,
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE,VALUE", help="Values of a key; repeatable."),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For a file each run, and FOLDER.yaml for all.")
    ],
) -> None:
    """Write a configuration for each point of a grid, and one that plans them all."""
    from zerotrain.graph.sweep import sweep

    together, *files = sweep(config, settings, output)
    print(f"wrote {len(files)} runs to {output}; all of them:")
    print(f"  snakemake --cores all train --configfile {together}")


def fetch(
    configs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", parser=config_of, help=RUN_HELP)
    ],
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="A folder that every node sees.")
    ] = Path("fetched"),
    wheels: Annotated[
        bool, typer.Option("--wheels", help="The pinned packages, too: 0.5 GB, with CUDA several.")
    ] = False,
) -> None:
    """Put what jobs would take from the internet into a shared folder: models, datasets, ops."""
    from zerotrain.graph.fetch import fetch, variables

    os.environ.update(variables(to))  # before the hub's library is imported, which reads it once
    for line in fetch(configs, to, wheels=wheels):
        print(line, flush=True)


@data_app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="kohya's .toml, or SimpleTuner's multidatabackend."),
    ],
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Import without this key. May be repeated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: standard output.")
    ] = None,
) -> None:
    """Write another program's datasets as the section `data`, and report what became of them."""
    from zerotrain.importers.imported_config import config_text, report, write_new
    from zerotrain.importers.reading import ImportOptions, import_file

    imported = import_file(file, ImportOptions(skip=frozenset(skip or ())))
    print(report(imported.notes), file=sys.stderr)
    write_new(config_text(imported), output)


@data_app.command()
def show(
    config: AnyRunFile = MAIN_CONFIG,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="For the contact sheet; default: results/data/NAME/show."
        ),
    ] = None,
) -> None:
    """Show sizes, crops, captions, duplicates and problems. Exit code 1: it would be refused."""
    from zerotrain.config.read import read_config
    from zerotrain.run.show_data import show_data
    from zerotrain.stages.prepare_dataset import checked_images

    raise typer.Exit(show_data(read_config(config), checked_images, output))


def export(options: ExportOptions) -> None:
    """Export a checkpoint or exported weights in any form, after checking it; or a state."""
    from zerotrain.export.command import export_command
    from zerotrain.run.runs import exportable

    checkpoint, config = exportable(options.checkpoint, options.config)
    export_command(replace(options, checkpoint=checkpoint, config=config))


def sample(options: SampleOptions) -> None:
    """Make images by exported weights of any format, or by those of a run."""
    from zerotrain.export.sample import sample
    from zerotrain.run.runs import usable_weights

    with usable_weights(options.weights) as found:
        for file in sample(replace(options, weights=found)):
            print(f"wrote {file}")


def generate(options: GenerateOptions) -> None:
    """Answer a prompt by exported weights of a language model, or by those of a run."""
    from zerotrain.export.generate import generate
    from zerotrain.run.runs import usable_weights

    with usable_weights(options.weights) as found:
        answers = generate(replace(options, weights=found))
    print("\n---\n".join(answers))


def publish(options: PublishOptions) -> None:
    """Write a model card and upload weights and card to the hub."""
    from zerotrain.export.publish import publish

    publish(options)


def switch(options: SwitchOptions) -> None:
    """End the phase that trains now, export it, and continue under another launch."""
    from zerotrain.graph.switch.command import switch

    print(switch(options))


def restore(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WEIGHTS|REV]",
            help="A weights file or folder from anywhere, or a branch, tag or commit; default: "
            "the commit that lies here.",
        ),
    ] = None,
    find_only: Annotated[
        bool, typer.Option("--find-only", help="Tell where WEIGHTS came from; change nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace results that DVC has not stored.")
    ] = False,
) -> None:
    """Bring back the results of this commit, of REV, or of the commit that made WEIGHTS.

    Data, caches, checkpoints and weights, as `dvc pull` does.
    """
    from zerotrain.graph.dvc.restore import restore

    restore(what, find_only=find_only, force=force)


def remove(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Name of the run, its config, or results/RUN."),
    ],
    data: Annotated[
        bool,
        typer.Option("--data", help="Also its dataset and caches, unless another run uses them."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it without a question.")] = False,
) -> None:
    """Remove the results of a run, and say what others use or DVC still holds."""
    from zerotrain.graph.remove import remove

    print("\n".join(remove(run, data=data, yes=yes)))
