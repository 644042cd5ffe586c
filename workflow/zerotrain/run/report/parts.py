"""What the page is made of: pictures, tables, and panels that join them with text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Row = Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A picture inside the page."""

    alt: str
    """What it shows, in words."""
    light: bytes
    """PNG or WebP."""
    dark: bytes | None = None
    """The same for a dark page; None: `light` serves both."""

    @property
    def kind(self) -> str:
        """Return the MIME type."""
        return "image/webp" if self.light[8:12] == b"WEBP" else "image/png"


@dataclass(frozen=True)
class Table:
    """Rows whose first cell is their name."""

    rows: Sequence[Row]
    head: Row = ()
    numbers: bool = False
    """Whether the cells after the first are numbers, which are aligned to the right."""


@dataclass(frozen=True)
class Panel:
    """A title with sentences, a picture and its numbers."""

    title: str
    text: Sequence[str] = ()
    picture: Picture | None = None
    table: Table | None = None
    shown: bool = True
    """Whether the table is open; otherwise a click opens it."""


@dataclass(frozen=True)
class Chapter:
    """One of the page's four questions with its answer."""

    anchor: str
    title: str
    panels: Sequence[Panel] = ()
    missing: Sequence[str] = ()
    """A sentence for each part that the run has no data for."""


@dataclass
class Missing:
    """Collects the sentences of a chapter about what is not there."""

    sentences: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Add a sentence."""
        self.sentences.append(sentence)
