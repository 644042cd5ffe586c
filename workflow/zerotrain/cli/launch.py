"""Commands of two words: those of launch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

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
    from zerotrain.importers.reading import ImportOptions, import_file
    from zerotrain.importers.write import config_text, report, write_new
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

    from zerotrain.launch.explain import explain

    columns = shutil.get_terminal_size((100, 40)).columns
    print("\n".join(explain(place, tuple(source or ()), columns)))
