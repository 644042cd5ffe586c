"""The page on which a launch is planned: its form, forecast, curve and previews."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from zerotrain.artifact.layout import RunFolder
from zerotrain.builder.controls import Control, all_controls, groups
from zerotrain.builder.draft import Draft, read_draft
from zerotrain.builder.forecast import LEGEND, Forecast, forecast
from zerotrain.builder.pages import page
from zerotrain.builder.traces import Traces
from zerotrain.config.problems import Problem
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.config.text import dump
from zerotrain.errors import PipelineError
from zerotrain.graph.checks import forget_checks
from zerotrain.launch.files import accelerate_text
from zerotrain.launch.planner.planner import AUTO
from zerotrain.launch.planner.trace_store import TracedModel
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.schedules import learning_rate

POINTS = 160
WIDTH, HEIGHT = 600, 140


@dataclass(frozen=True)
class Curve:
    """A curve in a box of WIDTH x HEIGHT.

    Attributes:
        points: Its points, as SVG has them.
        peak: The largest rate.
        first: The rate of the first step.
        last: The rate of the last step.
        steps: The last step.
        begin: Where the phase begins, as a share of the width.
        end: Where the phase ends, as a share of the width.
    """

    points: str
    peak: float
    first: float
    last: float
    steps: int
    begin: float
    end: float


def draw(phase: ResolvedPhase) -> Curve:
    """Return the curve from the first step to the schedule's horizon, or the end if it is later."""
    horizon = phase.derived.lr_scheduler_steps
    steps = max(horizon, phase.derived.until_step)
    at = sorted({round(n * (steps - 1) / (POINTS - 1)) for n in range(POINTS)})
    rates = [learning_rate(phase.train, step, horizon) for step in at]
    peak = max(rates) or 1.0
    width = max(steps - 1, 1)
    points = " ".join(
        f"{step / width * WIDTH:.1f},{HEIGHT - rate / peak * HEIGHT:.1f}"
        for step, rate in zip(at, rates, strict=True)
    )
    begin, end = phase.derived.start_step / steps, phase.derived.until_step / steps
    return Curve(points, max(rates), rates[0], rates[-1], steps, begin, end)


EPOCH = 1000
"""Samples that an epoch is taken to have; prepare_dataset counts them."""


@dataclass(frozen=True)
class Preview:
    """A file, and its lines that a change has made.

    Attributes:
        title: Its name.
        text: Its content; empty without one.
        note: Why it is empty, or what is not final.
        lines: The lines, and whether each is new.
    """

    title: str
    text: str
    note: str = ""
    lines: tuple[tuple[str, bool], ...] = field(default=())


def resolve(
    draft: Draft, run: RunConfig, traced: TracedModel | None, recommended: str
) -> ResolvedPhase:
    """Resolve the draft's phase as render_launch does.

    Raises:
        PipelineError: values do not fit together, or a size is not known yet.
    """
    phase = run.phases[draft.index]
    name = phase.launch.preset
    if name == "auto" and not recommended:
        raise PipelineError(
            "auto has not chosen a preset: none fits, or the model is still being traced",
            hint="choose a preset",
        )
    preset = read_preset(AUTO.with_name(f"{recommended if name == 'auto' else name}.yaml"))
    if preset.engine == "deepspeed" and traced is None:
        raise PipelineError(
            "DeepSpeed's buckets follow the model's sizes, which are not known yet",
            hint="wait for the trace",
        )
    why = "auto: chosen by the planner" if name == "auto" else ""
    settings = LaunchSettings.of(run, phase.name)
    return resolve_phase(settings, preset, EPOCH, traced.sizes if traced else None, why=why)


