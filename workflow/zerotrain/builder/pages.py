"""Pages from templates, errors as sentences, and the values of one start of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from secrets import token_urlsafe
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from zerotrain.errors import show_controls
from zerotrain.machine.host import gib

PORT = 8417
MOST_BYTES = 2 * 2**20
"""Size of a request's body: far more than a form or a launch file has."""


@dataclass(frozen=True)
class BuilderSettings:
    """Where the page is served, and what a request must bring.

    Attributes:
        host: The address to listen on.
        port: The port to listen on.
        token: What the first request has in its URL, and each later one in a cookie.
        names: Names of this machine in a Host header, besides localhost; addresses need no entry.
        most_bytes: The largest body of a request.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    token: str = field(default_factory=lambda: token_urlsafe(24), repr=False)
    names: frozenset[str] = frozenset()
    most_bytes: int = MOST_BYTES

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine reach the page."""
        return self.host == "localhost" or is_loopback(self.host)

    @property
    def cookie(self) -> str:
        """Name of the cookie; browsers share cookies among the ports of a host."""
        return f"zerotrain-builder-{self.port}"

    @property
    def url(self) -> str:
        """The URL to open, with the token."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/?token={self.token}"


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is an address that only this machine has."""
    return is_address(host) and ip_address(host).is_loopback


TEMPLATES = Path(__file__).with_name("templates")
PLACES = (
    ("/", "Start"), ("/build", "Build"), ("/import", "Import"), ("/templates", "Templates"),
    ("/runs", "Runs"),
)  # fmt: skip
"""The pages that each page names at its top."""


@cache
def templates() -> Environment:
    """Return the environment of all templates: values are escaped, unknown ones are errors."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        # Of names and captions of others: a control character shows as an escape.
        finalize=lambda value: show_controls(value) if type(value) is str else value,
    )
    environment.globals.update(places=PLACES)
    environment.filters.update(gib=gib, query=lambda values: urlencode(values))
    return environment


def page(
    name: str, values: Mapping[str, Any], *, here: str = "", status: int = 200
) -> HTMLResponse:
    """Return a page, or a part of one.

    Args:
        name: The template, without its .html.j2.
        values: What the template takes.
        here: The page's path, to mark its place in the navigation.
        status: Status of the answer.
    """
    text = templates().get_template(f"{name}.html.j2").render(here=here, **values)
    return HTMLResponse(text, status)


def refusal(status: int, what: str, hint: str) -> HTMLResponse:
    """Return a page with what is wrong, and what to do."""
    return page("error", {"what": what, "hint": hint}, status=status)


def signed_in(request: Request, settings: BuilderSettings) -> HTMLResponse:
    """Return a page that keeps the token in a cookie and leads to the same URL without it.

    A redirect would not do: where a link of another page was followed, its target counts as a
    request of that other page, to which the browser gives no SameSite=Strict cookie.
    """
    kept = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
    query = f"?{urlencode(kept)}" if kept else ""
    path = "/" + request.url.path.lstrip("/")  # two slashes would begin another host's name
    answer = page("signed_in", {"target": f"{path}{query}"})
    answer.set_cookie(settings.cookie, settings.token, httponly=True, samesite="strict", path="/")
    return answer
