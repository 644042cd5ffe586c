"""The answers of a language model beside what was expected: a table of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ANSWERS = "answers.jsonl"


@dataclass(frozen=True)
class Answer:
    """A prompt with what the model has made of it."""

    prompt: str
    expected: str | None
    """None of a prompt that the configuration names."""
    generated: str


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Write one answer a line."""
    lines = [json.dumps(asdict(answer), ensure_ascii=False) for answer in answers]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_answers(path: Path) -> list[Answer]:
    """The answers that an evaluation wrote."""
    return [
        Answer(**json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line
    ]
