"""The builder's application, its routes, guard and answers to errors, and its server."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles

from zerotrain.artifact.layout import CONFIGS
from zerotrain.builder import build, import_page, run_pages, start, write_page
from zerotrain.builder.build import Looks
from zerotrain.builder.pages import page, refusal
from zerotrain.builder.security import HEADERS, Guard
from zerotrain.builder.settings import BuilderSettings, is_address
from zerotrain.builder.traces import Traces
from zerotrain.errors import PipelineError
from zerotrain.importers import enable_launch_files
from zerotrain.machine.output import print_message

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


def serve(host: str, port: int) -> None:
    """Serve the page until Ctrl-C.

    Args:
        host: The address to listen on.
        port: The port.

    Raises:
        PipelineError: this is no project, or address and port cannot be listened on.
    """
    if not CONFIGS.is_dir():
        raise PipelineError(
            f"builder: {Path.cwd()} has no folder {CONFIGS}/",
            hint="call it in the folder of a clone of zerotrain, as every command",
        )
    settings = BuilderSettings(host=host, port=port, names=own_names(host))
    listening = _listen(settings)
    print_message(f"The builder: {settings.url}")
    if not settings.is_local:
        print_message(
            f"It listens on {host}, over plain HTTP: whoever reads the network's traffic can read "
            "the token. A tunnel (ssh -L) does without --host."
        )
    print_message("Ctrl-C ends it; trainings that it started continue.")
    config = uvicorn.Config(
        create_app(settings), log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listening])


def own_names(host: str) -> frozenset[str]:
    """Return the names under which a browser may ask for this server; none on the loopback."""
    if BuilderSettings(host=host, token="").is_local:
        return frozenset()
    named = () if is_address(host) else (host,)
    return frozenset(name.lower() for name in (*named, socket.gethostname(), socket.getfqdn()))


def _listen(settings: BuilderSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
        listening.listen()  # a browser may open the address as soon as it is printed
    except OSError as error:
        listening.close()
        raise PipelineError(
            f"builder: cannot listen on {settings.host}, port {settings.port}: {error.strerror}",
            hint="give another --port; or open the builder that runs there already",
        ) from error
    return listening
