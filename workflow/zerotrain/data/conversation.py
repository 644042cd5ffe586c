"""A text dataset: every conversation with its digest and split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zerotrain import artifact
from zerotrain.data.dataset import KIND, choose_split
from zerotrain.data.dataset_folder import PublishedDataset, SampleType, read_repeats, read_samples

ROLES = ("system", "user", "assistant")
PROMPT = "prompt"
"""Role of a question that is used verbatim: without a chat template and without a line break after
it."""


class Message(NamedTuple):
    """A turn of a conversation."""

    role: str
    """One of ROLES, or PROMPT."""
    content: str


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


def _entry(sample: Conversation) -> dict[str, Any]:
    messages = [message._asdict() for message in sample.messages]
    return {**vars(sample), "messages": messages}


TEXTS = SampleType(Conversation, _entry)


def _sha256(messages: Sequence[Message]) -> str:
    return hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode()).hexdigest()
