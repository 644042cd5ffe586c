"""The results of an evaluation: metrics, and the answers of a language model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

ANSWERS = "answers.jsonl"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Measured:
    """The samples or answers of an evaluation, and their metrics."""

    metrics: Mapping[str, float | None]
    """By their names in metrics.json; None if there was nothing to measure."""
    prompts: list[str]
    """For text, the last question of each conversation."""
    shown: str
    """The file to look at first."""
    write: Callable[[Path], None]
    """Writes the samples or answers into a folder."""
    systems: Sequence[str] = ()
    """For text, the system's turn before each prompt, or empty text."""
    conditioning_images: Sequence[Sequence[str]] = ()
    """The files that `write` writes for each prompt's conditioning images; empty without any."""


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` items, evenly spaced over all of them.

    Files of one subject often share a prefix, so that the first items would show only one subject.
    """
    count = min(len(items), most)
    return [items[place * len(items) // count] for place in range(count)]


@dataclass(frozen=True)
class Answer:
    """A prompt with the model's answer."""

    prompt: str
    expected: str | None
    """None for a prompt from the configuration."""
    generated: str


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Write one answer per line."""
    lines = [json.dumps(asdict(answer), ensure_ascii=False) for answer in answers]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_answers(path: Path) -> list[Answer]:
    """Return the answers that an evaluation wrote."""
    return [
        Answer(**json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line
    ]
