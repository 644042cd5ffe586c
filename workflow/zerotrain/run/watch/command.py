"""`zerotrain watch`: draws a run's state until the run is over, or prints it in a pipe."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from rich.console import Console
from rich.live import Live

from zerotrain.config.runs import find_config
from zerotrain.machine.output import print_message
from zerotrain.run.phase import TRAINED
from zerotrain.run.runs import choose_runs, run_named, runs_here
from zerotrain.run.stages import FINISHED
from zerotrain.run.view import RunView
from zerotrain.run.watch.screen import Canvas, describe, describe_changes, draw
from zerotrain.run.watch.state import RunState, read_run_state, read_state

TERMINAL_SECONDS, PIPE_SECONDS = 2.0, 10.0
"""Default intervals between two looks."""
SETTLE_SECONDS = 10.0
"""Time for which a run must stay stopped or failed: between two stages nothing may run, and one
that has just been started is checked before Snakemake starts."""
PIPE_WIDTH = 80
INTERRUPTED = 128 + signal.SIGINT


def watch(name: str | None, interval: float | None, *, once: bool, as_json: bool) -> int:
    """Show a run until it is over.

    Args:
        name: A run or its configuration file; None: the one at work, or the newest. Of several at
            work a list is printed.
        interval: Seconds between two looks; None: the default.
        once: Whether to show the present state alone.
        as_json: Whether to print the present state as JSON.

    Returns:
        The exit code: 0 if the run is finished or trained, and after one look; 1 if it was stopped
        or has failed; 130 after Ctrl-C.

    Raises:
        PipelineError: there is no such run.
    """
    if name is None:
        runs = choose_runs()
        if len(runs) > 1:
            return _list(runs, as_json=as_json)
        name = runs[0]
    found = run_named(name)
    run, file = found.run, found.file
    if file is None and run not in runs_here():
        file = find_config(run)
    view = RunView(run, file)
    if as_json:
        print(json.dumps(read_state(view).as_json(), indent=2))
        return 0
    if once:
        _print(read_state(view))
        return 0
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    follow = _draw_until_over if sys.stdout.isatty() else _print_until_over
    try:
        return follow(view, interval)
    except KeyboardInterrupt:
        print_message(f"{run}: no longer watched; the run itself is as it was")
        return INTERRUPTED


def _list(runs: list[str], *, as_json: bool) -> int:
    states = [read_run_state(run) for run in runs]
    if as_json:
        print(json.dumps([state.as_json() for state in states], indent=2))
        return 0
    for state in states:
        print(describe(state))
    print(f"one of them: zerotrain watch {runs[0]}")
    return 0


def _print(state: RunState) -> None:
    """Print the drawing of a state once; in a pipe without colours."""
    with _own_stream() as stream:
        console = _console(stream)
        console.print(draw(state, Canvas(console.width, unicode=_is_unicode(stream))))


def _draw_until_over(view: RunView, interval: float | None) -> int:
    """Draw on the terminal's other screen, and leave the last state on its own."""
    with _own_stream() as stream:
        console = _console(stream)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for state in _states(view, interval or TERMINAL_SECONDS):
                canvas = Canvas(console.width, console.height, _is_unicode(stream))
                live.update(draw(state, canvas), refresh=True)
    _print(state)
    return 0 if state.state in (FINISHED, TRAINED) else 1


def _print_until_over(view: RunView, interval: float | None) -> int:
    before: RunState | None = None
    for state in _states(view, interval or PIPE_SECONDS):
        for line in describe_changes(before, state):
            print(line)
        if before is None or describe(before) != describe(state):
            print(describe(state), flush=True)
        before = state
    return 0 if state.state in (FINISHED, TRAINED) else 1


def _states(view: RunView, interval: float) -> Iterator[RunState]:
    """Yield the states of a run until it is over."""
    state = read_state(view)
    yield state
    over_since = time.monotonic()
    while state.state != FINISHED and not (
        state.is_over and time.monotonic() - over_since >= SETTLE_SECONDS
    ):
        time.sleep(interval)
        state = read_state(view)
        if not state.is_over:
            over_since = time.monotonic()
        yield state


@contextmanager
def _own_stream() -> Iterator[TextIO]:
    """Open standard output a second time: sys.stdout escapes what moves a cursor.

    Every foreign text of a drawing is escaped before it is drawn (screen.escape).
    """
    sys.stdout.flush()
    descriptor = os.dup(sys.stdout.fileno())
    with open(descriptor, "w", encoding=sys.stdout.encoding, errors="replace") as stream:
        yield stream


def _console(stream: TextIO) -> Console:
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def _is_unicode(stream: TextIO) -> bool:
    return stream.encoding.lower().replace("-", "").startswith("utf")


def _end(number: int, frame: FrameType | None) -> None:
    """End by an exception, so that the terminal gets its own screen back."""
    sys.exit(128 + number)
