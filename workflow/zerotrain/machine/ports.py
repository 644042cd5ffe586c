"""Ports for the rendezvous of a training's processes."""

from __future__ import annotations

import errno
import random
import socket
import zlib
from socket import SOCK_STREAM

from zerotrain.errors import PipelineError

FIRST_PORT, PORTS = 10000, 20000
"""Below the ports that Linux gives to outgoing connections."""
ATTEMPTS = 20
"""Ports of a job that are tried before the first one is used anyway."""


def port_of_job(job: str, step: str, phase: str, attempt: int = 0) -> int:
    """Compute a port that all machines of a cluster's job know without communication.

    Several phases may be trained in one job, and several jobs on one machine: each has its port.

    Args:
        job: The job's id.
        step: The id of the step within it.
        phase: The phase in training.
        attempt: Number of ports that were taken before.
    """
    return FIRST_PORT + zlib.crc32(f"{job}/{step}/{phase}/{attempt}".encode()) % PORTS


def untaken_port_of_job(address: str, job: str, phase: str) -> int:
    """Return a port of a job on which no process listens, if this machine is the one to listen.

    Args:
        address: The address of the rendezvous.
        job: The job's id.
        phase: The phase in training.
    """
    found = (port_of_job(job, "", phase, attempt) for attempt in range(ATTEMPTS))
    return next(
        (port for port in found if not is_taken(address, port)), port_of_job(job, "", phase)
    )


def is_taken(address: str, port: int) -> bool:
    """Return whether a process listens on a port of this machine; False for another machine's."""
    try:
        ((family, kind, _, _, place), *_) = socket.getaddrinfo(address, port, type=SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            # A port left in TIME_WAIT by an earlier training is free to listen on.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def free_port() -> int:
    """Return a free port, so that two trainings on one machine do not share one.

    It is outside the range for outgoing connections, one of which could take it before the training
    listens on it.
    """
    choice = random.SystemRandom()  # does not disturb the training's random numbers
    while is_taken("127.0.0.1", port := choice.randrange(FIRST_PORT, FIRST_PORT + PORTS)):
        pass
    return port


def check_port(port: int, phase: str) -> None:
    """Check that no other process of this machine holds a port.

    Raises:
        PipelineError: it is taken, or this user may not use it.
    """
    with socket.socket() as probe:
        # A port left in TIME_WAIT by an earlier training is free to listen on.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise PipelineError(
                f"phase {phase}: launch.main_process_port {port} cannot be used: {error.strerror}",
                hint="another training of this machine may have it: give each one its own, or "
                "leave the key out, and a free port is taken",
            ) from error
