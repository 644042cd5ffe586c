"""The page on which a launch is planned: its form, forecast, curve and previews."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from zerotrain.builder.controls import Control, all_controls, groups
from zerotrain.builder.draft import Draft, read_draft
from zerotrain.builder.forecast import LEGEND, Forecast, forecast
from zerotrain.builder.pages import page
from zerotrain.builder.previews import Preview, mark_changes, preview, resolve
from zerotrain.builder.schedule import HEIGHT, WIDTH, Curve, draw
from zerotrain.builder.traces import Traces
from zerotrain.config.problems import Problem
from zerotrain.errors import PipelineError
from zerotrain.graph.checks import forget_checks
from zerotrain.launch.resolved import ResolvedPhase

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
