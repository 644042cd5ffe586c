"""The drawing of a run's state and loss curve for any terminal, and its plain lines for a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from zerotrain.config.runs import train_command
from zerotrain.errors import show_controls
from zerotrain.machine.host import gib
from zerotrain.machine.output import format_figure
from zerotrain.run.phase import FAILED, RUNNING, STOPPED, TRAINED, WAITING
from zerotrain.run.stages import DONE, FINISHED, QUEUED, TRAIN, Stage
from zerotrain.run.watch.state import RunState, Training
from zerotrain.training.reporting.display import format_duration, format_rate

STYLES = {
    DONE: "green", FINISHED: "green", RUNNING: "bold cyan", QUEUED: "yellow", WAITING: "dim",
    FAILED: "bold red", STOPPED: "yellow", TRAINED: "green",
}  # fmt: skip
MARKS = {DONE: "✔", RUNNING: "▶", QUEUED: "◷", WAITING: "·", FAILED: "✘", STOPPED: "■"}
PLAIN_MARKS = {DONE: "+", RUNNING: ">", QUEUED: "q", WAITING: ".", FAILED: "x", STOPPED: "="}
LEAST_CURVE = 3
"""Fewest lines of a curve that show anything."""
MOST_CURVE = 12
PHASES = 4
"""Phases that are shown around the current one; the others are counted."""
SHARE = 0.005
"""Least share of a part of a step that is shown."""
Part = tuple[str, str]
"""Text and style."""


@dataclass(frozen=True)
class Canvas:
    """Where a state is drawn."""

    width: int
    height: int | None = None
    """None: no limit."""
    unicode: bool = True
    """Whether marks, bars and braille can be shown."""


def draw(state: RunState, canvas: Canvas) -> Text:
    """Draw a state in at most as many lines as fit; of too small a terminal the end is cut off.

    Control characters of names and messages are shown as escapes.
    """
    head = [*_title(state), *_graph(state, canvas)]
    foot = _details(state)
    if state.training:
        head += [[], _position(state.training, canvas)]
        foot = [*_figures(state.training, state, canvas), *foot]
    room = MOST_CURVE if canvas.height is None else canvas.height - len(head) - len(foot)
    lines = [*head, *_curve(state, canvas, min(room, MOST_CURVE)), *foot]
    text = Text(no_wrap=True, overflow="ellipsis" if canvas.unicode else "crop")
    for number, line in enumerate(lines[: canvas.height]):
        text.append("\n" if number else "")
        for words, style in line:
            text.append(escape(words), style)
    return text


def escape(text: str) -> str:
    """Return foreign text as one line without control characters."""
    return show_controls(" ".join(text.splitlines()).replace("\t", " "))


def describe(state: RunState) -> str:
    """Describe a run in one line: its state, what runs, its position and pace."""
    at_work = [one for one in state.stages if one.state in (RUNNING, QUEUED)]
    listed = at_work or [one for one in state.stages if one.state in (FAILED, STOPPED)]
    parts = [state.state, *map(_with_detail, listed[:2])]
    parts += [state.problem] if state.problem and not state.stages else []
    training = state.training
    if training:
        trains = any(one.phase == training.phase and one.rule == TRAIN for one in at_work)
        parts.append(f"{'' if trains else f'{training.phase} '}{_step_words(training)}")
        if training.loss is not None:
            parts.append(f"loss {format_value(training.loss)}")
        parts += _pace_words(training)
    return escape(f"{state.run}: {', '.join(parts)}")


def describe_changes(before: RunState | None, now: RunState) -> list[str]:
    """Describe the stages whose state is another one than before, one line for each."""
    known = {(one.name, one.phase): one.state for one in before.stages} if before else {}
    return [
        escape(f"{now.run}: {_name(one)}: {one.state}{_more(one)}")
        for one in now.stages
        if before is not None and known.get((one.name, one.phase), WAITING) != one.state
    ]


def _title(state: RunState) -> list[list[Part]]:
    title: list[Part] = [(state.run, "bold"), ("  ", ""), (state.state, STYLES[state.state])]
    if state.config:
        title.append((f"  {state.config}", "dim"))
    if state.problem:
        return [title, [(state.problem, "red")]]
    return [title]


def _graph(state: RunState, canvas: Canvas) -> list[list[Part]]:
    """Return the stages: those of the data, a line for each phase, the report."""
    first = [one for one in state.stages if one.phase is None and one.rule != "report"]
    last = [one for one in state.stages if one.rule == "report"]
    phases = list(dict.fromkeys(one.phase for one in state.stages if one.phase is not None))
    at = state.training.phase if state.training else next(iter(phases), None)
    start = max(0, min(phases.index(at) - 1, len(phases) - PHASES)) if at in phases else 0
    shown = phases[start : start + PHASES]
    name_width = max((len(escape(name)) for name in shown), default=0)
    lines: list[list[Part]] = [_row(first, canvas, "")]
    if start:
        lines.append([(f"{start} earlier phase{'s' * (start > 1)}", "dim")])
    for name in shown:
        of_phase = [one for one in state.stages if one.phase == name]
        lines.append(_row(of_phase, canvas, f"{escape(name):<{name_width}}  "))
    if later := len(phases) - start - len(shown):
        lines.append([(f"{later} later phase{'s' * (later > 1)}", "dim")])
    return [*lines, _row(last, canvas, "")]


def _row(stages: Sequence[Stage], canvas: Canvas, label: str) -> list[Part]:
    marks = MARKS if canvas.unicode else PLAIN_MARKS
    named = sum(len(one.name) + 4 for one in stages) + len(label) <= canvas.width
    parts: list[Part] = [(label, "")]
    for one in stages:
        words = f"{one.name} {marks[one.state]}  " if named else f"{marks[one.state]} "
        parts.append((words, STYLES[one.state]))
    return parts


def _details(state: RunState) -> list[list[Part]]:
    """Return a line for each stage that runs outside of a training, is queued or has failed."""
    lines = []
    for one in state.stages:
        shown = one.state in (QUEUED, FAILED, STOPPED)
        if shown or (one.state == RUNNING and (one.rule != TRAIN or one.job)):
            words = f"{_name(one)}: {one.state}{_more(one)}"
            lines.append([(words, STYLES[one.state])])
    if state.training and state.training.still:
        lines.append([(f"does not move: {state.training.still}", "red")])
    if state.state in (WAITING, TRAINED, STOPPED, FAILED) and state.config:
        verb = "start" if state.state == WAITING else "continue"
        lines.append([(f"to {verb}: {train_command(Path(state.config))}", "")])
    return lines


def _position(training: Training, canvas: Canvas) -> list[Part]:
    """Return the line with the bar of the phase."""
    words = f"{training.phase} {training.preset}  {_step_words(training)}"
    start, until = training.start_step or 0, training.until_step
    if until is None or until <= start:
        return [(words, "bold")]
    share = min(max((training.step - start) / (until - start), 0.0), 1.0)
    percent = f" {share:4.0%}"
    room = canvas.width - len(escape(words)) - len(percent) - 2
    if room < 8:
        return [(words, "bold"), (percent, "")]
    filled = round(share * room)
    done, rest = ("━", "─") if canvas.unicode else ("#", "-")
    return [(f"{words}  ", "bold"), (done * filled, "cyan"), (rest * (room - filled), "dim"),
            (percent, "")]  # fmt: skip


def _step_words(training: Training) -> str:
    of = f" of {training.until_step}" if training.until_step is not None else ""
    return f"step {training.step}{of}"


def _pace_words(training: Training) -> list[str]:
    words = []
    if training.steps_per_second:
        words.append(format_rate(training.steps_per_second))
    if training.seconds_left is not None:
        words.append(f"{format_duration(training.seconds_left)} left")
    return words


def _figures(training: Training, state: RunState, canvas: Canvas) -> list[list[Part]]:
    values = [
        (name, value)
        for name, value in (
            ("loss", training.loss),
            ("val_loss", training.val_loss),
            ("grad_norm", training.grad_norm),
        )
        if value is not None
    ]
    shown = [f"{name} {format_value(value)}" for name, value in values]
    if training.learning_rate is not None:
        shown.append(f"lr {training.learning_rate:.2e}")
    if training.epoch is not None:
        shown.append(f"epoch {training.epoch:.2f}")
    pace = _pace_words(training)
    if training.samples_per_second:
        pace.insert(1, f"{format_figure(training.samples_per_second)} samples/s")
    if training.seconds is not None:
        pace.append(f"{format_duration(training.seconds)} trained")
    if training.seconds_left is not None:
        end = time.localtime(state.time + training.seconds_left)
        same_day = end[:3] == time.localtime(state.time)[:3]
        pace.append(f"until {time.strftime('%H:%M' if same_day else '%d %B %H:%M', end)}")
    split = [f"{part} {share:.0%}" for part, share in training.time_split.items() if share >= SHARE]
    memory = [
        f"{kind} memory {gib(count)}"
        for kind, count in (("host", training.host_bytes), ("device", training.device_bytes))
        if count
    ]
    lines = [line for words in (shown, pace, split, memory) for line in _flow(words, canvas.width)]
    if state.sample:
        lines.append(f"sample {state.sample}")
    return [[(line, "")] for line in lines]


def _flow(words: Iterable[str], width: int) -> list[str]:
    """Return the words in as few lines as they fit into."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines


