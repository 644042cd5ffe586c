"""Import of other programs' configurations that are dropped on the page or pasted into it.

The readers are those of `zerotrain launch import`. What is dropped is written to a folder of its
own, and of what it names only files of that folder are opened.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from zerotrain.artifact.documents.names import find_name_error
from zerotrain.builder.pages import page
from zerotrain.builder.writing import check_name, read_values, save_template
from zerotrain.config.families import LANGUAGE_MODELS
from zerotrain.config.scalar import scalar
from zerotrain.config.text import ConfigText
from zerotrain.errors import PipelineError, show_controls
from zerotrain.importers.command import LAUNCHERS
from zerotrain.importers.command_line import import_command
from zerotrain.importers.files import reading_only
from zerotrain.importers.imported_config import (
    NEEDED,
    ImportedConfig,
    ImportProblemsError,
    Note,
    config_text,
)
from zerotrain.importers.reading import ImportOptions, import_file
from zerotrain.machine.detect import choose_precision
from zerotrain.machine.regular_file import write_text

MOST_FILES, MOST_BYTES, LONGEST_COMMAND = 20, 256 * 1024, 32 * 1024
"""Limits of one import: files, and the bytes of each, of a pasted text and of a command line."""
SCRIPTS = (".sh", ".bash", ".txt")
"""Ends of files that hold command lines."""
FORMS = (".json", ".yaml", ".yml", ".toml")
STARTS = re.compile(
    r"(?:^|[\s;&])(?:" + "|".join(sorted({n[0] for n in LAUNCHERS})) + r"|simpletuner)\s"
)
"""A launcher, where a word can begin."""
HEADINGS = {
    "kept": "Taken over",
    "changed": "Taken over with another value",
    "differs": "Its effect differs, not its value",
    "resolved": "Was auto; this is the value that the program would have used",
    "default": "Was not there; this is the program's default",
    "left out": "Dropped: not supported, and the training is the same without it",
    "no-op": "Ignored: without effect here",
    "skipped by you": "Left out by you",
}
"""By outcome, in the order in which they are shown."""


@dataclass(frozen=True)
class Row:
    """What became of one key."""

    key: str
    given: str
    ours: str
    value: str
    reason: str


@dataclass(frozen=True)
class Imported:
    """A configuration, or a part of one, and what became of each key of its source."""

    source: str
    text: str
    """Our YAML, with a comment on each value that does not come from the source."""
    rows: Mapping[str, list[Row]]
    """By outcome, in the order of HEADINGS; without those that did not happen."""
    missing: tuple[str, ...]
    """Our keys that the source does not have and that a run needs."""
    name: str
    """A name for it: of its run, if the source has one."""
    before: Imported | None = None
    """The run whose weights this one begins with, for a script of two trainings."""


class ImportRefusedError(PipelineError):
    """Everything that stops an import, each with its hint."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        what = "\n".join(f"{what} ({hint})" for what, hint in problems)
        super().__init__(what, hint="correct them, or leave keys out")
        self.problems = problems


def import_drop(files: Mapping[str, bytes], pasted: str, options: ImportOptions) -> Imported:
    """Import dropped files, a pasted text, or a pasted command line with the files that it names.

    Args:
        files: Contents by name, without folders.
        pasted: A command line, YAML, JSON or TOML; empty if there are only files.
        options: What the user says in addition.

    Returns:
        The configuration, and what became of each key.

    Raises:
        ImportRefusedError: the readers refuse keys or values; all of them are listed.
        PipelineError: too many or too large files, a name with a folder, or no configuration.
    """
    texts = {name: _decode(name, content) for name, content in files.items()}
    pasted = pasted.encode(errors="replace").decode()
    _check_limits(texts, pasted)
    command = pasted if pasted.strip() and _is_command(pasted) else ""
    if pasted.strip() and not command:
        texts[f"pasted{_form_of(pasted)}"] = pasted
    scripts = [name for name in texts if Path(name).suffix.casefold() in SCRIPTS]
    if not command and len(scripts) == 1:
        command = texts.pop(scripts[0])
    main = "" if command else _main_file(texts)
    if len(command) > LONGEST_COMMAND:
        raise PipelineError(
            f"a command line of more than {LONGEST_COMMAND // 1024} KiB",
            hint="paste the command that trains, without the rest of the script",
        )
    with tempfile.TemporaryDirectory(prefix="zerotrain-import-") as made:
        folder = Path(made).resolve()
        for name, text in texts.items():
            write_text(folder / name, text)
        try:
            with reading_only(folder):
                if command:
                    found = import_command(command, options)
                else:
                    found = import_file(folder / main, options)
            return _as_imported(found, folder)
        except ImportProblemsError as error:
            raise _refused(error.problems, folder) from error
        except PipelineError as error:
            raise _refused([error], folder) from error
        except RecursionError as error:
            raise PipelineError(
                "the values are nested too deep to be read",
                hint="no configuration is like that; do not use this file",
            ) from error


