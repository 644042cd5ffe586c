"""The command line: one command per stage, the same that the rules call.

Imports stand inside the commands: a stage that needs no torch does not wait for it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.errors import EXIT_USER_ERROR, PipelineError

HELP = "Reproducible training: datasets, caches, DeepSpeed ZeRO or none, exported weights."

app = typer.Typer(
    help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
progress_app = typer.Typer(help="The rolling checkpoints of a phase.", no_args_is_help=True)
state_app = typer.Typer(help="Training states: look at one, compare two.", no_args_is_help=True)
dvc_app = typer.Typer(help="The DVC side of the graph.")
app.add_typer(progress_app, name="progress")
app.add_typer(state_app, name="state")
app.add_typer(dvc_app, name="dvc")


def _path(text: str) -> Path:
    """A folder, also where its manifest.json is named, as the rules do."""
    path = Path(text)
    return path.parent if path.name == "manifest.json" else path


def _argument(help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(parser=_path, metavar="FOLDER", help=help)
    return option


ConfigFile = Annotated[Path, typer.Option("--config", metavar="FILE", help="The run's config.")]
PhaseName = Annotated[str, typer.Option("--phase", help="Name of the phase.")]
Dataset = Annotated[Path, _argument("Dataset folder.")]
Base = Annotated[Path, _argument("Base model folder.")]
Cache = Annotated[Path, _argument("Cache folder.")]
Launch = Annotated[Path, _argument("Launch folder.")]
Weights = Annotated[Path, _argument("Weights folder.")]
State = Annotated[Path, _argument("State folder.")]
Output = Annotated[Path, _argument("Folder to publish.")]


@app.callback()
def supervised(
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append a copy of the command's output to this file."),
    ] = None,
) -> None:
    from zerotrain.supervise import end_with_parent, supervise

    end_with_parent()
    if log is not None:
        command = [sys.executable, "-m", "zerotrain", *_after_log(sys.argv)]
        raise typer.Exit(supervise(command, log=log))


def _after_log(words: list[str]) -> list[str]:
    """The stage's own command line: what follows --log FILE or --log=FILE, which precede it."""
    place = next(i for i, word in enumerate(words) if word.partition("=")[0] == "--log")
    return words[place + (1 if "=" in words[place] else 2) :]


@app.command("prepare_dataset")
def prepare_dataset(config: ConfigFile, output: Output) -> None:
    """Check images and captions, and list them with their hashes."""
    from zerotrain.config import read_config
    from zerotrain.stages.prepare_dataset import prepare_dataset

    prepare_dataset(read_config(config).data, output)


@app.command("build_base")
def build_base(
    config: ConfigFile,
    output: Output,
    dataset: Annotated[
        Path | None,
        typer.Option(parser=_path, metavar="FOLDER", help="Dataset folder; presets need it."),
    ] = None,
) -> None:
    """Build the base model, or take it from a folder or hub."""
    from zerotrain.config import read_config
    from zerotrain.stages.build_base import build_base

    build_base(read_config(config), dataset, output)


@app.command("cache_latents")
def cache_latents(
    config: ConfigFile,
    pixels: Annotated[int, typer.Option(help="Side of the square images, in pixels.")],
    dataset: Dataset,
    base: Base,
    output: Output,
) -> None:
    """Encode images and captions once; what is encoded already is kept."""
    from zerotrain.config import read_config
    from zerotrain.stages.cache_latents import cache_latents

    cache_latents(read_config(config), pixels, dataset, base, output)


@app.command("render_launch")
def render_launch(
    config: ConfigFile,
    phase: PhaseName,
    dataset: Dataset,
    preset: Annotated[Path, typer.Option(metavar="FILE", help="The launch preset.")],
    output: Output,
    start: Annotated[
        Path | None,
        typer.Option(parser=_path, metavar="FOLDER", help="State that the run begins with."),
    ] = None,
) -> None:
    """Write a phase's accelerate.yaml, deepspeed.json and run.yaml."""
    from zerotrain.config import read_config
    from zerotrain.stages.render_launch import render_launch

    render_launch(read_config(config), phase, dataset, preset, start, output)


@app.command("train_phase")
def train_phase(
    launch: Launch,
    base: Base,
    cache: Cache,
    progress: Annotated[Path, typer.Option(metavar="FOLDER", help="Rolling checkpoints.")],
    output: Output,
    start: Annotated[
        Path | None,
        typer.Option(parser=_path, metavar="FOLDER", help="State of the phase before."),
    ] = None,
) -> None:
    """Train a phase, or go on with it. Exit code 85: stopped on request, unfinished."""
    from zerotrain.stages.train_phase import train_phase

    raise typer.Exit(train_phase(launch, base, cache, start, progress, output))


@app.command("export_weights")
def export_weights(
    config: ConfigFile,
    checkpoint: Annotated[Path, _argument("Checkpoint folder.")],
    base: Base,
    weights: Weights,
    state: State,
) -> None:
    """Turn a phase's checkpoint into weights for use and a state for the next phase."""
    from zerotrain.config import read_config
    from zerotrain.stages.export_weights import export_weights

    export_weights(read_config(config), checkpoint, base, weights, state)


@app.command("import_checkpoint")
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
    from zerotrain.config import read_config
    from zerotrain.stages.import_checkpoint import import_checkpoint

    import_checkpoint(read_config(config), checkpoint, base, state, trust_pickle=trust_pickle)


