"""The command line: one command per stage, the same that the rules call, and those for people.

Imports stand inside the commands: a stage that needs no torch does not wait for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.cli import (
    by_hand,
    cluster,
    data,
    fetch,
    groups,
    launch,
    plan,
    restore,
    stages,
    sweep,
    trace,
)
from zerotrain.errors import EXIT_USER_ERROR, PipelineError, device_out_of_memory

HELP = "Reproducible training: datasets, caches, DeepSpeed ZeRO or none, exported weights."
COMMANDS: tuple[Callable[..., None], ...] = (
    stages.prepare_dataset,
    stages.build_base,
    stages.cache_latents,
    stages.render_launch,
    stages.train_phase,
    stages.export_weights,
    stages.import_checkpoint,
    by_hand.export,
    by_hand.sample,
    by_hand.generate,
    by_hand.publish,
    stages.evaluate,
    stages.report,
    by_hand.new,
    by_hand.check,
    sweep.sweep,
    plan.plan,
    fetch.fetch,
    trace.trace,
    by_hand.switch,
    restore.restore,
    by_hand.build_ops,
    by_hand.doctor,
)
"""In the order of `zerotrain --help`."""
LESS_MEMORY = {
    "cache_latents": "set cache.batch_size to 1, then cache.dtype to bf16; or end what else is on "
    "the device",
    "evaluate": "lower evaluate.batch_size, then, of images, the resolution; or end what else is "
    "on the device",
    "sample": "lower --resolution, or end what else is on the device",
    "generate": "lower --max-new-tokens or -n, or end what else is on the device",
}
"""What takes less of the device's memory, by command."""

app = typer.Typer(
    help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
for command in COMMANDS:
    app.command(command.__name__)(command)
app.add_typer(groups.progress_app, name="progress")
app.add_typer(groups.state_app, name="state")
app.add_typer(groups.verify_app, name="verify")
app.add_typer(launch.launch_app, name="launch")
app.add_typer(groups.dvc_app, name="dvc")
app.add_typer(data.data_app, name="data")
app.add_typer(cluster.cluster_app, name="cluster")


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


def main() -> None:
    """Run the command line; a user's mistake and a disk's error print no traceback."""
    try:
        try:
            app()
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
        known = {command.__name__ for command in COMMANDS}
        name = next((word for word in sys.argv[1:] if word in known), "zerotrain")
        return device_out_of_memory(name, error, hint=LESS_MEMORY.get(name, "take a larger device"))
    from zerotrain.disk_errors import explain

    return explain(error)
