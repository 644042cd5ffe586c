"""Text for training: conversations from a file, a Hugging Face dataset, or a built-in task.

Rows are those of Alpaca, of a chat, or of named columns. The tasks are sums of two numbers and the
classification of complaints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact.documents import LeftOut, Names
from zerotrain.config.data import ALPACA, COLUMN
from zerotrain.data.chat_rows import COLUMNS as CHAT_COLUMNS
from zerotrain.data.chat_rows import BadRowError, is_blank, read_chat
from zerotrain.data.conversation import PROMPT, Conversation, Message, conversation
from zerotrain.data.source import Found
from zerotrain.data.table import (
    IRRELEVANT,
    csv_rows,
    is_absent,
    json_rows,
    jsonl_rows,
    printable,
    surplus_cells,
)
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.config.data import DataConfig

Rows = Iterator[tuple[str, dict[Any, Any]]]
"""The place of each row, and its values by column."""
FILES = (".json", ".jsonl", ".csv")
OTHER_FILES = (".arrow", ".gz", ".parquet", ".tsv", ".txt", ".xlsx", ".zip", ".zst")
"""Extensions that are not part of a hub id, even if the file is missing."""


def read_conversations_of(
    data: DataConfig, left_out: LeftOut | None = None
) -> list[Conversation | Found]:
    """Return every example of the source in order; a Found has the reason why a row is not one.

    Args:
        data: The `data` section of a run's configuration.
        left_out: Counts the keys of usable rows and of their turns that are not used.

    Raises:
        PipelineError: the source is unusable as a whole.
    """
    if data.source != "text":
        made = {"sums": sums, "complaints": complaints}[data.source]()
        return [
            conversation(f"{data.source} {number}", messages, data.holdout)
            for number, messages in enumerate(made, 1)
        ]
    rows, label_names = _rows(data)
    found: list[Conversation | Found] = []
    read = None
    for where, row in rows:
        read = read or choose_format(data, where, row, label_names)
        try:
            if wrong := surplus_cells(row):
                raise BadRowError(wrong)
            unused = LeftOut()
            messages = read(row, unused)
            texts = [text for message in messages for text in (message.content, message.keys)]
            if any(printable(text) != text for text in texts):
                raise BadRowError("it is not valid Unicode")
            found.append(conversation(where, messages, data.holdout))
            if left_out is not None:
                left_out.update(unused)
        except BadRowError as error:
            found.append(Found(where, reason=str(error)))
    if not found:
        raise PipelineError(f"data.path: {data.path}: holds no rows", hint="name another file")
    return found


def text_files(data: DataConfig) -> list[str]:
    """List the files that the dataset depends on; empty for built-in tasks and the hub's datasets.

    Raises:
        PipelineError: the file is missing, or its format is not supported.
    """
    if data.source != "text":
        return []
    path = _path(data)
    if path.is_dir():
        return sorted(str(file) for file in path.rglob("*") if file.is_file())
    return [str(path)] if _is_table(path, data) else []


def is_table_name(path: str) -> bool:
    """Return whether a path that does not exist names a missing file, rather than a hub id."""
    return Path(path).suffix.lower() in (*FILES, *OTHER_FILES)


def hub_id(data: DataConfig) -> str | None:
    """Return the id of a dataset of text or images from the hub; None for all others.

    Raises:
        PipelineError: it is a file that is missing, or has an unsupported format.
    """
    path = _path(data)
    if data.is_on_hub:
        return data.path
    if data.source != "text" or path.is_dir() or _is_table(path, data):
        return None
    return data.path


def _rows(data: DataConfig) -> tuple[Rows, list[str] | dict[str, str] | None]:
    """Read the rows of the source, and the names of its labels."""
    path = _path(data)
    if path.is_dir() or not _is_table(path, data):
        from zerotrain.data.hub_datasets import hub_rows

        return hub_rows(data)
    suffix = path.suffix.lower()
    for key in ("subset", "hub_split", "revision"):
        if key in data.model_fields_set:
            raise PipelineError(
                f"data.{key}: {path} is one file, without subsets and splits",
                hint=f"remove data.{key}; data.holdout keeps samples from training",
            )
    example = EXAMPLES["columns" if data.response_column else data.format]
    if suffix == ".csv":
        rows: Iterator[tuple[int, dict[Any, Any]]] = csv_rows(path)
    else:
        rows = (json_rows if suffix == ".json" else jsonl_rows)(path, example)
    kind = "item" if suffix == ".json" else "line"
    return ((f"{path.name} {kind} {number}", row) for number, row in rows), data.label_names


def _path(data: DataConfig) -> Path:
    return Path(data.path or "").expanduser()


def _is_table(path: Path, data: DataConfig) -> bool:
    """Return whether a path that is not a folder is a table, rather than a hub id."""
    if path.suffix.lower() in FILES:
        if not path.is_file():
            raise PipelineError(
                f"data.path: {data.path}: no such file",
                hint="correct data.path; relative paths count from where snakemake runs",
            )
        return True
    if path.is_file() or path.suffix.lower() in OTHER_FILES:
        raise PipelineError(
            f"data.path: {data.path}: the extension is {path.suffix or 'none'}, which is not read",
            hint="give a .json, .jsonl or .csv file, the folder that save_to_disk of the package "
            "datasets wrote, or a dataset's id on the hub",
        )
    return False


NUMBERS = range(10, 100)
WHO = ("my sister", "our neighbour", "the office", "a friend of mine", "my uncle", "the school")
WHAT = ("the parcel", "the phone", "the printer", "the bus", "the soup", "the bill", "the jacket")
GOOD = ("on time", "as promised", "better than expected", "easy to use", "worth the money")
BAD = ("late again", "broken", "far too expensive", "cold and stale", "missing a part")
NEGATED = ("was", "was not", "is never", "was certainly")
NEGATIONS = ("was not", "is never")
TEMPLATE = "Message: {text} Label:"
LABELS = ("no complaint", "complaint")


def sums() -> Iterator[list[Message]]:
    """Yield sums of two two-digit numbers, for causal models.

    Each pair is asked once, in one order: if 12+30 were held out and 30+12 trained on, a model
    could answer without having learned to add. In every second pair the larger number comes first.
    """
    for number, (a, b) in enumerate(combinations_with_replacement(NUMBERS, 2)):
        asked = f"{b}+{a}=" if number % 2 else f"{a}+{b}="
        yield [Message("user", asked), Message("assistant", str(a + b))]


def complaints() -> Iterator[list[Message]]:
    """Yield sentences labelled as complaints or not, for seq2seq models.

    No single word decides: "was broken" is a complaint, "was not broken" is not, and "was not on
    time" is. Held-out sentences are combinations that training has not seen.
    """
    for who, what, verb, quality in product(WHO, WHAT, NEGATED, (*GOOD, *BAD)):
        bad = (quality in BAD) != (verb in NEGATIONS)
        text = f"{who} says that {what} {verb} {quality}."
        asked = TEMPLATE.format(text=text)
        yield [Message("user", asked), Message("assistant", LABELS[bad])]


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


REQUEST = "Write a response that appropriately completes the request."
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    f"context. {REQUEST}\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
WITHOUT_INPUT = (
    f"Below is an instruction that describes a task. {REQUEST}\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


def alpaca_text(instruction: str, given: str = "") -> str:
    """Return the prompt for an instruction, with its input if given; the answer follows at once.

    Taori et al., "Stanford Alpaca" (2023), https://github.com/tatsu-lab/stanford_alpaca: the text
    that its script wraps around a question, as do those of openMind and many others.
    """
    text = WITH_INPUT if given else WITHOUT_INPUT
    return text.format(instruction=instruction, input=given)
