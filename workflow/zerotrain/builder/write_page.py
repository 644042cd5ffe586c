"""The pages that show what would be written, write it, and list the saved templates."""

from __future__ import annotations

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from zerotrain.artifact.layout import run_of
from zerotrain.builder.pages import page
from zerotrain.builder.saved import FOLDER, delete_template, list_templates, save_template
from zerotrain.builder.writing import MOST_BYTES, confirm, propose
from zerotrain.config.runs import train_command


async def show_diff(request: Request) -> Response:
    """Answer with the diff of a configuration file; nothing is written."""
    form = await _form(request)
    name, text = _field(form, "name"), _field(form, "text")
    proposal = propose(name, text)
    values = {"proposal": proposal, "name": name, "text": text, "lines": proposal.diff()}
    return page("write", values)


async def write(request: Request) -> Response:
    """Write what was shown, and answer with where it is."""
    form = await _form(request)
    name, text, digest = (_field(form, key) for key in ("name", "text", "digest"))
    done = confirm(name, text, digest)
    values = {"done": done, "run": run_of(done.file), "command": train_command(done.file)}
    return page("written", values)


def show_templates(_: Request) -> Response:
    """Answer with the saved templates."""
    return page("saved", {"templates": list_templates(), "folder": FOLDER}, here="/templates")


async def save(request: Request) -> Response:
    """Save a template, and show the list."""
    form = await _form(request)
    name, text = _field(form, "name"), _field(form, "text")
    save_template(name, text, replace="replace" in form)
    return RedirectResponse("/templates", 303)


async def delete(request: Request) -> Response:
    """Delete a template, and show the list."""
    delete_template(_field(await _form(request), "name"))
    return RedirectResponse("/templates", 303)


async def _form(request: Request) -> FormData:
    return await request.form(max_files=0, max_fields=10, max_part_size=MOST_BYTES + 1)


def _field(form: FormData, name: str) -> str:
    value = form.get(name, "")
    # A browser ends each line of a text with CRLF.
    return value.replace("\r\n", "\n") if isinstance(value, str) else ""


routes = [
    Route("/write", show_diff, methods=["POST"]),
    Route("/write/confirm", write, methods=["POST"]),
    Route("/templates", show_templates),
    Route("/templates", save, methods=["POST"]),
    Route("/templates/delete", delete, methods=["POST"]),
]
