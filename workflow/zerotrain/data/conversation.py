"""The manifest of a dataset of text: every conversation with its digest and split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.data.dataset import KIND, choose_split

ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """A turn of a conversation."""

    role: str
    """One of ROLES."""
    content: str


@dataclass(frozen=True)
class Conversation:
    """One example: turns of which the last is an answer."""

    file: str
    """Where it stands in the source."""
    messages: tuple[Message, ...]
    sha256: str
    split: Literal["train", "holdout"]


@dataclass(frozen=True)
class Conversations:
    """A published dataset of text."""

    artifact: Artifact
    samples: tuple[Conversation, ...]
    """In the order of the source."""
    repeats: int

    def split(self, name: Literal["train", "holdout"]) -> tuple[Conversation, ...]:
        """The conversations of one split, in order."""
        return tuple(sample for sample in self.samples if sample.split == name)


def conversation(file: str, messages: Sequence[Message], holdout: float) -> Conversation:
    """A conversation with its digest, which alone decides its split.

    The split follows from the turns before the first answer: talks that begin alike are on one
    side, so that no answer is held out that training learns at the beginning of a longer talk, or
    beside another answer to the same question.
    """
    asked = _sha256([*takewhile(lambda message: message.role != "assistant", messages)])
    return Conversation(file, tuple(messages), _sha256(messages), choose_split(asked, holdout))


def conversations_content(
    samples: Sequence[Conversation], *, repeats: int, bad: list[dict[str, str]]
) -> dict[str, Any]:
    """The manifest's content; `bad` lists refused rows with `file` and `reason`."""
    train = sum(sample.split == "train" for sample in samples)
    return {
        "conversations": [
            {
                "file": sample.file,
                "messages": [message._asdict() for message in sample.messages],
                "sha256": sample.sha256,
                "split": sample.split,
            }
            for sample in samples
        ],
        "repeats": repeats,
        "bad": bad,
        "count": {"train": train, "holdout": len(samples) - train, "bad": len(bad)},
    }


def read_conversations(folder: Path) -> Conversations:
    """Read the manifest of a dataset of text.

    Raises:
        PipelineError: if there is none, or it is of another kind or format.
    """
    found = artifact.read(folder, KIND)
    samples = tuple(
        Conversation(
            **{**entry, "messages": tuple(Message(**message) for message in entry["messages"])}
        )
        for entry in found.content["conversations"]
    )
    return Conversations(found, samples, found.content["repeats"])


def _sha256(messages: Sequence[Message]) -> str:
    return hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode()).hexdigest()
