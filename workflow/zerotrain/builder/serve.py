"""The builder's server: one process, for one person."""

from __future__ import annotations

import socket
from pathlib import Path

import uvicorn

from zerotrain.artifact.layout import CONFIGS
from zerotrain.builder.app import create_app
from zerotrain.builder.settings import BuilderSettings, is_address
from zerotrain.errors import PipelineError
from zerotrain.machine.output import print_message


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
