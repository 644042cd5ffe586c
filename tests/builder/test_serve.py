"""What `zerotrain builder` refuses before it serves, and the address that it prints."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from zerotrain.builder.app import own_names, serve
from zerotrain.builder.pages import BuilderSettings
from zerotrain.errors import PipelineError


def test_a_port_that_is_taken_is_a_sentence() -> None:
    """With what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PipelineError) as refused:
            serve("127.0.0.1", port)
    assert refused.value.what == (
        f"builder: cannot listen on 127.0.0.1, port {port}: Address already in use"
    )
    assert "--port" in refused.value.hint


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.name.invalid"])
def test_an_address_of_another_machine_is_a_sentence(host: str) -> None:
    """Also a name that nobody knows."""
    with pytest.raises(PipelineError, match=f"cannot listen on {host}"):
        serve(host, 1)


def test_a_folder_that_is_no_project_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is about the configurations of one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError, match="has no folder config/"):
        serve("127.0.0.1", 1)


def test_each_start_has_a_token_of_its_own() -> None:
    """It is in the address that is printed and in no representation of the settings."""
    one, two = BuilderSettings(), BuilderSettings(host="::1", port=9000)
    assert one.token != two.token
    assert len(one.token) >= 32
    assert one.url == f"http://127.0.0.1:8417/?token={one.token}"
    assert two.url == f"http://[::1]:9000/?token={two.token}"
    assert one.token not in repr(one)


def test_names_are_ours_where_others_reach_the_page() -> None:
    """On the loopback a foreign name could lead here, so none but localhost counts."""
    assert own_names("127.0.0.1") == own_names("::1") == own_names("localhost") == frozenset()
    assert socket.gethostname().lower() in own_names("0.0.0.0")
    assert "box.example" in own_names("Box.example")
