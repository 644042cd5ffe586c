"""The builder's application, its routes, guard and answers to errors, and its server."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zerotrain.artifact.layout import CONFIGS
from zerotrain.builder import build, importing, run_pages, writing
from zerotrain.builder.build import Looks
from zerotrain.builder.pages import (
    BuilderSettings,
    is_address,
    is_loopback,
    page,
    refusal,
    signed_in,
)
from zerotrain.builder.traces import Traces
from zerotrain.errors import PipelineError
from zerotrain.importers import enable_launch_files
from zerotrain.machine.output import print_message

READING = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer. Scripts and styles are files of ours: an injected one does not run."""
PICTURE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
"""Of a picture: a browser that shows it alone puts it into a page of its own, with a style."""


class Guard:
    """ASGI middleware that refuses requests from other sites, without the token, or too large.

    A page of another site, open in the same browser, can send requests to this server, and by DNS
    rebinding under a name of its own. It cannot forge Host and Origin, and has no cookie of ours.
    """

    def __init__(self, app: ASGIApp, settings: BuilderSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket, which no page here opens
            return
        guarded = _with_headers(send, reading=scope["path"].startswith("/static/"))
        if (answer := self._refuse(scope)) is not None:
            await answer(scope, receive, guarded)
            return
        try:
            body = await self._read(receive)
        except ClientDisconnect:
            return
        if body is None:
            await self._too_large()(scope, receive, guarded)
            return
        await self._app(scope, _again(body, receive), guarded)

    def _refuse(self, scope: Scope) -> ASGIApp | None:
        headers, settings = Headers(scope=scope), self._settings
        host = headers.get("host", "")
        if not self._is_ours(host):
            return refusal(
                400,
                f"The request is for {host or 'no host'}, which is not a name of this server.",
                "Open the address that `zerotrain builder` printed. For a name of this machine, "
                "start it with --host NAME.",
            )
        origin = headers.get("origin")
        changes = scope["method"] not in READING
        if (origin is not None or changes) and origin != f"{scope['scheme']}://{host}":
            return refusal(
                403,
                f"The request comes from {origin or 'no page'}, not from a page of this server.",
                "Open the address that `zerotrain builder` printed, and send the form from there.",
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > settings.most_bytes:
            return self._too_large()
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not changes and compare_digest(given.encode(), settings.token.encode()):
            return signed_in(Request(scope), settings)
        if self._has_cookie(headers):
            return None
        return refusal(
            403,
            "The request has no valid token.",
            "Open the address that `zerotrain builder` printed; it ends in ?token=... and changes "
            "with each start.",
        )

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header names this server.

        An address is no name that somebody else could point here, so any will do where the server
        listens on more than the loopback.
        """
        try:
            parts = urlsplit(f"//{host}")
            name = (parts.hostname or "").rstrip(".")
        except ValueError:
            return False
        if parts.netloc != host or "@" in host:
            return False
        if name == "localhost" or name in self._settings.names:
            return True
        return is_address(name) and (is_loopback(name) or not self._settings.is_local)

    def _has_cookie(self, headers: Headers) -> bool:
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        found = cookies.get(self._settings.cookie)
        return found is not None and compare_digest(
            found.value.encode(), self._settings.token.encode()
        )

    async def _read(self, receive: Receive) -> bytes | None:
        """Return a body, whose length a client need not state; None if it is too large.

        Raises:
            ClientDisconnect: the connection broke off before its end.
        """
        body, more = b"", True
        while more and len(body) <= self._settings.most_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return None if more or len(body) > self._settings.most_bytes else body

    def _too_large(self) -> ASGIApp:
        most = self._settings.most_bytes // 2**20
        return refusal(
            413,
            f"The request is larger than {most} MiB.",
            "Launch files and configurations are far smaller; choose one of those.",
        )


def _again(body: bytes, receive: Receive) -> Receive:
    """Return the source of a request whose body is read already."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


def _with_headers(send: Send, *, reading: bool) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            if headers.get("content-type") == "image/png":
                headers["Content-Security-Policy"] = PICTURE_POLICY
            headers["Cache-Control"] = "max-age=3600" if reading else "no-store"
        await send(message)

    return guarded


STATIC = Path(__file__).with_name("static")
MODULES = (build, importing, writing, run_pages)
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
