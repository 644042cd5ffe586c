"""Tokenisation of conversations: what a language model reads, and which tokens it learns.

A tokenizer with a chat template renders the turns with it. Without one, each question is followed
by a line break, and each answer by the token that ends a text. A question of the role PROMPT is
kept as it is, with neither template nor line break. A causal model learns every answer, and never a
question. A seq2seq model reads all turns before the last answer, one per line, and learns that
answer; chat templates are for causal models.

Tools, calls of tools and their results have no form of their own: only a chat template that shows
them renders such a conversation. Answers that are not to be learned are read like questions.

Questions and answers are tokenised separately, so that a question has the same tokens in training
as when its answer is generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from zerotrain.artifact.documents import check_object, parse_json
from zerotrain.data.conversation import PROMPT, TOOLS, Message, turns_of
from zerotrain.errors import PipelineError
from zerotrain.models.families import Tokens
from zerotrain.models.families.tokenizer_process import call
from zerotrain.models.pretrained import loading

Turn = Sequence[str | bool]
"""The values of a Message, of which JSON makes a list."""
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
REASONING = "reasoning_content"
READS_REASONING = re.compile(r"reasoning_content|\.thinking\b|['\"]thinking['\"]")
"""How chat templates name it: transformers gives it under its older name as well."""
WITH_TOOLS = (
    "set base to a model whose tokenizer has a chat template for tools, or remove the "
    "conversations with tools"
)


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


def takes_reasoning(tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template takes what an answer's model thought first."""
    return bool(READS_REASONING.search(str(tokenizer.chat_template or "")))


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


def _causal_tokens(tokenizer: Any, turns: Sequence[Turn], max_length: int) -> Any:
    messages = _messages(turns)
    input_ids, labels = [], []
    segments = _segments(tokenizer, messages)
    for ids, learned in segments:
        input_ids += ids
        labels += ids if learned else [IGNORED] * len(ids)
    if all(label == IGNORED for label in labels[:max_length]):
        return None
    answers = sum(one.role == "assistant" and one.learned for one in messages)
    left_out = answers - sum(learned for _, learned in segments)
    return input_ids[:max_length], labels[:max_length], left_out


def _causal_prompt(tokenizer: Any, turns: Sequence[Turn]) -> list[int]:
    segments = _segments(tokenizer, _messages(turns))
    return [token for ids, _ in segments for token in ids]


def _seq2seq_tokens(tokenizer: Any, turns: Sequence[Turn], max_length: int) -> Any:
    answer = _messages(turns)[-1]
    if not answer.learned:
        raise PipelineError(
            "its last answer has weight: 0 or train: false, and a seq2seq model learns no other",
            hint="end the conversation with an answer that is learned",
        )
    if "tool_calls" in _keys(answer):
        raise _no_template("a seq2seq model reads without one")
    source = _seq2seq_prompt(tokenizer, turns[:-1], max_length)
    return source, _cut(tokenizer, answer.content, max_length)


def _seq2seq_prompt(tokenizer: Any, turns: Sequence[Turn], max_length: int) -> list[int]:
    messages = _messages(turns)
    if _shown_by_templates(messages):
        raise _no_template("a seq2seq model reads without one")
    return _cut(tokenizer, "\n".join(message.content for message in messages), max_length)


def _messages(turns: Sequence[Turn]) -> list[Message]:
    return [Message(*turn) for turn in turns]  # type: ignore[arg-type]


def _keys(message: Message) -> dict[str, Any]:
    """Return what a chat template gets of a turn besides its role and content."""
    where = f"the {message.role}'s turn"
    return check_object(parse_json(message.keys, where), where) if message.keys else {}


def _no_template(why: str) -> PipelineError:
    return PipelineError(
        "a conversation with tools needs a tokenizer with a chat template, which renders tools, "
        f"calls and results; {why}",
        hint=WITH_TOOLS,
    )


def _shown_by_templates(messages: Sequence[Message]) -> list[str]:
    """List what a conversation has that only a chat template can show."""
    return [
        *(["tools"] if any(one.role == TOOLS for one in messages) else ()),
        *(["tool_calls"] if any("tool_calls" in _keys(one) for one in messages) else ()),
        *(["turns of the tool"] if any(one.role == "tool" for one in messages) else ()),
    ]


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


