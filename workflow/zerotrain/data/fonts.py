"""Drawing of text in any script: a Noto font for each run of characters, wrapped into lines.

The packages manimgx-fonts and manimgx-fonts-cjk bring Noto Sans for the scripts of most languages,
Noto Emoji (in one colour) and Noto Sans CJK. Pillow's libraqm shapes each run (joined Arabic,
Devanagari's conjuncts). The order of runs follows the Unicode Bidirectional Algorithm (UAX #9)
without its explicit marks: https://www.unicode.org/reports/tr9/.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import regex
from PIL import ImageFont

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

LINE_HEIGHT = 1.5
"""Height of a line by the size of its letters: signs above and below letters have room."""
ASCENT = 1.1
"""Distance of the baseline from the line's top, by the size of letters."""
REGULAR = 400.0
"""Weight; the CJK font's default is Thin."""
NOT_SHOWN = "\N{REPLACEMENT CHARACTER}"
"""Drawn for a character that no font has."""
LATIN, EMOJI, CJK = "NotoSans[wght]", "NotoEmoji[wght]", "NotoSansCJK-VF.otf"
SCRIPTS = (
    *("Arabic", "Armenian", "Bengali", "Devanagari", "Ethiopic", "Georgian", "Gujarati"),
    *("Gurmukhi", "Hebrew", "Kannada", "Khmer", "Lao", "Malayalam", "Myanmar", "Oriya", "Sinhala"),
    *("Tamil", "Telugu", "Thai"),
)
FACES = (LATIN, *(f"NotoSans{one}[wght]" for one in SCRIPTS), CJK, EMOJI, "NotoSansSymbols[wght]")
"""Fonts, in the order in which they are tried."""
JAPANESE, KOREAN, CHINESE = 0, 1, 2
"""Places in the CJK collection, which differ in the shape of some Han characters."""
UNSPACED = ("Khmer", "Lao", "Myanmar", "Thai")
"""Scripts besides Han and kana that put no spaces between words."""


@dataclass(frozen=True)
class Cluster:
    """What a reader takes for one character, and the font that has all of it."""

    text: str
    face: str
    is_break: bool
    """Whether a line may begin with it, without a space before it."""


class Run(NamedTuple):
    """Characters of one font and one direction."""

    text: str
    face: str
    is_rtl: bool


@dataclass(frozen=True)
class Line:
    """A line of text, its runs from left to right."""

    runs: tuple[Run, ...]
    han: int
    """Place of its font in the CJK collection."""
    size: int
    """Of the letters, in pixels."""

    @property
    def width(self) -> float:
        """Return its width in pixels."""
        return sum(_width(run, self.size, self.han) for run in self.runs)

    def draw(self, on: ImageDraw, left: float, top: float, ink: str) -> None:
        """Draw it with its upper left corner at this place."""
        base = top + ASCENT * self.size
        for run in self.runs:
            font = load_font(run.face, self.size, self.han)
            on.text((left, base), run.text, ink, font, anchor="ls", direction=_direction(run))
            left += _width(run, self.size, self.han)


def line_height(size: int) -> int:
    """Return the distance of lines in pixels."""
    return round(LINE_HEIGHT * size)


