"""Values of one start of the builder's server."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from secrets import token_urlsafe

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
