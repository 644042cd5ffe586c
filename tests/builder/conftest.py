"""The builder's page without a server: a client that has opened the printed URL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from zerotrain.builder.app import create_app
from zerotrain.builder.pages import BuilderSettings

SETTINGS = BuilderSettings(token="the-token")
ADDRESS = "http://127.0.0.1:8417"
FROM_HERE = {"Origin": ADDRESS}
"""What a browser sends with a form of the page."""


@pytest.fixture
def stranger() -> Iterator[TestClient]:
    """A client without the token."""
    with TestClient(create_app(SETTINGS), base_url=ADDRESS) as client:
        yield client


@pytest.fixture
def client(stranger: TestClient) -> TestClient:
    """A client with the token's cookie, which sends what a browser sends from a page."""
    assert stranger.get("/", params={"token": SETTINGS.token}).status_code == 200
    stranger.headers.update(FROM_HERE)
    return stranger
