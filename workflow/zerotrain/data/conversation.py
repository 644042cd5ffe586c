"""A text dataset: every conversation with its digest and split."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zerotrain import artifact
from zerotrain.artifact.documents import check_object, parse_json
from zerotrain.data.dataset import KIND, choose_split
from zerotrain.data.dataset_folder import PublishedDataset, SampleType, read_repeats, read_samples

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM = ("system", "developer")
"""Roles of turns that give orders: they may come before the first question."""
PROMPT = "prompt"
"""Role of a question that is used verbatim: without a chat template and without a line break after
it."""
TOOLS = "tools"
"""Role of no turn: its content is the JSON of the tools that the conversation offers, and it comes
first."""


class Message(NamedTuple):
    """A turn of a conversation."""

    role: str
    """One of ROLES, or PROMPT or TOOLS."""
    content: str
    keys: str = ""
    """JSON of what a chat template gets of the turn besides, such as its tool_calls, by name."""
    learned: bool = True
    """Whether an answer is learned; without effect for other turns."""


@dataclass(frozen=True)
class Conversation:
    """One example: turns that end with an answer."""

    file: str
    """Its place in the source."""
    messages: tuple[Message, ...]
    sha256: str
    split: Literal["train", "holdout"]


class Conversations(PublishedDataset[Conversation]):
    """A published text dataset."""


def conversation(file: str, messages: Sequence[Message], holdout: float) -> Conversation:
    """Build a conversation with its digest and its split.

    The split depends only on the turns before the first answer, so conversations with the same
    beginning are in the same split: no held-out answer is seen in training at the beginning of a
    longer conversation, or next to another answer to the same question.
    """
    asked = _sha256([*takewhile(lambda message: message.role != "assistant", messages)])
    return Conversation(file, tuple(messages), _sha256(messages), choose_split(asked, holdout))


def read_conversations(folder: Path) -> Conversations:
    """Read a text dataset.

    Raises:
        PipelineError: it is missing or damaged, or of another kind or format.
    """
    found = artifact.read(folder, KIND)
    samples = read_samples(found, TEXTS)
    samples.check()
    return Conversations(found, samples, read_repeats(found))


def turns_of(messages: Sequence[Message]) -> list[Message]:
    """Return the turns of a conversation, without its tools."""
    return [message for message in messages if message.role != TOOLS]


def count_keys(samples: Iterable[Conversation]) -> Counter[str]:
    """Count for each further key of turns, such as tool_calls, the turns that have it."""
    return Counter(
        key
        for sample in samples
        for message in sample.messages
        if message.keys
        for key in check_object(parse_json(message.keys, sample.file), sample.file)
    )


def _entry(sample: Conversation) -> dict[str, Any]:
    messages = [
        dict(zip(Message._fields, _plain(message), strict=False)) for message in sample.messages
    ]
    return {**vars(sample), "messages": messages}


TEXTS = SampleType(Conversation, _entry)


def _sha256(messages: Sequence[Message]) -> str:
    plain = [_plain(message) for message in messages]
    return hashlib.sha256(json.dumps(plain, ensure_ascii=False).encode()).hexdigest()


def _plain(message: Message) -> tuple[str | bool, ...]:
    """Return the fields without those at the end that have their defaults.

    A turn of role and content alone has the digest of two values.
    """
    found: tuple[str | bool, ...] = message
    defaults = [*Message._field_defaults.values()]
    while defaults and found[-1] == defaults.pop():
        found = found[:-1]
    return found