def _main_file(texts: Mapping[str, str]) -> str:
    """Return the file that names the others.

    Raises:
        PipelineError: several files could be it.
    """
    named = {
        name
        for name in texts
        if any(name in text for other, text in texts.items() if other != name)
    }
    rest = sorted(set(texts) - named)
    if len(rest) == 1:
        return rest[0]
    raise PipelineError(
        f"several configurations: {', '.join(rest or sorted(texts))}",
        hint="import one at a time, together with the files that it names",
    )


def _check_limits(texts: Mapping[str, str], pasted: str) -> None:
    if not texts and not pasted.strip():
        raise PipelineError(
            "nothing was dropped or pasted",
            hint="drop a configuration file, or paste a command line or a file's text",
        )
    if len(texts) > MOST_FILES:
        raise PipelineError(
            f"{len(texts)} files, more than {MOST_FILES}",
            hint="drop the configuration and the files that it names",
        )
    if len(pasted.encode()) > MOST_BYTES:
        raise PipelineError(
            f"the pasted text has more than {MOST_BYTES // 1024} KiB",
            hint="paste the command line or the configuration alone",
        )


def _decode(name: str, content: bytes) -> str:
    """Check a file's name, size and encoding, and return its text."""
    reason = find_name_error(name)
    if "/" in name or len(name.encode(errors="replace")) > 200:
        reason = "is not the name of a file"
    if reason:
        what = f"the name {name!a} {reason}"
        raise PipelineError(what, hint="rename the file, and drop it again")
    if Path(name).suffix.casefold() not in (*FORMS, *SCRIPTS):
        raise PipelineError(
            f"{name}: none of {', '.join((*FORMS, *SCRIPTS))}",
            hint="drop accelerate's YAML, a DeepSpeed JSON, the configuration of SimpleTuner or "
            "kohya, or a script with the command line",
        )
    if len(content) > MOST_BYTES:
        raise PipelineError(
            f"{name}: {len(content):,} bytes, more than {MOST_BYTES // 1024} KiB",
            hint="drop a configuration; data and weights are named in the form",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PipelineError(
            f"{name}: byte {error.start + 1} is not UTF-8", hint="save the file as UTF-8"
        ) from error


def _is_command(text: str) -> bool:
    return not text.lstrip().startswith(("{", "[")) and STARTS.search(text) is not None


def _form_of(text: str) -> str:
    """Return the ending of a file with such a text."""
    start = text.lstrip()
    if re.match(r"\[\[?\s*[A-Za-z_][\w.]*\s*\]", start):
        return ".toml"
    return ".json" if start.startswith(("{", "[")) else ".yaml"


def _refused(problems: list[PipelineError], folder: Path) -> ImportRefusedError:
    texts = [(_clean(e.what, folder), _clean(e.hint, folder)) for e in problems]
    return ImportRefusedError([(_shortened(what), hint) for what, hint in texts])


def _shortened(text: str) -> str:
    return text if len(text) <= 2000 else f"{text[:2000]} ..."


def _as_imported(found: ImportedConfig, folder: Path) -> Imported:
    found.source = _clean(found.source, folder)
    found.notes = [replace(note, reason=_clean(note.reason, folder)) for note in found.notes]
    rows: dict[str, list[Row]] = {outcome: [] for outcome in HEADINGS}
    for note in found.notes:
        row = _row(note, folder)
        same = note.outcome == "changed" and row.given == row.value
        rows["differs" if same else note.outcome].append(row)
    values = found.nested()
    return Imported(
        source=found.source,
        text=_clean(config_text(found), folder),
        rows={outcome: some for outcome, some in rows.items() if some},
        missing=tuple(key for key in NEEDED if key not in values),
        name=_name(values.get("run")),
        before=None if found.before is None else _as_imported(found.before, folder),
    )


def _name(run: object) -> str:
    """Return a name that a file can have."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", str(run or "")).lstrip("-_.")
    return name[:80] or "imported"


def complete(text: str, name: str) -> str:
    """Add what a run needs and an imported part of one does not have, for the form to ask.

    Args:
        text: What was imported.
        name: A name for the run.
    """
    values = read_values(text, name)
    family = values.get("family")
    asked = {"images": "images"}
    if family in LANGUAGE_MODELS:
        asked = {"source": "text", "path": "data/text.jsonl"}
    phases = [{"name": "train", "until": 1000}]
    needed = {"run": name.replace(".", "-"), "base": "nano", "data": asked, "phases": phases}
    if values.keys() >= needed.keys():
        return text
    return ConfigText(text, name).update({**needed, **values}).text


def _row(note: Note, folder: Path) -> Row:
    given = "" if note.given is None else scalar(note.given)
    value = "" if note.value is None else scalar(note.value)
    texts = (note.key, given, note.ours, value, note.reason)
    return Row(*(_clean(text, folder) for text in texts))


def _clean(text: str, folder: Path) -> str:
    """Return a text without the temporary folder and without control characters."""
    return show_controls(text.replace(f"{folder}/", ""))


PRECISIONS = ("", "bf16", "fp16", "no")
MOST_PARTS = 1000
"""Files that a request may hold, within its bytes; import_drop has the limit of an import."""
FORM = {"precisions": PRECISIONS, "most_files": MOST_FILES}


def show(_: Request) -> Response:
    """Answer with the empty form."""
    return page("import", {**FORM, "part": ""}, here="/import")


async def read(request: Request) -> Response:
    """Answer with what became of each key, or with everything that stops the import."""
    async with request.form(
        max_files=MOST_PARTS, max_fields=20, max_part_size=MOST_BYTES + 1
    ) as form:
        files: dict[str, bytes] = {}
        for one in form.getlist("files"):
            if isinstance(one, UploadFile) and one.filename:
                if one.filename in files:
                    raise PipelineError(
                        f"two files have the name {one.filename!r}",
                        hint="drop the one that the configuration names",
                    )
                files[one.filename] = await one.read()
        pasted, options = _text(form, "pasted"), _options(form)
    try:
        found = await run_in_threadpool(import_drop, files, pasted, options)
    except ImportRefusedError as error:
        return _answer(request, "import_refused", {"problems": error.problems}, 422)
    runs = [one for one in (found.before, found) if one is not None]
    return _answer(request, "imported", {"runs": runs, "headings": HEADINGS}, 200)


async def open_in_form(request: Request) -> Response:
    """Save what was imported as a template, completed, and open it in the form."""
    form = await request.form(max_files=0, max_fields=5, max_part_size=4 * MOST_BYTES)
    name = check_name(_text(form, "name"), "template")
    text = complete(_text(form, "text").replace("\r\n", "\n"), name)
    saved = save_template(name, text, replace="replace" in form)
    return RedirectResponse(f"/build?{urlencode({'from': str(saved.file)})}", 303)


def _answer(request: Request, part: str, values: dict[str, Any], status: int) -> Response:
    """Answer with a part of the page; with all of it where no script asks."""
    if "hx-request" in request.headers:
        return page(part, values, status=status)
    whole = {**FORM, **values, "part": f"{part}.html.j2"}
    return page("import", whole, here="/import", status=status)


def _options(form: FormData) -> ImportOptions:
    precision = _text(form, "precision")
    if precision not in PRECISIONS:
        raise PipelineError(
            f"{precision[:50]!r} is no precision", hint=f"choose {', '.join(PRECISIONS[1:])}"
        )
    return ImportOptions(
        precision=precision or None,
        num_processes=_count(form, "num_processes"),
        micro_batch_size=_count(form, "micro_batch_size"),
        choose=choose_precision,
        skip=frozenset(key.lstrip("-") for key in _text(form, "skip").replace(",", " ").split()),
    )


def _text(form: FormData, name: str) -> str:
    value = form.get(name, "")
    return value if isinstance(value, str) else ""


def _count(form: FormData, name: str) -> int | None:
    text = _text(form, name).strip()
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text[:9]) < 10**6:
        raise PipelineError(
            f"{name}: {text[:50]!r}", hint="give a whole number from 1 on, or leave it empty"
        )
    return int(text)


routes = [
    Route("/import", show),
    Route("/import", read, methods=["POST"]),
    Route("/import/open", open_in_form, methods=["POST"]),
]