def _curve(state: RunState, canvas: Canvas, room: int) -> list[list[Part]]:
    """Return the loss over the steps, above a line that marks where each phase begins."""
    if room < LEAST_CURVE + 1:
        return []
    lines = draw_curve(state.loss, canvas.width, room - 1, braille=canvas.unicode)
    if not lines:
        return []
    axis = [" "] * canvas.width
    last = str(state.loss[-1][0])
    for step, name in state.phase_starts:
        text = f"|{escape(name)} {step}"
        place = place_of(step, state.loss, canvas.width)
        if place + len(text) + len(last) + 1 <= canvas.width:
            axis[place : place + len(text)] = text
    axis[canvas.width - len(last) :] = last
    return [*([(line, "cyan")] for line in lines), [("".join(axis), "dim")]]


def _name(stage: Stage) -> str:
    return f"{stage.name} {stage.phase}" if stage.phase else stage.name


def _with_detail(stage: Stage) -> str:
    shown = _more(stage) if stage.state != RUNNING else ""
    verb = f"{stage.state} " if stage.state != RUNNING else ""
    return f"{verb}{_name(stage)}{shown}"


def _more(stage: Stage) -> str:
    job = f"job {stage.job}" if stage.job else ""
    words = ", ".join(filter(None, (job, stage.detail)))
    return f" ({words})" if words else ""


BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character: by column, from the top (Unicode 15, block 2800)."""
LOG_FROM = 10.0
"""Ratio of the largest value to the smallest from which the axis is logarithmic."""


def draw_curve(
    points: Sequence[tuple[int, float]], width: int, height: int, *, braille: bool
) -> list[str]:
    """Draw values over steps, with the largest and the smallest value at the left.

    Args:
        points: Steps, ascending, with finite values; those of one column are averaged.
        width: Characters of a line.
        height: Number of lines.
        braille: Whether the terminal shows braille; else asterisks.

    Returns:
        The lines; none if there is too little to draw.
    """
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if len(points) < 2 or width < 20 or height < 2:
        return []
    wide, high = (2, 4) if braille else (1, 1)
    label = max(len(format_value(value)) for _, value in points)
    columns = _columns(points, (width - label - 1) * wide)
    values = [value for value in columns if value is not None]
    log = min(values) > 0 and max(values) > LOG_FROM * min(values)
    rows = _rows(columns, height * high, log=log)
    top, bottom = format_value(max(values)), format_value(min(values))
    lines = _braille(rows, height) if braille else _asterisks(rows, height)
    labels = [top, *(["log"] if log else [""]) * (height > 2), *[""] * (height - 3), bottom]
    return [f"{text:>{label}} {line}" for text, line in zip(labels, lines, strict=True)]


def place_of(step: int, points: Sequence[tuple[int, float]], width: int) -> int:
    """Return the character below which a step is, in lines of `draw_curve`."""
    label = max(len(format_value(value)) for _, value in points)
    first, last = points[0][0], points[-1][0]
    share = (step - first) / max(last - first, 1)
    return label + 1 + round(min(max(share, 0.0), 1.0) * (width - label - 2))


def format_value(value: float) -> str:
    """Format a loss in few characters."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 else f"{value:.1e}"


def _columns(points: Sequence[tuple[int, float]], count: int) -> list[float | None]:
    """Return the mean of each column; None where there is no point."""
    first, last = points[0][0], points[-1][0]
    sums, counts = [0.0] * count, [0] * count
    for step, value in points:
        place = min((step - first) * count // max(last - first, 1), count - 1)
        sums[place] += value
        counts[place] += 1
    return [total / n if n else None for total, n in zip(sums, counts, strict=True)]


def _rows(columns: Sequence[float | None], count: int, *, log: bool) -> list[tuple[int, int]]:
    """Return the first and last row of each column's line, from the top.

    Each is drawn to the height of the column before it; columns without a point are interpolated.
    """
    known = [(place, value) for place, value in enumerate(columns) if value is not None]
    heights = [math.log(value) if log else value for _, value in known]
    low, high = min(heights), max(heights)
    places = [place for place, _ in known]
    found: list[tuple[int, int]] = []
    number, before = 0, None
    for column in range(len(columns)):
        while number + 1 < len(places) and places[number + 1] <= column:
            number += 1
        height = heights[number]
        if number + 1 < len(places) and column > places[number]:
            share = (column - places[number]) / (places[number + 1] - places[number])
            height += share * (heights[number + 1] - height)
        row = round((high - height) / ((high - low) or 1.0) * (count - 1))
        last = row if before is None else before
        found.append((min(row, last), max(row, last)))
        before = row
    return found


def _braille(rows: Sequence[tuple[int, int]], height: int) -> list[str]:
    lines = [[0] * ((len(rows) + 1) // 2) for _ in range(height)]
    for column, (top, bottom) in enumerate(rows):
        for row in range(top, bottom + 1):
            lines[row // 4][column // 2] |= DOTS[column % 2][row % 4]
    return ["".join(chr(BRAILLE + bits) for bits in line) for line in lines]


def _asterisks(rows: Sequence[tuple[int, int]], height: int) -> list[str]:
    return [
        "".join("*" if top <= line <= bottom else " " for top, bottom in rows)
        for line in range(height)
    ]
