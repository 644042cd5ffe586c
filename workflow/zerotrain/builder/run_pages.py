"""The start page, and the pages of runs: all, and one shown live, started, stopped and switched."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from zerotrain.artifact.documents import read_bytes, read_text
from zerotrain.artifact.layout import CONFIGS, RESULTS, RunFolder
from zerotrain.builder.live import (
    EDGES,
    HEIGHT,
    MOST_SHOWN,
    WIDTH,
    RunReaders,
    check_run,
    draw_loss,
    find_pictures,
    known_runs,
)
from zerotrain.builder.pages import page
from zerotrain.builder.processes import (
    PRECISIONS,
    SwitchChoice,
    What,
    is_asked_to_stop,
    is_at_work,
    plan_switch,
    read_output,
    read_started,
    start,
    stop,
    switch,
)
from zerotrain.builder.writing import MOST_BYTES, comment_at_top
from zerotrain.config.runs import find_config
from zerotrain.errors import PipelineError
from zerotrain.importers.program import PRESETS
from zerotrain.machine.output import format_figure
from zerotrain.run.stages import TRAIN
from zerotrain.run.watch.state import RunState, describe_fault
from zerotrain.training.reporting.display import format_duration, format_rate


@dataclass(frozen=True)
class Source:
    """A configuration to start from.

    Attributes:
        path: Its file, relative to the project.
        about: The comment at its top.
        trained: Whether results of its run are here.
    """

    path: str
    about: str
    trained: bool


def find_sources() -> list[Source]:
    """List the configurations of the project, by their names."""
    found = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        try:
            found.append(_describe(path))
        except Exception as error:  # one entry never keeps the others from being shown
            found.append(Source(path.as_posix(), describe_fault(error), False))
    return found


def _describe(path: Path) -> Source:
    """Describe a configuration by its text: an invalid one is offered, too, to be corrected."""
    text = read_text(path, most=MOST_BYTES, follow_links=True, errors="replace")
    named = (line for line in text.splitlines() if line.startswith("run:"))
    run = next(named, "").partition(":")[2].split("#")[0].strip()
    trained = bool(run) and "/" not in run and (RESULTS / run).is_dir()
    return Source(path.as_posix(), comment_at_top(text), trained)


def show_start(_: Request) -> Response:
    """Answer with the page on which a user chooses a start: a recipe, a run, or nothing."""
    sources = find_sources()
    groups = [
        ("Your runs", [one for one in sources if one.trained]),
        ("Recipes and configurations", [one for one in sources if not one.trained]),
    ]
    return page("start", {"groups": groups}, here="/")


OUTPUT_LINES = 15
MARKS = {
    "done": "✓", "finished": "✓", "running": "▶", "queued": "◷", "waiting": "·", "failed": "✗",
    "stopped": "■", "trained": "✓",
}  # fmt: skip
BUSY = ("running", "queued")


def show_all(request: Request) -> Response:
    """Answer with all runs and their states, and the configurations that were never started."""
    readers, runs = _readers(request), known_runs()
    started = [run for run in runs if RunFolder(run).path.is_dir() or is_at_work(run)]
    states = [(readers.read(run), is_at_work(run)) for run in started]
    states.sort(key=lambda one: (one[0].state not in BUSY, one[0].training is None, one[0].run))
    others = {run: file for run, file in runs.items() if run not in started}
    values = {"states": states, "others": others, "marks": MARKS}
    return page("runs", {**values, **FORMATS}, here="/runs")


def show(request: Request) -> Response:
    """Answer with the page of a run."""
    run = _run(request)
    values = {**_live(request, run), **_controls(request, run), **_pictures(run)}
    return page("run", values, here="/runs")


def show_live(request: Request) -> Response:
    """Answer with the part of the page that changes all the time."""
    return page("run_live", _live(request, _run(request)))


def show_controls(request: Request) -> Response:
    """Answer with the buttons if others than before are possible; otherwise typed values stay."""
    values = _controls(request, _run(request))
    if request.query_params.get("mode") == values["mode"]:
        return Response(status_code=204)
    return page("run_controls", values)


def show_pictures(request: Request) -> Response:
    """Answer with the newest pictures, if there are others than before."""
    values = _pictures(_run(request))
    if request.query_params.get("seen") == values["seen"]:
        return Response(status_code=204)
    return page("run_pictures", values)


def send_picture(request: Request) -> Response:
    """Answer with a picture, which is asked for by its number."""
    pictures = find_pictures(_run(request))
    number = request.path_params["number"]
    if number >= len(pictures):
        raise HTTPException(404, "There is no such picture.")
    return FileResponse(pictures[number].file, media_type="image/png")


def start_run(request: Request) -> Response:
    """Start a run, and show it."""
    run = _run(request)
    start(run)
    return RedirectResponse(f"/runs/{run}", 303)


def stop_run(request: Request) -> Response:
    """Ask a run to stop, and show it."""
    run = _run(request)
    stop(run)
    return RedirectResponse(f"/runs/{run}", 303)


async def show_switch(request: Request) -> Response:
    """Answer with the diff of the configuration and the jobs of a switch; nothing is done."""
    run, choice = _run(request), _choice(await _form(request))
    digest = _digest(run)
    output = (await run_in_threadpool(plan_switch, run, choice)).splitlines()
    diff = [line for line in output if not line.startswith(("---", "+++", "snakemake "))]
    values = {
        "run": run,
        "choice": choice,
        "digest": digest,
        "lines": diff,
        "jobs": [line for line in output if line.startswith("snakemake ")],
    }
    return page("switch", values, here="/runs")


async def switch_run(request: Request) -> Response:
    """Switch a run as it was shown, and show it."""
    run, form = _run(request), await _form(request)
    if form.get("digest") != _digest(run):
        raise PipelineError(
            f"{find_config(run)}: was saved since the diff was shown; nothing was switched",
            hint="go back, and look at the new diff",
        )
    switch(run, _choice(form), then_start="then_start" in form)
    return RedirectResponse(f"/runs/{run}", 303)


async def _form(request: Request) -> FormData:
    return await request.form(max_files=0, max_fields=10)


def _run(request: Request) -> str:
    return check_run(str(request.path_params["run"]))


def _readers(request: Request) -> RunReaders:
    state = request.app.state
    if not hasattr(state, "run_readers"):
        state.run_readers = RunReaders()
    readers: RunReaders = state.run_readers
    return readers


def _live(request: Request, run: str) -> dict[str, Any]:
    state = _readers(request).read(run)
    curve = draw_loss(state.loss, state.val_loss, state.phase_starts)
    output = read_output(run, "switch" if _is_switching(run) else _newest(run), OUTPUT_LINES)
    values = {
        "state": state,
        "curve": curve,
        "size": (WIDTH, HEIGHT),
        "curve_edges": EDGES,
        "marks": MARKS,
    }
    return {**values, "output": output, "starting": _is_starting(run, state), **FORMATS}


def _controls(request: Request, run: str) -> dict[str, Any]:
    """Return which buttons there are; the mode changes when others are possible."""
    state = _readers(request).read(run)
    if _is_switching(run):
        mode = "switching"
    elif state.state in BUSY or is_at_work(run):
        mode = "training" if _trains(state) else "working"
        mode = "stopping" if mode == "training" and is_asked_to_stop(run) else mode
    else:
        mode = "finished" if state.state == "finished" else "idle"
    presets = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    choices = {"presets": presets, "precisions": PRECISIONS}
    return {"run": run, "mode": mode, "config": state.config, "problem": state.problem, **choices}


def _trains(state: RunState) -> bool:
    return any(one.rule == TRAIN and one.state == "running" for one in state.stages)


def _pictures(run: str) -> dict[str, Any]:
    found = find_pictures(run)
    seen = f"{len(found)}-{found[-1].version}" if found else "0"
    return {"run": run, "pictures": found[::-1][:MOST_SHOWN], "count": len(found), "seen": seen}


def _is_switching(run: str) -> bool:
    started = read_started(run, "switch")
    return started is not None and started.is_alive


def _is_starting(run: str, state: RunState) -> bool:
    """Return whether a command that was started has not shown itself in the run's files yet."""
    return state.state not in BUSY and is_at_work(run)