def _segments(tokenizer: Any, messages: Sequence[Message]) -> list[tuple[list[int], bool]]:
    """Return the tokens of each segment of a conversation, and whether it is learned."""
    as_is = any(message.role == PROMPT for message in messages)
    if tokenizer.chat_template and not as_is:
        _check_shown(tokenizer, messages)
        return _chat_segments(tokenizer, messages)
    if _shown_by_templates(messages):
        raise _no_template("this tokenizer has none")
    found: list[tuple[list[int], bool]] = []
    after = "" if as_is else "\n"
    for role, content, _, learned in messages:
        if role == "assistant":
            ids = _plain_ids(tokenizer, content)
            found.append(([*ids, tokenizer.eos_token_id], learned))
        elif found:
            found.append((_plain_ids(tokenizer, content + after), False))
        else:  # with the token that begins a text, if the tokenizer has one
            ids = _ids(tokenizer, content + after)
            found.append((ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids, False))
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
            (answer, learned), question = found.pop(), _plain_ids(tokenizer, before[len(asked) :])
            kept = _common(answer, question)
            found.append((answer[:kept], learned))
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
                hint="use a template whose generation prompt begins each of its answers"
                + f", or remove {REASONING} from the turns"
                * any(REASONING in _keys(message) for message in messages),
            )
        answer = _plain_ids(tokenizer, shown[len(before) :])
        found.append((answer, messages[place].learned))
    return found


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts, or of two lists of tokens."""
    apart = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(apart, min(len(one), len(other)))


def _around_answer(tokenizer: Any) -> tuple[str, str]:
    """Return what a chat template puts between a generation prompt and its answer, and after it."""
    asked = Message("user", "a")
    before = _rendered(tokenizer, [asked], question=True)
    whole = _rendered(tokenizer, [asked, Message("assistant", ANSWER)], question=False)
    start, _, end = whole.partition(ANSWER)
    return start.removeprefix(before) if start.startswith(before) else "", end


def _check_shown(tokenizer: Any, messages: Sequence[Message]) -> None:
    """Check that the chat template shows what a conversation has of tools.

    Templates pass over keys and roles that they do not know.

    Raises:
        PipelineError: something makes no difference to what it renders.
    """
    shown = _shown_by_templates(messages)
    whole = _rendered(tokenizer, messages, question=False) if shown else ""
    for what in shown:
        changed = [one for message in messages for one in _without(what, message)]
        try:
            if _rendered(tokenizer, changed, question=False) != whole:
                continue
        except PipelineError:  # it refuses turns without them, so that it reads them
            continue
        raise PipelineError(
            f"the tokenizer's chat template shows no {what}, which the conversation has",
            hint=WITH_TOOLS,
        )


def _without(what: str, message: Message) -> list[Message]:
    """Return a turn without what only a chat template can show, or with a changed result."""
    if what == "tools":
        return [] if message.role == TOOLS else [message]
    if what == "tool_calls":
        keys = {name: value for name, value in _keys(message).items() if name != what}
        return [message._replace(keys=json.dumps(keys) if keys else "")]
    changed = message.content + ANSWER * (message.role == "tool")
    return [message._replace(content=changed)]


def _rendered(tokenizer: Any, messages: Sequence[Message], *, question: bool) -> str:
    """Render turns, with or without what an answer begins with.

    Raises:
        PipelineError: the template takes no such turns, or makes too much of them.
    """
    offered = next((one.content for one in messages if one.role == TOOLS), None)
    given = {} if offered is None else {"tools": parse_json(offered, "the tools")}
    shown = turns_of(messages)
    try:
        template = tokenizer.get_chat_template(**given)
        options: dict[str, Any] = {
            "chat_template": CLOCK + template if "strftime_now" in template else template,
            "tokenize": False,
            "add_generation_prompt": question,
            **given,
        }
        turns = [_template_turn(template, message) for message in shown]
        rendered: str
        try:
            rendered = tokenizer.apply_chat_template(turns, **options)
        except TypeError:  # some templates join the arguments of a call to text
            if not any("tool_calls" in turn for turn in turns):
                raise
            turns = [_with_text_arguments(turn) for turn in turns]
            rendered = tokenizer.apply_chat_template(turns, **options)
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything
        raise PipelineError(
            "the tokenizer's chat template takes no turns of "
            f"{', '.join(message.role for message in shown)}: {error or type(error).__name__}",
            hint="give it turns that it takes, or another template next to the base's tokenizer",
        ) from error
    letters = sum(len(message.content) + len(message.keys) for message in messages)
    if len(rendered) > MOST_LETTERS + LETTERS_PER_LETTER * letters:
        raise PipelineError(
            f"the tokenizer's chat template makes {len(rendered):,} letters of {letters:,}",
            hint="it is damaged or made to harm; take the one that the model was published with",
        )
    return rendered


def _template_turn(template: str, message: Message) -> dict[str, Any]:
    """Return a turn as a chat template gets it."""
    role = message.role
    if role == "developer" and role not in template:
        role = "system"  # the earlier name of the same role
    return {"role": role, "content": message.content, **_keys(message)}


def _with_text_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn whose calls have their arguments as JSON in a text."""
    calls = []
    for asked in turn.get("tool_calls", ()):
        text = json.dumps(asked["function"]["arguments"], ensure_ascii=False)
        calls.append({**asked, "function": {**asked["function"], "arguments": text}})
    return {**turn, "tool_calls": calls} if calls else turn


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    return _ids(tokenizer, text, add_special_tokens=False)


def _cut(tokenizer: Any, text: str, max_length: int) -> list[int]:
    return _ids(tokenizer, text, truncation=True, max_length=max_length)


def _ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    with loading(f"the tokenizer {tokenizer.name_or_path}"):
        ids: list[int] = tokenizer(text, **options).input_ids
    return ids
