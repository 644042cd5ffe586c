"""A port that is named is free, or refused."""

from __future__ import annotations

import socket

import pytest

from zerotrain.errors import PipelineError
from zerotrain.machine.ports import check_port, free_port, port_of_job, untaken_port_of_job


def test_a_taken_port_is_refused_and_a_free_one_is_not() -> None:
    """The sentence names it."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PipelineError, match=f"main_process_port {port} cannot be used"):
            check_port(port, "plain")
    found = free_port()
    check_port(found, "plain")
    assert found < 30000, "an outgoing connection may take it"


def test_phases_steps_and_jobs_have_ports_of_their_own() -> None:
    """Two phases of one allocation, as well as steps and jobs with neighbouring numbers."""
    meant = [
        ("100", "", "digits/plain"),
        ("100", "", "digits/offload"),
        ("100", "", "cats/plain"),
        ("100", "31", "digits/plain"),
        ("101", "", "digits/plain"),
    ]
    ports = [port_of_job(*one) for one in meant]
    assert len(set(ports)) == len(meant)
    assert all(10000 <= port < 30000 for port in ports)
    assert ports == [port_of_job(*one) for one in meant]


def test_taken_port_of_a_job_is_passed_over() -> None:
    """Where this machine listens; of another one the first port is taken without a trial."""
    job = next(str(n) for n in range(100) if _is_free(port_of_job(str(n), "", "digits/plain")))
    first = port_of_job(job, "", "digits/plain")
    assert untaken_port_of_job("127.0.0.1", job, "digits/plain") == first
    with socket.socket() as other:
        other.bind(("", first))
        other.listen()
        second = untaken_port_of_job("127.0.0.1", job, "digits/plain")
        assert second != first
        assert second in [port_of_job(job, "", "digits/plain", n) for n in range(1, 20)]
        assert untaken_port_of_job("192.0.2.1", job, "digits/plain") == first


def _is_free(port: int) -> bool:
    try:
        check_port(port, "plain")
    except PipelineError:
        return False
    return True