def _newest(run: str) -> What:
    """Return which of a page's commands began last."""
    train, switched = read_started(run, "train"), read_started(run, "switch")
    later = switched is not None and (
        train is None or switched.process.started > train.process.started
    )
    return "switch" if later else "train"


def _choice(form: FormData) -> SwitchChoice:
    preset, precision = str(form.get("preset", "")), str(form.get("mixed_precision", ""))
    number = str(form.get("num_processes", "")).strip()
    if number and not (number.isdecimal() and len(number) < 6):
        raise PipelineError(f"{number[:20]!r} processes", hint="give a whole number from 1 on")
    return SwitchChoice(preset or None, int(number) if number else None, precision or None)


def _digest(run: str) -> str:
    return hashlib.sha256(read_bytes(find_config(run), follow_links=True)).hexdigest()


FORMATS = {
    "format_duration": format_duration,
    "format_figure": format_figure,
    "format_rate": format_rate,
}
ONE = "/runs/{run}"
routes = [
    Route("/", show_start),
    Route("/runs", show_all),
    Route(ONE, show),
    Route(f"{ONE}/live", show_live),
    Route(f"{ONE}/controls", show_controls),
    Route(f"{ONE}/pictures", show_pictures),
    Route(f"{ONE}/pictures/{{number:int}}", send_picture),
    Route(f"{ONE}/start", start_run, methods=["POST"]),
    Route(f"{ONE}/stop", stop_run, methods=["POST"]),
    Route(f"{ONE}/switch/plan", show_switch, methods=["POST"]),
    Route(f"{ONE}/switch", switch_run, methods=["POST"]),
]
