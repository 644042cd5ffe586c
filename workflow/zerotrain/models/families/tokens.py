"""Tokenisation of conversations: what a language model reads, and which tokens it learns.

A tokenizer with a chat template renders the turns with it. Without one, each question is followed
by a line break, and each answer by the token that ends a text. A question of the role PROMPT is
kept as it is, with neither template nor line break. A causal model learns every answer, and never a
question. A seq2seq model reads all turns before the last answer, one per line, and learns that
answer; chat templates are for causal models.

Questions and answers are tokenised separately, so that a question has the same tokens in training
as when its answer is generated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from zerotrain.data.conversation import PROMPT
from zerotrain.errors import PipelineError
from zerotrain.machine.confined import Confined, RaisedError
from zerotrain.models.families import Tokens
from zerotrain.models.pretrained import loading

if TYPE_CHECKING:
    from zerotrain.data.conversation import Message

IGNORED = -100
"""The label of a token that is not learned."""
ANSWER = "zerotrain"
"""A placeholder answer, to find what surrounds one: no template contains it."""
TODAY = datetime(2024, 7, 26)
"""The date that templates get, so that tokens do not depend on the day. It is the default of
Llama's templates."""
CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace('%{code}', '{TODAY:%{code}}')" for code in (*"aAbBdHIjmMpSyY", "-d"))
    + " }}{% endmacro %}"
)
"""Put before a template, it replaces transformers' function that returns the current date."""
_RENDERER: dict[tuple[str, str], Confined] = {}
"""The last template, in a process of its own: one of others can loop forever, at any turn."""


def causal_tokens(tokenizer: Any, messages: Sequence[Message], max_length: int) -> Tokens | None:
    """Tokenise a conversation for a causal model, cut at the end; None if no answer is left."""
    input_ids, labels = [], []
    segments = _segments(tokenizer, messages)
    for ids, learned in segments:
        input_ids += ids
        labels += ids if learned else [IGNORED] * len(ids)
    if all(label == IGNORED for label in labels[:max_length]):
        return None
    answers = sum(message.role == "assistant" for message in messages)
    left_out = answers - sum(learned for _, learned in segments)
    return Tokens(input_ids[:max_length], labels[:max_length], left_out)


