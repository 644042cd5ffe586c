"""Conversations to tokens: what a language model reads, and which of it is learned.

A tokenizer with a chat template renders the turns by it. Without one, each question stands as it is
with a line break after it, and each answer is followed by the token that ends a text. A causal
model learns every answer, and never a question. A seq2seq model reads all turns before the last
answer, one a line, and learns that answer; chat templates are none of its kind.

Questions and answers become tokens apart from each other: a question has then the same tokens in
training as it has when its answer is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerotrain.errors import PipelineError
from zerotrain.families import Tokens

if TYPE_CHECKING:
    from zerotrain.data.conversation import Message

IGNORED = -100
"""The label of a token that is not learned."""


def causal_tokens(tokenizer: Any, messages: Sequence[Message], max_length: int) -> Tokens | None:
    """A conversation for a causal model, cut at its end; None if no answer is left of it."""
    input_ids, labels = [], []
    for ids, learned in _segments(tokenizer, messages):
        input_ids += ids
        labels += ids if learned else [IGNORED] * len(ids)
    if all(label == IGNORED for label in labels[:max_length]):
        return None
    return Tokens(input_ids[:max_length], labels[:max_length])


def causal_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """What the answer to the last question follows."""
    if tokenizer.chat_template:
        return _plain_ids(tokenizer, _rendered(tokenizer, messages, question=True))
    return [token for ids, _ in _segments(tokenizer, messages) for token in ids]


def seq2seq_tokens(tokenizer: Any, messages: Sequence[Message], max_length: int) -> Tokens:
    """A conversation for a seq2seq model; what it reads and what it writes are cut each."""
    source = seq2seq_prompt(tokenizer, messages[:-1], max_length)
    return Tokens(source, _cut(tokenizer, messages[-1].content, max_length))


def seq2seq_prompt(tokenizer: Any, messages: Sequence[Message], max_length: int) -> list[int]:
    """What a seq2seq model reads to answer the last question."""
    return _cut(tokenizer, "\n".join(message.content for message in messages), max_length)


def end_tokens(tokenizer: Any) -> set[int]:
    """The tokens that may end an answer: the tokenizer's own, and that of its chat template."""
    found = {int(tokenizer.eos_token_id)}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        after = _plain_ids(tokenizer, rendered.rpartition("b")[2])
        found.update(token for token in after[:1] if token in tokenizer.all_special_ids)
    return found


def _segments(tokenizer: Any, messages: Sequence[Message]) -> list[tuple[list[int], bool]]:
    """The tokens of each stretch of a conversation, and whether they are learned."""
    if tokenizer.chat_template:
        texts = _chat_segments(tokenizer, messages)
        return [(_plain_ids(tokenizer, text), learned) for text, learned in texts]
    found: list[tuple[list[int], bool]] = []
    for message in messages:
        if message.role == "assistant":
            ids = _plain_ids(tokenizer, message.content)
            found.append(([*ids, tokenizer.eos_token_id], True))
        elif found:
            found.append((_plain_ids(tokenizer, message.content + "\n"), False))
        else:  # with what begins a text, if the tokenizer has such a token
            ids = tokenizer(message.content + "\n").input_ids
            found.append((ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids, False))
    return found


def _chat_segments(tokenizer: Any, messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """A conversation as its chat template renders it, cut before and after each answer.

    Templates of models that reason render earlier answers otherwise than the last one: what is
    learned then begins at the first answer that stands as it was generated.
    """
    found: list[tuple[str, bool]] = []
    shown = ""
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = _rendered(tokenizer, messages[:number], question=True)
        after = _rendered(tokenizer, messages[: number + 1], question=False)
        if not after.startswith(before):
            raise PipelineError(
                "the tokenizer's chat template renders an answer otherwise than what it lets "
                f"answers follow: {after[-60:]!r} after {before[-60:]!r}",
                hint="use a template whose generation prompt begins each of its answers",
            )
        if not before.startswith(shown):
            found, shown = [], ""
        found += [(before[len(shown) :], False), (after[len(before) :], True)]
        shown = after
    return found


def _rendered(tokenizer: Any, messages: Sequence[Message], *, question: bool) -> str:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    rendered: str = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=question
    )
    return rendered


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _cut(tokenizer: Any, text: str, max_length: int) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=True, max_length=max_length).input_ids
    return ids