def preview(draft: Draft, resolved: ResolvedPhase | str) -> list[Preview]:
    """Return the three files of a phase; for what is not resolved, the launchers' say why."""
    shown = {key: value for key, value in draft.raw.items() if key in PHASE_SECTIONS}
    epochs = any(
        phase.until.endswith("epochs") for phase in (draft.run.phases if draft.run else ())
    )
    note = f"Steps of an epoch: taken for a dataset of {EPOCH} samples." if epochs else ""
    files = [Preview("Configuration", dump(shown), note)]
    if isinstance(resolved, str):
        return [*files, *(Preview(name, "", resolved) for name in FILES)]
    folder = RunFolder(resolved.run).phase(resolved.phase).launch
    files.append(Preview(FILES[0], accelerate_text(resolved, folder / "deepspeed.json")))
    if resolved.derived.engine == "deepspeed":
        files.append(Preview(FILES[1], json.dumps(resolved.derived.deepspeed, indent=2)))
    else:
        files.append(Preview(FILES[1], "", "Plain PyTorch has no DeepSpeed file."))
    return files


FILES = ("accelerate.yaml", "deepspeed.json")
PHASE_SECTIONS = ("run", "family", "base", "lora", "data", "train", "launch", "phases")
"""What the preview shows of a configuration."""


def mark_changes(before: list[Preview], after: list[Preview]) -> list[Preview]:
    """Return previews with the lines marked that the ones before do not have."""
    old = {one.title: one.text for one in before}
    return [
        Preview(one.title, one.text, one.note, _lines(old.get(one.title, one.text), one.text))
        for one in after
    ]


def _lines(before: str, after: str) -> tuple[tuple[str, bool], ...]:
    old, new = before.splitlines(), after.splitlines()
    marked = [True] * len(new)
    for _, start, size in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        marked[start : start + size] = [False] * size
    return tuple(zip(new, marked, strict=True))


MOST = 64
"""Drafts that are kept."""
NO_FIELD = ("launch.preset",)
"""Controls that messages name along with the one that is wrong."""


@dataclass(frozen=True)
class Shown:
    """What the page shows of a draft.

    Attributes:
        draft: The draft.
        forecast: What presets take; None while values are invalid.
        curve: The learning rate; None while it is not known.
        previews: The files.
        problems: Problems by the controls that they name; "" for the others.
    """

    draft: Draft
    forecast: Forecast | None
    curve: Curve | None
    previews: list[Preview]
    problems: Mapping[str, list[Problem]]


def look(draft: Draft, traces: Traces, *, begin: bool = True) -> Shown:
    """Return what the page shows of a draft; `begin`: make a trace that it needs."""
    problems, run = list(draft.problems), draft.run
    found, curve = None, None
    resolved: ResolvedPhase | str = "They return when the values are valid."
    if run is not None:
        try:
            found = forecast(draft, run, traces, begin=begin)
        except PipelineError as error:
            problems.append(Problem(error.what, error.hint))
        try:
            resolved = resolve(
                draft, run, found.traced if found else None, found.recommended if found else ""
            )
            curve = draw(resolved)
        except PipelineError as error:
            resolved = error.what
    files = preview(draft, resolved)
    controls = all_controls(draft.family)
    placed: dict[str, list[Problem]] = {}
    for problem in {(one.what, one.hint): one for one in problems}.values():
        placed.setdefault(control_of(problem, controls, draft.index, draft.given), []).append(
            problem
        )
    return Shown(draft, found, curve, files, placed)


def control_of(
    problem: Problem, controls: Mapping[str, Control], index: int, given: Container[str] = ()
) -> str:
    """Return the control that a problem belongs to; "" for none.

    Args:
        problem: The problem. Its place decides, or the first key that it names.
        controls: The controls of the form.
        index: The phase that the form shows.
        given: Controls that the user has changed; of several keys that are named, theirs count.
    """
    parts = [str(part) for part in problem.location]
    if parts[:1] == ["phases"] and len(parts) > 2:
        inside = parts[2:]
        if parts[1] != str(index):
            return ""
        names = [".".join(inside), f"phase.{inside[0]}", f"train.{inside[0]}"]
    else:
        names = [".".join(parts)]
    if found := next((name for name in names if name in controls), None):
        return found
    if problem.location and parts[-1] not in ("launch", "train", "data", str(index)):
        return ""
    for text in (problem.what, problem.hint):
        mentioned = [
            (name not in given, place.start(), name)
            for name, control in controls.items()
            if name not in NO_FIELD
            and (place := re.search(rf"(?<![\w.-]){re.escape(_mention(control))}(?![\w-])", text))
        ]
        if mentioned:
            return min(mentioned)[2]
    return ""


