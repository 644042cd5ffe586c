"""Commands of two words: those of launch, progress, state, verify and dvc."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.config import MAIN_CONFIG
from zerotrain.config.command_options import AnyRunFile, RunFile, folder_of
from zerotrain.errors import PipelineError

progress_app = typer.Typer(
    name="progress", help="The rolling checkpoints of a phase.", no_args_is_help=True
)
state_app = typer.Typer(
    name="state", help="Training states: look at one, compare two.", no_args_is_help=True
)
verify_app = typer.Typer(
    name="verify", help="Prove on a run of yours what is promised.", no_args_is_help=True
)
dvc_app = typer.Typer(name="dvc", help="Stages of DVC for a run.")


PhaseName = Annotated[str, typer.Argument(metavar="RUN/PHASE", help="As in results/RUN/PHASE.")]


@progress_app.command()
def unlock(
    phase: PhaseName,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it without a question.")] = False,
) -> None:
    """Remove the lock of a training that is gone, and ran where it cannot be seen from here."""
    from zerotrain.training.process.progress_commands import unlock

    folder = _phase_folder(phase)
    print(unlock(folder / "progress" if (folder / "progress").is_dir() else folder, yes=yes))


@progress_app.command()
def accept(phase: PhaseName) -> None:
    """Take back the progress that was set aside last, and continue it with the new values."""
    from zerotrain.training.process.progress_commands import accept

    print(accept(_phase_folder(phase)))


def _phase_folder(phase: str) -> Path:
    """Return the folder that RUN/PHASE or a path of it names."""
    from zerotrain.artifact.layout import RESULTS

    folder = Path(phase)
    if len(folder.parts) < 2:
        raise PipelineError(
            f"{phase!r} names no phase", hint="name it as RUN/PHASE, as in results/RUN/PHASE"
        )
    return folder if folder.parts[:1] == RESULTS.parts else RESULTS / folder


StateFolder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        parser=folder_of,
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
    """Show the position of a training, what made it, and a summary of its tensors."""
    from zerotrain.state.open import open_view
    from zerotrain.state.show import show

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
    from zerotrain.state.open import open_view
    from zerotrain.state.show import diff

    first, second = (open_view(folder, trust_pickle=trust_pickle) for folder in (a, b))
    found = diff(first, second, tolerance=tolerance)
    print("\n".join(found.lines))
    raise typer.Exit(0 if found.equal else 1)


@verify_app.command()
def resume(
    config: RunFile,
    phase: Annotated[
        str | None, typer.Option(metavar="PHASE", help="Name of the phase; default: the first.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=2, metavar="N", help="Steps before the checkpoint, and after it.")
    ] = 10,
) -> None:
    """Train 2N steps, and N + kill -9 + N: are all bits equal? Exit code 1: they are not."""
    from zerotrain.graph.verify_resume import verify_resume

    verdict = verify_resume(config, phase, steps)
    print("\n".join(verdict.lines))
    raise typer.Exit(0 if verdict.equal else 1)


@dvc_app.callback()
def _group() -> None:
    """Stages of DVC for a run."""


@dvc_app.command()
def generate(
    config: AnyRunFile = MAIN_CONFIG,
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("dvc.yaml"),
) -> None:
    """Write the stages of a run into dvc.yaml; those of other runs and of yours stay."""
    from zerotrain.graph.dvc.pipeline import generate

    generate(config, output)


launch_app = typer.Typer(
    name="launch",
    help="Launch configurations: import one of another program, explain one.",
    no_args_is_help=True,
)


@launch_app.command("import")
def import_(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="accelerate's YAML, a DeepSpeed JSON or SimpleTuner's config.json.",
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="A pasted 'accelerate launch ...' or 'torchrun ...'."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="bf16, fp16 or no, where the source leaves it open."),
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="GPUs, where the source does not say how many.")
    ] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples a GPU and pass, where only a script knows.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Import without this key, on your own responsibility. May be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: standard output.")
    ] = None,
) -> None:
    """Write another program's launch configuration in our form, and report what became of it."""
    from zerotrain.errors import PipelineError
    from zerotrain.importers.command_line import import_command
    from zerotrain.importers.imported_config import config_text, report, write_new
    from zerotrain.importers.reading import ImportOptions, import_file
    from zerotrain.machine.detect import choose_precision

    options = ImportOptions(
        precision=precision,
        num_processes=num_processes,
        micro_batch_size=micro_batch_size,
        choose=choose_precision,
        skip=frozenset(key.lstrip("-") for key in skip or ()),
    )
    if (file is None) == (command is None):
        raise PipelineError(
            "launch import: give a FILE, or --command", hint="zerotrain launch import --help"
        )
    if command is not None:
        imported = import_command(command, options)
    else:
        imported = import_file(Path(file or ""), options)
    if imported.before is not None:
        if output is None:
            raise PipelineError(
                "--command: two trainings are two configurations, and the second begins with the "
                "weights of the first",
                hint="give --output config/NAME.yaml; the second is written to config/NAME-2.yaml",
            )
        print(report(imported.before.notes), file=sys.stderr)
        write_new(config_text(imported.before), output)
        output = output.with_stem(f"{output.stem}-2")
    print(report(imported.notes), file=sys.stderr)
    write_new(config_text(imported), output)


@launch_app.command()
def explain(
    place: Annotated[
        str, typer.Argument(metavar="RUN/PHASE", help="A phase, its launch folder or run.yaml.")
    ],
    source: Annotated[
        list[str] | None,
        typer.Option(help="Only values of this source: user, derived or default."),
    ] = None,
) -> None:
    """Show every value of a phase's launch files, where it comes from and why."""
    import shutil

    from zerotrain.launch.files import explain

    columns = shutil.get_terminal_size((100, 40)).columns
    print("\n".join(explain(place, tuple(source or ()), columns)))
