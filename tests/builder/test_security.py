"""What the builder's server refuses, whatever the route: each as a page with sentences."""

from __future__ import annotations

import asyncio

import pytest
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from tests.builder.conftest import ADDRESS, SETTINGS

from zerotrain.builder.app import Guard, create_app
from zerotrain.builder.importing import MOST_BYTES, MOST_FILES
from zerotrain.builder.pages import BuilderSettings


def test_a_request_without_the_token_is_refused(stranger: TestClient) -> None:
    """By whatever method, for pages and files; a wrong token and a wrong cookie do not help."""
    for path in ("/", "/build", "/static/builder.css", "/none", "/?token=wrong"):
        answer = stranger.get(path)
        assert (answer.status_code, "no valid token" in answer.text) == (403, True), path
        assert "set-cookie" not in answer.headers
    assert stranger.post("/", headers={"Origin": ADDRESS}).status_code == 403
    stranger.cookies[SETTINGS.cookie] = "wrong"
    assert stranger.get("/").status_code == 403


def test_the_printed_url_keeps_the_token_in_a_strict_cookie(stranger: TestClient) -> None:
    """No script reads it, no other site sends it; the page that it leads to has no token."""
    answer = stranger.get("/build?from=a&token=the-token")
    kept = answer.headers["set-cookie"].lower()
    assert "httponly" in kept
    assert "samesite=strict" in kept
    assert 'content="0; url=/build?from=a"' in answer.text
    assert stranger.get("/").status_code == 200
    elsewhere = stranger.get(f"{ADDRESS}//evil.example/?token=the-token")
    assert "url=/evil.example/" in elsewhere.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8417", "", "x@127.0.0.1", "[::1"])
def test_a_foreign_host_is_refused(client: TestClient, host: str) -> None:
    """As after DNS rebinding, where a foreign name leads here; the cookie does not help."""
    answer = client.get("/", headers={"Host": host, "Origin": f"http://{host}"})
    assert (answer.status_code, "not a name of this server" in answer.text) == (400, True)


@pytest.mark.parametrize("host", ["localhost:8417", "127.0.0.1:9000", "[::1]:8417", "LOCALHOST"])
def test_the_loopback_has_several_names(client: TestClient, host: str) -> None:
    """With any port: a tunnel may have another one."""
    headers = {
        "Host": host,
        "Origin": f"http://{host}",
        "Cookie": "zerotrain-builder-8417=the-token",
    }
    assert client.get("/", headers=headers).status_code == 200


def test_other_addresses_and_names_need_host() -> None:
    """On the loopback another address is foreign; with --host it is ours, and so is the name."""
    open_ = BuilderSettings(host="0.0.0.0", token="t", names=frozenset({"box"}))
    for settings, status in ((BuilderSettings(token="t"), 400), (open_, 200)):
        client = TestClient(create_app(settings))
        for host in ("192.0.2.1:8417", "box:8417"):
            answer = client.get("/?token=t", headers={"Host": host})
            assert answer.status_code == status, host


@pytest.mark.parametrize(
    "origin",
    [
        None, "null", "http://evil.example", "http://127.0.0.1:9999", "https://127.0.0.1:8417",
        "http://[",
    ],
)  # fmt: skip
def test_a_change_from_another_page_is_refused(client: TestClient, origin: str | None) -> None:
    """A form of another site, a sandboxed frame, another server of this machine, also one of the
    same name and port under another scheme."""
    del client.headers["Origin"]
    headers = {} if origin is None else {"Origin": origin}
    answer = client.post("/build", headers=headers, data={"from": ""})
    assert (answer.status_code, "not from a page of this server" in answer.text) == (403, True)
    if origin is not None:
        assert client.get("/", headers=headers).status_code == 403


@pytest.mark.parametrize("stated", [True, False])
def test_a_large_body_is_refused(client: TestClient, stated: bool) -> None:
    """Before it is read where its length is stated; else as soon as too much has come."""
    size = SETTINGS.most_bytes + 1
    body = b"a" * size if stated else (b"a" * 2**16 for _ in range(size // 2**16 + 1))
    answer = client.post(
        "/build", content=body, headers={"Content-Type": "application/x-www-form-urlencoded"}
    )
    assert (answer.status_code, "larger than 2 MiB" in answer.text) == (413, True)


def test_a_request_that_breaks_off_reaches_no_route() -> None:
    """What has come of it is not taken for all of it."""
    reached: list[bytes] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        reached.append((await receive())["body"])

    async def ask(*messages: Message) -> None:
        waiting = list(messages)

        async def receive() -> Message:
            return waiting.pop(0)

        async def send(message: Message) -> None:
            raise AssertionError(message)

        headers = {"host": "127.0.0.1:8417", "origin": ADDRESS, "cookie": ""}
        headers["cookie"] = f"{SETTINGS.cookie}={SETTINGS.token}"
        scope = {
            "type": "http", "method": "POST", "path": "/templates", "query_string": b"",
            "scheme": "http", "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        }  # fmt: skip
        await Guard(app, SETTINGS)(scope, receive, send)

    part = {"type": "http.request", "body": b"text=half", "more_body": True}
    asyncio.run(ask(part, {"type": "http.disconnect"}))
    assert reached == []
    asyncio.run(ask(part, {"type": "http.request", "body": b" and half"}))
    assert reached == [b"text=half and half"]


def test_a_large_upload_is_refused(client: TestClient) -> None:
    """A file beyond the limit of one by its size, all of them together before any is read, and one
    file too many; each with its limit."""
    file, request = "more than 256 KiB", "larger than 2 MiB"
    for sizes, status, what in (
        ([MOST_BYTES + 1], 422, file),
        ([1, MOST_BYTES + 1], 422, file),
        ([SETTINGS.most_bytes + 1], 413, request),
        ([MOST_BYTES] * 9, 413, request),
        ([1] * (MOST_FILES + 1), 422, f"more than {MOST_FILES}"),
        ([1] * (MOST_FILES + 2), 422, f"more than {MOST_FILES}"),
    ):
        dropped = [("files", (f"{n}.json", b" " * size)) for n, size in enumerate(sizes)]
        answer = client.post("/import", files=dropped)
        assert (answer.status_code, what in answer.text) == (status, True), answer.text


def test_every_answer_forbids_inline_scripts_and_frames(client: TestClient) -> None:
    """Also a refusal, a file and a page that is not there."""
    for path in ("/", "/static/builder.css", "/none", "/static/../app.py", "/static/%2e%2e/app.py"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.status_code == (404 if "app" in path or path == "/none" else 200)


def test_pages_have_no_inline_script_or_style(client: TestClient) -> None:
    """The policy would keep them from working."""
    text = client.get("/").text
    assert "<style" not in text
    assert " style=" not in text
    assert " onclick=" not in text
    assert text.count("<script") == text.count('<script src="/static/')