def wrap(text: str, width: int, size: int, most: int) -> list[Line]:
    """Break a text into at most `most` lines of `width` pixels; an ellipsis shows what is cut.

    White space, line breaks included, separates words. No more of the text is looked at than lines
    of the narrowest letters hold, so a long text costs no more than a short one.
    """
    # No letter but a few signs is narrower than a fifth of its size.
    room = most * (5 * width // size + 1)
    words = " ".join(text[: 2 * room].split())
    clusters = [*_clusters(words)]
    han, rtl = _choose_han(words), _is_rtl(words)
    rows: list[list[Cluster]] = [[]]
    for word in _words(clusters):
        row = [*rows[-1], *word]
        if rows[-1] and _length(row, size, han) > width:
            rows.append([])
            word = word[1:] if word[0].text == " " else word
        for cluster in word:
            if rows[-1] and _length([*rows[-1], cluster], size, han) > width:
                rows.append([])
            rows[-1].append(cluster)
        if len(rows) > most:
            break
    if len(rows) > most or len(text) > 2 * room:
        rows = rows[:most]
        dots = [*_clusters("…")]
        while rows[-1] and _length([*rows[-1], *dots], size, han) > width:
            rows[-1].pop()
        rows[-1] += dots
    return [Line(tuple(_runs(row, rtl=rtl)), han, size) for row in rows if row]


def coverage(face: str, text: str) -> bool:
    """Return whether a font has every character of a text; signs without a shape need none."""
    known = _code_points(face)
    return all(ord(one) in known for one in text if not _is_shapeless(one))


@lru_cache(maxsize=256)
def load_font(face: str, size: int, han: int = CHINESE) -> ImageFont.FreeTypeFont:
    """Load a font of FACES at a size in pixels; `han` is the place in the CJK collection."""
    font = ImageFont.truetype(
        str(font_file(face)), size, han if face == CJK else 0, layout_engine=ImageFont.Layout.RAQM
    )
    font.set_variation_by_axes([REGULAR])
    return font


def font_file(face: str) -> Path:
    """Return the file of a font."""
    package, end = ("manimgx_fonts_cjk", "ttc") if face == CJK else ("manimgx_fonts", "ttf")
    return Path(str(files(package) / f"{face}.{end}"))


@lru_cache
def _code_points(face: str) -> frozenset[int]:
    from fontTools.ttLib import TTFont

    with TTFont(font_file(face), fontNumber=0, lazy=True) as font:
        return frozenset(font.getBestCmap())


def _is_shapeless(character: str) -> bool:
    """Return whether a character only changes others: joiners, variation selectors, tags."""
    return unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f"


def _clusters(text: str) -> Iterator[Cluster]:
    """Yield the characters of a text with their fonts; spaces and signs keep the font before."""
    face = LATIN
    for found in regex.findall(r"\X", text):
        is_letter = found[0].isalpha()
        candidates = FACES if is_letter or face == EMOJI else (face, *FACES)
        covering = next((one for one in candidates if coverage(one, found)), None)
        shown = found if covering else NOT_SHOWN
        face = covering or LATIN
        yield Cluster(shown, face, _is_break(shown, face))


def _is_break(text: str, face: str) -> bool:
    unspaced = face == CJK or any(f"NotoSans{one}[" in face for one in UNSPACED)
    return unspaced and unicodedata.category(text[0])[0] in "LS"


def _words(clusters: Sequence[Cluster]) -> Iterator[list[Cluster]]:
    """Split where a line may end; the space before a word is part of it."""
    word: list[Cluster] = []
    for cluster in clusters:
        if word and (cluster.text == " " or (cluster.is_break and word[-1].text != " ")):
            yield word
            word = []
        word.append(cluster)
    if word:
        yield word


def _choose_han(text: str) -> int:
    """Choose Japanese shapes of Han characters next to kana, Korean ones next to Hangul."""
    if regex.search(r"[\p{Hiragana}\p{Katakana}]", text):
        return JAPANESE
    return KOREAN if regex.search(r"\p{Hangul}", text) else CHINESE


def _is_rtl(text: str) -> bool:
    """Return whether the first letter with a direction is written from right to left (P2, P3)."""
    kinds = map(unicodedata.bidirectional, text)
    return next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L"


def _levels(clusters: Sequence[Cluster], *, rtl: bool) -> list[int]:
    """Return the embedding level of each cluster: even ones are written from left to right."""
    own, before = "R" if rtl else "L", "R" if rtl else "L"
    kinds = []
    for cluster in clusters:
        found = unicodedata.bidirectional(cluster.text[0])
        kind = {"L": "L", "R": "R", "AL": "R", "EN": "N", "AN": "N"}.get(found, " ")
        if kind == "N" and before == "L":  # W7
            kind = "L"
        if kind in "LR":
            before = kind
        kinds.append(kind)
    before, levels = own, []
    after: list[str] = []
    following = own
    for kind in reversed(kinds):
        following = following if kind == " " else kind.replace("N", "R")
        after.append(following)
    for kind, following in zip(kinds, reversed(after), strict=True):
        if kind == " ":  # N1, N2
            kind = before if before == following else own
        else:
            before = kind.replace("N", "R")
        levels.append({"L": 2 * rtl, "R": 1, "N": 2}[kind])
    return levels


def _runs(clusters: Sequence[Cluster], *, rtl: bool) -> list[Run]:
    """Return the runs of a line from left to right (L2)."""
    places = zip(clusters, _levels(clusters, rtl=rtl), strict=True)
    runs = [
        (level, Run("".join(cluster.text for cluster, _ in group), face, level % 2 == 1))
        for (face, level), group in groupby(places, key=lambda one: (one[0].face, one[1]))
    ]
    for least in (2, 1):
        ordered = []
        for inside, group in groupby(runs, key=lambda one: one[0] >= least):
            part = [*group]
            ordered += part[::-1] if inside else part
        runs = ordered
    return [run for _, run in runs]


def _length(clusters: Sequence[Cluster], size: int, han: int) -> float:
    runs = (
        Run("".join(one.text for one in group), face, False)
        for face, group in groupby(clusters, key=lambda one: one.face)
    )
    return sum(_width(run, size, han) for run in runs)


@lru_cache(maxsize=4096)
def _width(run: Run, size: int, han: int) -> float:
    font = load_font(run.face, size, han)
    return float(font.getlength(run.text, direction=_direction(run)))


def _direction(run: Run) -> str:
    return "rtl" if run.is_rtl else "ltr"
