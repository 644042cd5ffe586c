"""The command line: one command per stage, the same that the rules call, and those for people.

Imports stand inside the commands: a stage that needs no torch does not wait for it.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.cli import groups, inspection, stages, start
from zerotrain.config.command_options import takes_options
from zerotrain.errors import EXIT_USER_ERROR, PipelineError, device_out_of_memory

HELP = "Reproducible training: datasets, caches, DeepSpeed ZeRO or none, exported weights."
PANELS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Start a run": (
        *(start.new, start.builder, start.check, start.plan, start.sweep, start.fetch),
        *(groups.launch_app, start.data_app),
    ),
    "Look at what was trained": (
        *(inspection.watch, stages.report, inspection.compare, start.sample, start.generate),
    ),
    "Switch, resume and remove": (
        *(start.switch, start.restore, start.remove, groups.progress_app),
    ),
    "Export and publish": (start.export, start.publish),
    "Inspect and verify": (
        *(inspection.why, inspection.doctor, inspection.trace, groups.state_app, groups.verify_app),
        *(inspection.cache_app, inspection.cluster_app, groups.dvc_app),
    ),
    "Called by rules and set-up": (
        *(stages.prepare_dataset, stages.build_base, stages.cache_latents, stages.render_launch),
        *(stages.import_checkpoint, stages.train_phase, stages.export_weights, stages.evaluate),
        inspection.build_ops,
    ),
}
"""The commands by what they are for, in the order of `zerotrain --help`."""
COMMANDS = {
    entry.__name__
    for entries in PANELS.values()
    for entry in entries
    if not isinstance(entry, typer.Typer)
}
"""Names of the commands of one word."""
LESS_MEMORY = {
    "cache_latents": "set cache.batch_size to 1, then cache.dtype to bf16; or end what else is on "
    "the device",
    "evaluate": "lower evaluate.batch_size, then, of images, the resolution; or end what else is "
    "on the device",
    "sample": "lower --resolution, or end what else is on the device",
    "generate": "lower --max-new-tokens or -n, or end what else is on the device",
}
"""What takes less of the device's memory, by command."""


def _print_version(asked: bool) -> None:
    """Print the version and end, where it is asked for; click calls it before any command."""
    if asked:
        from zerotrain.artifact.source_commit import describe_version

        print(describe_version())
        raise typer.Exit


def supervised(
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append a copy of the command's output to this file."),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print version and commit."
        ),
    ] = False,
) -> None:
    from zerotrain.importers import enable_launch_files
    from zerotrain.machine.child_process import end_with_parent, supervise

    end_with_parent()
    enable_launch_files()
    if log is not None:
        command = [sys.executable, "-m", "zerotrain", *_after_log(sys.argv)]
        raise typer.Exit(supervise(command, log=log))


def command_line(words: Collection[str] | None = None) -> typer.Typer:
    """Return the commands; those that `words` does not name have no parameters, if it is given.

    typer resolves the annotations of all commands, though each call runs one.
    """
    made = typer.Typer(
        help=HELP, callback=supervised, no_args_is_help=True, add_completion=False,
        pretty_exceptions_enable=False,
    )  # fmt: skip
    for panel, entries in PANELS.items():
        for entry in entries:
            if isinstance(entry, typer.Typer):
                named = words is None or entry.info.name in words
                listed = typer.Typer(name=entry.info.name, help=entry.info.help)
                made.add_typer(entry if named else listed, rich_help_panel=panel)
            else:
                named = words is None or entry.__name__ in words
                command = _with_options(entry) if named else _without_parameters(entry)
                made.command(entry.__name__, rich_help_panel=panel)(command)
    return made


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    return takes_options(command) if "options" in command.__annotations__ else command


def _without_parameters(command: Callable[..., None]) -> Callable[[], None]:
    def listed() -> None: ...

    listed.__doc__ = command.__doc__
    return listed


def _after_log(words: list[str]) -> list[str]:
    """Return the stage's own command line: what follows --log FILE or --log=FILE."""
    place = next(i for i, word in enumerate(words) if word.partition("=")[0] == "--log")
    return words[place + (1 if "=" in words[place] else 2) :]


def main() -> None:
    """Run the command line; a user's mistake and a disk's error print no traceback."""
    from zerotrain.machine.output import escape_foreign_controls

    # Libraries are millions of objects that live to the end of the process. Looking through them
    # while they are imported and once more at the end takes a third of a short command's time.
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    escape_foreign_controls(sys.stdout, bars=False)
    escape_foreign_controls(sys.stderr, bars=True)
    try:
        try:
            command_line(sys.argv[1:])()
        finally:
            _flush_output()
    except Exception as error:
        if (found := _as_user_error(error)) is None:
            raise
        print(found, file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)


def _flush_output() -> None:
    """Write what was printed, so that a full disk behind standard output is noticed.

    What cannot be written is given up: Python would try once more at its end, and fail again.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def _as_user_error(error: Exception) -> PipelineError | None:
    """Return the sentence for an error that the user can fix; None for a fault of the program."""
    if isinstance(error, PipelineError):
        return error
    # torch's class by its name: most commands do not import torch.
    if type(error).__name__ == "OutOfMemoryError":
        name = next((word for word in sys.argv[1:] if word in COMMANDS), "zerotrain")
        return device_out_of_memory(name, error, hint=LESS_MEMORY.get(name, "take a larger device"))
    from zerotrain.machine.disk_errors import explain
    from zerotrain.machine.memory_errors import find_out_of_memory

    if found := explain(error):
        return found
    if (message := find_out_of_memory(error)) is None:
        return None
    return PipelineError(
        f"memory is used up, or limited: {message}",
        hint="see `ulimit -v` and what else runs here, or take a machine or a job with more "
        "memory; then run the same command again",
    )
