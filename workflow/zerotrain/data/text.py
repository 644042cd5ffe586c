"""Text for training: conversations from a file, a Hugging Face dataset, or a built-in task:
sums of two numbers, or the classification of complaints.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact.documents import LeftOut
from zerotrain.data.chat_rows import BadRowError
from zerotrain.data.conversation import Conversation, Message, conversation
from zerotrain.data.source import Found
from zerotrain.data.table import csv_rows, json_rows, jsonl_rows, printable, surplus_cells
from zerotrain.data.text_format import EXAMPLES, choose_format
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
