"""A curve in characters: braille, two by four dots a character, or asterisks."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
