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

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from zerotrain.data.conversation import PROMPT
from zerotrain.errors import PipelineError
from zerotrain.models.families import Tokens
from zerotrain.models.families.tokenizer_process import call
from zerotrain.models.pretrained import loading

if TYPE_CHECKING:
    from zerotrain.data.conversation import Message

Turn = tuple[str, str]
"""Role and content."""
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
MOST_LETTERS, LETTERS_PER_LETTER = 200_000, 100
"""Most letters that a template makes of a conversation, besides so many for each of its own."""


def causal_tokens(tokenizer: Any, messages: Sequence[Message], max_length: int) -> Tokens | None:
    """Tokenise a conversation for a causal model, cut at the end; None if no answer is left."""
    found = call(tokenizer, _causal_tokens, messages, max_length)
    return None if found is None else Tokens(*found)


def causal_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the tokens that precede the answer to the last question."""
    return [*call(tokenizer, _causal_prompt, messages)]


def seq2seq_tokens(tokenizer: Any, messages: Sequence[Message], max_length: int) -> Tokens:
    """Tokenise a conversation for a seq2seq model; source and answer are each cut."""
    return Tokens(*call(tokenizer, _seq2seq_tokens, messages, max_length))


def seq2seq_prompt(tokenizer: Any, messages: Sequence[Message], max_length: int) -> list[int]:
    """Return the tokens that a seq2seq model reads to answer the last question."""
    return [*call(tokenizer, _seq2seq_prompt, messages, max_length)]


def end_tokens(tokenizer: Any) -> set[int]:
    """Return the tokens that may end an answer: the tokenizer's and its chat template's."""
    return {*call(tokenizer, _end_tokens)}


def answer_start(tokenizer: Any) -> str:
    """Return the text that a chat template starts an answer with, such as an empty thought.

    Generated text starts with it, too.
    """
    return str(call(tokenizer, _answer_start))


def decode(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each row of tokens, without special ones."""
    return [*call(tokenizer, _decode, [list(row) for row in rows])]


def _causal_tokens(tokenizer: Any, messages: Sequence[Turn], max_length: int) -> Any:
    input_ids, labels = [], []
    segments = _segments(tokenizer, messages)
    for ids, learned in segments:
        input_ids += ids
        labels += ids if learned else [IGNORED] * len(ids)
    if all(label == IGNORED for label in labels[:max_length]):
        return None
    answers = sum(role == "assistant" for role, _ in messages)
    left_out = answers - sum(learned for _, learned in segments)
    return input_ids[:max_length], labels[:max_length], left_out


def _causal_prompt(tokenizer: Any, messages: Sequence[Turn]) -> list[int]:
    return [token for ids, _ in _segments(tokenizer, messages) for token in ids]


def _seq2seq_tokens(tokenizer: Any, messages: Sequence[Turn], max_length: int) -> Any:
    source = _seq2seq_prompt(tokenizer, messages[:-1], max_length)
    return source, _cut(tokenizer, messages[-1][1], max_length)


def _seq2seq_prompt(tokenizer: Any, messages: Sequence[Turn], max_length: int) -> list[int]:
    return _cut(tokenizer, "\n".join(content for _, content in messages), max_length)


def _end_tokens(tokenizer: Any) -> list[int]:
    found = [int(tokenizer.eos_token_id)]
    if tokenizer.chat_template:
        added = tokenizer.added_tokens_decoder
        after = _plain_ids(tokenizer, _around_answer(tokenizer)[1])
        found += [token for token in after if token in added and added[token].special][:1]
    return found


def _answer_start(tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        return ""
    ids = _plain_ids(tokenizer, _around_answer(tokenizer)[0])
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text.strip()


def _decode(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    found: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return found


def _segments(tokenizer: Any, messages: Sequence[Turn]) -> list[tuple[list[int], bool]]:
    """Return the tokens of each segment of a conversation, and whether it is learned."""
    as_is = any(role == PROMPT for role, _ in messages)
    if tokenizer.chat_template and not as_is:
        return _chat_segments(tokenizer, messages)
    found: list[tuple[list[int], bool]] = []
    after = "" if as_is else "\n"
    for role, content in messages:
        if role == "assistant":
            ids = _plain_ids(tokenizer, content)
            found.append(([*ids, tokenizer.eos_token_id], True))
        elif found:
            found.append((_plain_ids(tokenizer, content + after), False))
        else:  # with the token that begins a text, if the tokenizer has one
            ids = _ids(tokenizer, content + after)
            found.append((ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids, False))
    return found


def _chat_segments(tokenizer: Any, messages: Sequence[Turn]) -> list[tuple[list[int], bool]]:
    """Render a conversation with its chat template, split before and after each answer.

    Text that follows only the last answer is not learned after earlier ones. Templates of reasoning
    models render earlier answers differently: learning then starts at the first answer that is
    rendered as it was generated.
    """
    found: list[tuple[list[int], bool]] = []
    before = shown = ""
    places = [n for n, (role, _) in enumerate(messages) if role == "assistant"]
    if messages[-1][0] != "assistant":
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


def _rendered(tokenizer: Any, messages: Sequence[Turn], *, question: bool) -> str:
    """Render turns, with or without what an answer begins with.

    Raises:
        PipelineError: the template takes no such turns, or makes too much of them.
    """
    turns = [{"role": role, "content": content} for role, content in messages]
    try:
        template = tokenizer.get_chat_template()
        rendered: str = tokenizer.apply_chat_template(
            turns,
            chat_template=CLOCK + template if "strftime_now" in template else template,
            tokenize=False,
            add_generation_prompt=question,
        )
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything
        raise PipelineError(
            "the tokenizer's chat template takes no turns of "
            f"{', '.join(role for role, _ in messages)}: {error or type(error).__name__}",
            hint="give it turns that it takes, or another template next to the base's tokenizer",
        ) from error
    given = sum(len(content) for _, content in messages)
    if len(rendered) > MOST_LETTERS + LETTERS_PER_LETTER * given:
        raise PipelineError(
            f"the tokenizer's chat template makes {len(rendered):,} letters of {given:,}",
            hint="it is damaged or made to harm; take the one that the model was published with",
        )
    return rendered


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    return _ids(tokenizer, text, add_special_tokens=False)


def _cut(tokenizer: Any, text: str, max_length: int) -> list[int]:
    return _ids(tokenizer, text, truncation=True, max_length=max_length)


def _ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    with loading(f"the tokenizer {tokenizer.name_or_path}"):
        ids: list[int] = tokenizer(text, **options).input_ids
    return ids
