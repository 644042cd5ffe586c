"""Text formats: questions and answers in rows of Alpaca, of a chat, or of named columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from zerotrain.artifact.documents import LeftOut, Names
from zerotrain.config.data import ALPACA, COLUMN
from zerotrain.data.alpaca import alpaca_text
from zerotrain.data.chat_rows import COLUMNS as CHAT_COLUMNS
from zerotrain.data.chat_rows import BadRowError, is_blank, read_chat
from zerotrain.data.conversation import PROMPT, Message
from zerotrain.data.table import IRRELEVANT, is_absent
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.config.data import DataConfig

Row = Mapping[Any, Any]
Reader = Callable[[Row, LeftOut], list[Message]]
"""Reads a row, and counts its keys that are not used."""
ALPACA_COLUMNS = ("instruction", "input", "output", "system", "history")
EXAMPLES = {
    "alpaca": '{"instruction": "Add.", "input": "1 and 2", "output": "3"}',
    "chat": '{"messages": [{"role": "user", "content": "1+2?"}, '
    '{"role": "assistant", "content": "3"}]}',
    "columns": '{"text": "late again", "label": "complaint"}',
}
EXAMPLES["auto"] = EXAMPLES["alpaca"]


def choose_format(
    data: DataConfig, where: str, first: Row, label_names: Sequence[str] | Mapping[str, str] | None
) -> Reader:
    """Choose the reader of a source's rows: from data.format, or from its first row.

    Raises:
        PipelineError: the first row lacks the columns.
    """
    name = data.format
    if data.response_column:
        name = "columns"
    elif name == "auto":
        name = "chat" if any(column in first for column in CHAT_COLUMNS) else "alpaca"
    read: Reader
    if name == "columns":
        template = data.prompt_template or f"{{{data.prompt_column}}}"
        columns = [*filter(None, COLUMN.findall(template)), data.response_column]
        read = partial(_columns, template, str(data.response_column), label_names)
    elif name == "chat":
        columns = [next((c for c in CHAT_COLUMNS if c in first), "messages")]
        read = read_chat
    else:
        columns = ["instruction", "output"]
        read = _alpaca_prompt if data.prompt_template == ALPACA else _alpaca
    if missing := [column for column in columns if column not in first]:
        has = ", ".join(str(column) for column in first if column is not None)
        raise PipelineError(
            f"data: {where}: no column {missing[0]!r}, which the format {name} needs; it has {has}",
            hint=f"set data.format, or data.prompt_column and data.response_column; a row of the "
            f"format {name} looks like {EXAMPLES[name]}",
        )
    return read


def _alpaca(row: Row, left_out: LeftOut) -> list[Message]:
    """Parse "Stanford Alpaca" (Taori et al. 2023): instruction, optional input, output.

    `system` and `history` (pairs of earlier questions and answers) are LLaMA-Factory's extensions.
    """
    _account(row, left_out, *ALPACA_COLUMNS)
    messages = [] if is_blank(row.get("system")) else [Message("system", _text(row, "system"))]
    history = [] if is_blank(row.get("history")) else row["history"]
    if not isinstance(history, list):
        raise BadRowError(f"history is {type(history).__name__}, not a list")
    for number, turn in enumerate(history, 1):
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadRowError(f"history {number} is no pair of a question and an answer")
        asked, answered = f"question {number} of history", f"answer {number} of history"
        pair = {asked: turn[0], answered: turn[1]}
        messages.append(Message("user", _text(pair, asked)))
        messages.append(Message("assistant", _text(pair, answered)))
    asked = _text(row, "instruction")
    if not is_blank(row.get("input")):
        asked = f"{asked}\n{_text(row, 'input')}"
    return [*messages, Message("user", asked), Message("assistant", _text(row, "output"))]


def alpaca_prompt(instruction: str, given: str = "") -> Message:
    """Format the question like Stanford Alpaca's script."""
    return Message(PROMPT, alpaca_text(instruction, given))


def question_of(data: DataConfig, text: str) -> Message:
    """Format a question from outside the rows like a question in the rows."""
    return alpaca_prompt(text) if data.prompt_template == ALPACA else Message("user", text)


def _alpaca_prompt(row: Row, left_out: LeftOut) -> list[Message]:
    """Format a row with Stanford Alpaca's prompt text, keeping outer spaces of its values."""
    if extra := next((name for name in ("system", "history") if not is_blank(row.get(name))), None):
        raise BadRowError(f"{extra} has no place in prompt_template: {ALPACA}")
    _account(row, left_out, *ALPACA_COLUMNS)
    asked, answered = (_text(row, column, strip=False) for column in ("instruction", "output"))
    given = "" if is_blank(row.get("input")) else _text(row, "input", strip=False)
    return [alpaca_prompt(asked, given), Message("assistant", answered)]


def _columns(
    template: str,
    response: str,
    label_names: Sequence[str] | Mapping[str, str] | None,
    row: Row,
    left_out: LeftOut,
) -> list[Message]:
    """Fill the template."""
    _account(row, left_out, *filter(None, COLUMN.findall(template)), response)

    def value(match: re.Match[str]) -> str:
        return _text(row, match[1]) if match[1] else match[0][0]

    asked = COLUMN.sub(value, template)
    return [Message("user", asked), Message("assistant", _label(row, response, label_names))]


def _label(row: Row, column: str, names: Sequence[str] | Mapping[str, str] | None) -> str:
    """Format a response as text: a label's name if there are names; 1.0, as pandas writes, is 1."""
    if names is None:
        return _text(row, column)
    found = row.get(column)
    if is_absent(found):
        raise BadRowError(f"no {column}")
    known = names if isinstance(names, Mapping) else {str(i): n for i, n in enumerate(names)}
    for key in (str(found), str(found).removesuffix(".0")):
        if key in known:
            return known[key]
    raise BadRowError(
        f"{column} is {found!r}, a label without a name ({', '.join(known)} have one)"
    )


def _account(row: Row, left_out: LeftOut, *used: str) -> None:
    """Count the columns of a row that are not used."""
    names = Names(name for name in row if not is_blank(row[name]))
    names.use(*used)
    names.ignore(IRRELEVANT)
    left_out.add("row", names.leftovers())


def _text(row: Row, column: str, *, strip: bool = True) -> str:
    found = row.get(column)
    if is_absent(found):
        raise BadRowError(f"no {column}")
    if isinstance(found, int | float) and not isinstance(found, bool):
        found = str(found)
    if not isinstance(found, str):
        raise BadRowError(f"{column} is {type(found).__name__}, not text")
    if not found.strip():
        raise BadRowError(f"empty {column}")
    return found.strip() if strip else found