def _mention(control: Control) -> str:
    """Return how messages name a control's key: of the top by a colon, as `base: ...`."""
    return (
        control.name
        if control.name.startswith(("machine.", "data.", "lora."))
        else (control.key if "." in control.name else f"{control.name}:")
    )


class Looks:
    """The drafts that were shown last: a change is compared with what was shown before it."""

    def __init__(self, traces: Traces) -> None:
        self.traces = traces
        self._seen: dict[str, Shown] = {}

    def at(self, draft: Draft, *, begin: bool = True) -> Shown:
        """Return what the page shows of a draft; what can change by itself is looked at again."""
        edited = draft.start.stat().st_mtime_ns if draft.start else 0
        key = f"{edited} {urlencode(sorted(draft.query.items()))}"
        if (found := self._seen.get(key)) is None:
            found = look(draft, self.traces, begin=begin)
            if len(self._seen) >= MOST:
                self._seen.pop(next(iter(self._seen)), None)
            if found.forecast is None or found.forecast.pending is None:
                self._seen[key] = found
        return found

    def forget(self) -> None:
        """Look at everything again."""
        forget_checks()
        self._seen.clear()


def show(request: Request) -> Response:
    """Answer with the whole page, of a draft that the address holds."""
    looks: Looks = request.app.state.looks
    looks.forget()
    shown = looks.at(read_draft(dict(request.query_params)))
    return page("build", {**_values(shown, shown.previews), "is_change": False}, here="/build")


async def update(request: Request) -> Response:
    """Answer a change of the form with what it changes on the page."""
    form = {key: str(value) for key, value in (await request.form()).items()}
    shown = request.headers.get("hx-current-url")
    before = form if shown is None else dict(parse_qsl(urlsplit(shown).query, True))
    return await run_in_threadpool(_answer, request.app.state.looks, form, before)


def _answer(looks: Looks, form: Mapping[str, str], before: Mapping[str, str]) -> Response:
    try:
        earlier = read_draft(before)
    except PipelineError:  # the address is not one of this page
        earlier = read_draft(form)
    if (address := _other_form(earlier, form)) is not None:
        return Response(headers={"HX-Redirect": f"/build?{urlencode(address)}"})
    draft = read_draft(form)
    shown, old = looks.at(draft), looks.at(earlier, begin=False).previews
    answer = page("result", {**_values(shown, old), "is_change": True})
    answer.headers["HX-Replace-Url"] = f"/build?{urlencode(draft.query)}"
    return answer


def _other_form(earlier: Draft, form: Mapping[str, str]) -> dict[str, str] | None:
    """Return the address of a form with other controls, if a change asks for one.

    Another family has its own base, data and size. Another phase has its own values, and those of
    the one that was shown are kept.
    """
    family = form.get("family", earlier.family)
    if family != earlier.family:
        draft = read_draft({**form, "family": earlier.family})
        own = () if draft.start else ("base", "data.", "train.resolution", "train.max_length")
        kept = {key: text for key, text in draft.query.items() if not key.startswith(own)}
        return {**kept, "family": family}
    phase = form.get("phase", earlier.phase)
    if phase != earlier.phase and phase in earlier.phases:
        return read_draft({**form, "phase": earlier.phase}).at_phase(phase)
    return None


def _values(shown: Shown, before: list[Preview]) -> dict[str, object]:
    draft = shown.draft
    return {
        "draft": draft,
        "groups": groups(draft.family),
        "values": draft.values(),
        "forecast": shown.forecast,
        "curve": shown.curve,
        "curve_size": (WIDTH, HEIGHT),
        "previews": mark_changes(before, shown.previews),
        "problems": shown.problems,
        "legend": LEGEND,
        "labels": {name: one.label for name, one in all_controls(draft.family).items()},
        "count": sum(map(len, shown.problems.values())),
    }


routes = [Route("/build", show), Route("/build", update, methods=["POST"])]