@app.command("export")
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            parser=_path,
            help="A checkpoint, rolling or published, a state, or a folder of DeepSpeed or "
            "accelerate.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(parser=_path, metavar="FOLDER", help="Folder to publish the model at."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(parser=_path, metavar="FOLDER", help="Folder to publish a state at."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's config: family, base and dtype.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="Family of the base, where there is no config.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            parser=_path, metavar="FOLDER", help="Base model folder; with a config, the run's own."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; default: the config's, else fp32.")
    ] = None,
    to: Annotated[
        str, typer.Option(help="diffusers, or universal: what DeepSpeed loads under another stage.")
    ] = "diffusers",
    trust_pickle: Annotated[
        bool, typer.Option(help="Let pickles of the checkpoint run code: only where you trust it.")
    ] = False,
) -> None:
    """Export any complete checkpoint by hand, after checking it: weights, a state, or both."""
    from zerotrain.export_by_hand import export_by_hand

    export_by_hand(
        checkpoint, output, state, config=config, family=family, base=base, dtype=dtype, to=to,
        trust_pickle=trust_pickle,
    )  # fmt: skip


@app.command("evaluate")
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
    from zerotrain.config import read_config
    from zerotrain.stages.evaluate import evaluate

    evaluate(read_config(config), phase, dataset, cache, weights, state, output, metrics)


@app.command("report")
def report(
    config: ConfigFile,
    output: Output,
    phases: Annotated[
        list[Path], typer.Argument(metavar="PHASE_FOLDER...", help="As results/RUN/PHASE.")
    ],
) -> None:
    """Put grids, curves and metrics of the phases on one page."""
    from zerotrain.config import read_config
    from zerotrain.stages.report import report

    report(read_config(config), phases, output)


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Name of the run: config/NAME.yaml.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of your images.")],
    base: Annotated[str, typer.Option(metavar="MODEL", help="Folder or hub id of the model.")],
) -> None:
    """Write a commented configuration for a folder of your own images."""
    from zerotrain.new import new

    path = new(name, images, base)
    print(f"wrote {path}; look at it, then: make train CONFIG={path}")


@app.command("check")
def check(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="The run's config.")],
) -> None:
    """Check a configuration file, and say nothing where it is right."""
    from zerotrain.config import read_config

    read_config(config)


@app.command("switch")
def switch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its config.")],
    to: Annotated[
        str, typer.Option("--to", metavar="PRESET", help="Launch preset to go on under.")
    ],
    at: Annotated[
        str, typer.Option(metavar="STEP", help="Saved step to end the phase at, or `last`.")
    ] = "last",
    name: Annotated[
        str | None, typer.Option(help="Name of the new phase; default: PHASE-PRESET.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's config, where several fit.")
    ] = None,
    offload_path: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder on a fast disk, for presets that use one."),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a running training may take to stop.")
    ] = 600.0,
    accept: Annotated[
        bool, typer.Option("--accept", help="Go on though code, data or values have changed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")
    ] = False,
) -> None:
    """End the phase that trains where it stands, export it, and go on under another launch."""
    from zerotrain.switch import switch

    said = switch(
        run,
        to,
        at=at,
        name=name,
        config=config,
        offload_path=offload_path,
        wait=wait,
        accept=accept,
        dry_run=dry_run,
    )
    print(said)


@app.command("build_ops")
def build_ops() -> None:
    """Build DeepSpeed's compiled ops into the environment (set-up does it)."""
    from zerotrain.compiled_ops import build_ops

    build_ops()


@progress_app.command()
def accept(
    phase: Annotated[str, typer.Argument(metavar="RUN/PHASE", help="As in results/RUN/PHASE.")],
) -> None:
    """Take back progress that was set aside, as if its fingerprint were the present one."""
    from zerotrain.training.progress_folder import accept

    folder = Path(phase)
    if len(folder.parts) < 2:
        raise PipelineError(
            f"{phase!r} names no phase", hint="name it as RUN/PHASE, as in results/RUN/PHASE"
        )
    print(accept(folder if folder.parts[0] == "results" else Path("results") / folder))


StateFolder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        parser=_path,
        help="A state, checkpoint or weights folder, or a checkpoint of DeepSpeed or accelerate.",
    ),
]
TrustPickle = Annotated[
    bool, typer.Option(help="Let pickles of the folder run code: only where you trust it.")
]


@state_app.command()
def show(
    folder: StateFolder,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Say where a training stands, what made it, and what its tensors amount to."""
    from zerotrain.state_source import open_view
    from zerotrain.state_view import show

    for line in show(open_view(folder, trust_pickle=trust_pickle), tensors=tensors):
        print(line)


@state_app.command()
def diff(
    a: StateFolder,
    b: StateFolder,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest absolute difference that counts as equal.")
    ] = 0.0,
    trust_pickle: TrustPickle = False,
) -> None:
    """Compare two states tensor by tensor. Exit code 1: they differ."""
    from zerotrain.state_diff import diff
    from zerotrain.state_source import open_view

    first, second = (open_view(folder, trust_pickle=trust_pickle) for folder in (a, b))
    found = diff(first, second, tolerance=tolerance)
    print("\n".join(found.lines))
    raise typer.Exit(0 if found.equal else 1)


@dvc_app.command()
def generate(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The run's config.")] = Path(
        "config/config.yaml"
    ),
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("dvc.yaml"),
) -> None:
    """Write dvc.yaml from the Snakemake graph."""
    from zerotrain.dvc import generate

    generate(config, output)


def main() -> None:
    """Run the command line; a user's mistake is printed without a traceback."""
    try:
        app()
    except PipelineError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
