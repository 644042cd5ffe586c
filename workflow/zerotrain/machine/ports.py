"""Ports for the meeting of a training's processes."""

from __future__ import annotations

import socket

from zerotrain.errors import PipelineError

FIRST_PORT, PORTS = 10000, 20000
"""Below those that Linux gives to outgoing connections."""


def port_of_job(job: int, step: int = 0) -> int:
    """The port of a cluster's job, which all its machines know without asking each other."""
    return FIRST_PORT + (job * 31 + step) % PORTS


def free_port() -> int:
    """A port that nobody uses, so that two trainings on one machine do not meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(port: int, phase: str) -> None:
    """Refuse a port that another process of this machine holds.

    Raises:
        PipelineError: it is taken, or not ours to take.
    """
    with socket.socket() as probe:
        # What a training before us left in TIME_WAIT is free to listen on.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise PipelineError(
                f"phase {phase}: launch.main_process_port {port} cannot be used: {error.strerror}",
                hint="another training of this machine may have it: give each one its own, or "
                "leave the key out, and a free port is taken",
            ) from error
