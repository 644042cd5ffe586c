"""The builder's application: its routes, its guard, and its answers to errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles

from zerotrain.builder import build, import_page, run_pages, start, write_page
from zerotrain.builder.build import Looks
from zerotrain.builder.pages import page, refusal
from zerotrain.builder.security import HEADERS, Guard
from zerotrain.builder.settings import BuilderSettings
from zerotrain.builder.traces import Traces
from zerotrain.errors import PipelineError
from zerotrain.importers import enable_launch_files

STATIC = Path(__file__).with_name("static")
MODULES = (start, build, import_page, write_page, run_pages)
"""Modules with `routes`, in the order in which they are looked through."""


def create_app(settings: BuilderSettings) -> Starlette:
    """Return the application; the project is the working directory, as of every command."""
    routes: list[BaseRoute] = [route for module in MODULES for route in module.routes]
    enable_launch_files()
    traces = Traces()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        traces.close()

    app = Starlette(
        lifespan=lifespan,
        routes=[*routes, Mount("/static", StaticFiles(directory=STATIC))],
        middleware=[Middleware(Guard, settings=settings)],
        exception_handlers={
            PipelineError: _mistake,
            HTTPException: _http_error,
            Exception: _fault,
        },
    )
    app.state.settings, app.state.looks = settings, Looks(traces)
    return app


async def _mistake(request: Request, error: Exception) -> Response:
    """Answer a user's mistake with its sentence and hint; htmx puts a part where problems stand."""
    assert isinstance(error, PipelineError)
    part = "problem" if "hx-request" in request.headers else "error"
    return page(part, {"what": error.what, "hint": error.hint}, status=422)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "There is no such page.", 405: "The page does not take such a request."}
    return refusal(
        error.status_code, known.get(error.status_code, error.detail), "Go back to the start."
    )


async def _fault(_: Request, error: Exception) -> Response:
    answer = refusal(
        500,
        f"The builder failed: {type(error).__name__}.",
        "The terminal in which it runs has the details.",
    )
    answer.headers.update(HEADERS)  # the guard is inside of what calls this
    return answer
