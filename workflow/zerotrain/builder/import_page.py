"""The page on which configurations of other programs are dropped or pasted."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from zerotrain.builder.importing import (
    HEADINGS,
    MOST_BYTES,
    MOST_FILES,
    ImportRefusedError,
    complete,
    import_drop,
)
from zerotrain.builder.pages import page
from zerotrain.builder.saved import save_template
from zerotrain.builder.writing import check_name
from zerotrain.errors import PipelineError
from zerotrain.importers.reading import ImportOptions
from zerotrain.machine.detect import choose_precision

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