def causal_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the tokens that precede the answer to the last question."""
    return [token for ids, _ in _segments(tokenizer, messages) for token in ids]


def seq2seq_tokens(tokenizer: Any, messages: Sequence[Message], max_length: int) -> Tokens:
    """Tokenise a conversation for a seq2seq model; source and answer are each cut."""
    source = seq2seq_prompt(tokenizer, messages[:-1], max_length)
    return Tokens(source, _cut(tokenizer, messages[-1].content, max_length))


def seq2seq_prompt(tokenizer: Any, messages: Sequence[Message], max_length: int) -> list[int]:
    """Return the tokens that a seq2seq model reads to answer the last question."""
    return _cut(tokenizer, "\n".join(message.content for message in messages), max_length)


def end_tokens(tokenizer: Any) -> set[int]:
    """Return the tokens that may end an answer: the tokenizer's and its chat template's."""
    found = {int(tokenizer.eos_token_id)}
    if tokenizer.chat_template:
        added = tokenizer.added_tokens_decoder
        after = _plain_ids(tokenizer, _around_answer(tokenizer)[1])
        found.update([token for token in after if token in added and added[token].special][:1])
    return found


def answer_start(tokenizer: Any) -> str:
    """Return the text that a chat template starts an answer with, such as an empty thought.

    Generated text starts with it, too.
    """
    if not tokenizer.chat_template:
        return ""
    ids = _plain_ids(tokenizer, _around_answer(tokenizer)[0])
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text.strip()


def _segments(tokenizer: Any, messages: Sequence[Message]) -> list[tuple[list[int], bool]]:
    """Return the tokens of each segment of a conversation, and whether it is learned."""
    as_is = any(message.role == PROMPT for message in messages)
    if tokenizer.chat_template and not as_is:
        return _chat_segments(tokenizer, messages)
    found: list[tuple[list[int], bool]] = []
    after = "" if as_is else "\n"
    for message in messages:
        if message.role == "assistant":
            ids = _plain_ids(tokenizer, message.content)
            found.append(([*ids, tokenizer.eos_token_id], True))
        elif found:
            found.append((_plain_ids(tokenizer, message.content + after), False))
        else:  # with the token that begins a text, if the tokenizer has one
            ids = _ids(tokenizer, message.content + after)
            found.append((ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids, False))
    return found


def _chat_segments(tokenizer: Any, messages: Sequence[Message]) -> list[tuple[list[int], bool]]:
    """Render a conversation with its chat template, split before and after each answer.

    Text that follows only the last answer is not learned after earlier ones. Templates of reasoning
    models render earlier answers differently: learning then starts at the first answer that is
    rendered as it was generated.
    """
    found: list[tuple[list[int], bool]] = []
    before = shown = ""
    places = [n for n, message in enumerate(messages) if message.role == "assistant"]
    if messages[-1].role != "assistant":
        places.append(len(messages))
    for place in places:
        asked, before = before, _rendered(tokenizer, messages[:place], question=True)
        if before.startswith(shown):
            question = _plain_ids(tokenizer, before[len(shown) :])
        elif _common(before, shown) >= len(shown) - len(_around_answer(tokenizer)[1]):
            answer, question = found.pop()[0], _plain_ids(tokenizer, before[len(asked) :])
            kept = _common(answer, question)
            found.append((answer[:kept], True))
            question = question[kept:]
        else:
            found, question = [], _plain_ids(tokenizer, before)
        found.append((question, False))
        if place == len(messages):
            break
        shown = _rendered(tokenizer, messages[: place + 1], question=False)
        if not shown.startswith(before):
            raise PipelineError(
                "the tokenizer's chat template renders an answer otherwise than what it lets "
                f"answers follow: {shown[-60:]!r} after {before[-60:]!r}",
                hint="use a template whose generation prompt begins each of its answers",
            )
        found.append((_plain_ids(tokenizer, shown[len(before) :]), True))
    return found


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts, or of two lists of tokens."""
    apart = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(apart, min(len(one), len(other)))


def _around_answer(tokenizer: Any) -> tuple[str, str]:
    """Return what a chat template puts between a generation prompt and its answer, and after it."""
    asked = ("user", "a")
    before = _rendered(tokenizer, [asked], question=True)
    whole = _rendered(tokenizer, [asked, ("assistant", ANSWER)], question=False)
    start, _, end = whole.partition(ANSWER)
    return start.removeprefix(before) if start.startswith(before) else "", end


def _rendered(tokenizer: Any, messages: Sequence[tuple[str, str]], *, question: bool) -> str:
    turns = [{"role": role, "content": content} for role, content in messages]
    try:
        return _renderer(tokenizer)(json.dumps([turns, question]))
    except (RaisedError, ValueError, TypeError) as error:
        raise PipelineError(
            "the tokenizer's chat template takes no turns of "
            f"{', '.join(role for role, _ in messages)}: {error}",
            hint="give it turns that it takes, or another template next to the base's tokenizer",
        ) from error


def _renderer(tokenizer: Any) -> Confined:
    """Return a function that renders turns, with or without what an answer begins with."""
    template = tokenizer.get_chat_template()
    if "strftime_now" in template:
        template = CLOCK + template
    key = (template, str(tokenizer.special_tokens_map))
    if key not in _RENDERER:

        def render(given: str) -> str:
            turns, question = json.loads(given)
            rendered: str = tokenizer.apply_chat_template(
                turns, chat_template=template, tokenize=False, add_generation_prompt=question
            )
            return rendered

        for other in _RENDERER.values():
            other.close()
        _RENDERER.clear()
        _RENDERER[key] = Confined(render, "chat template")
    return _RENDERER[key]


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    return _ids(tokenizer, text, add_special_tokens=False)


def _cut(tokenizer: Any, text: str, max_length: int) -> list[int]:
    return _ids(tokenizer, text, truncation=True, max_length=max_length)


def _ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    with loading(f"the tokenizer {tokenizer.name_or_path}"):
        ids: list[int] = tokenizer(text, **options).input_ids
    return ids
