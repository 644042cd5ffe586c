"""A port that is named is free, or refused."""

from __future__ import annotations

import socket

import pytest

from zerotrain.errors import PipelineError
from zerotrain.machine.ports import check_port, free_port


def test_a_taken_port_is_refused_and_a_free_one_is_not() -> None:
    """The sentence names it."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PipelineError, match=f"main_process_port {port} cannot be used"):
            check_port(port, "plain")
    check_port(free_port(), "plain")
