"""The pages of runs, as a browser gets them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient
from tests.builders.watched_runs import WatchedRun

from zerotrain.builder import run_pages
from zerotrain.builder.live import draw_loss, find_ticks

HOSTILE = "<img src=x onerror=alert(1)>\x1b]0;title\x07"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedRun:
    """A run whose first phase trains."""
    monkeypatch.chdir(tmp_path)
    made = WatchedRun("cats")
    made.make_data()
    made.log("plain", *range(10, 160, 10))
    made.lock("plain")
    return made


def add_sample(run: WatchedRun, step: int) -> Path:
    file = run.folder.phase("plain").progress / "samples" / f"step-{step:06d}.png"
    file.parent.mkdir(exist_ok=True)
    Image.new("RGB", (2, 2), (step % 256, 0, 0)).save(file)
    return file


def test_live_part_shows_state_position_and_curve(client: TestClient, run: WatchedRun) -> None:
    """What the files say is on the page, and the next answer has what was appended."""
    page = client.get("/runs/cats/live").text
    for text in ("running", "150 of 300", "10.00 steps/s", "0:15", "320 / s", "1.0 GiB"):
        assert text in page
    assert "training loss 0.1 at step 10 to 0.006667 at step 150" in page
    run.log("plain", 160)
    assert "160 of 300" in client.get("/runs/cats/live").text
    assert "cats" in client.get("/runs").text


def test_a_recipe_that_was_never_started_is_no_waiting_run(
    client: TestClient, run: WatchedRun
) -> None:
    """It is listed under its file, without a state, and leads to the page that starts it."""
    WatchedRun("dogs")
    page = client.get("/runs").text
    runs, _, others = page.partition("<h2>Not started yet</h2>")
    assert re.findall(r'href="/runs/(\w+)"', runs) == ["cats"]
    assert re.findall(r'href="/runs/(\w+)"', others) == ["dogs"]
    assert "config/dogs.yaml" in others
    assert "waiting" not in page
    assert client.get("/runs/dogs").status_code == 200


def test_new_pictures_appear_and_known_ones_are_not_sent_again(
    client: TestClient, run: WatchedRun
) -> None:
    """A picture is asked for by its number; the page gets nothing while there is no other."""
    first = add_sample(run, 50)
    page = client.get("/runs/cats").text
    seen = page.partition("pictures?seen=")[2].partition('"')[0]
    assert client.get(f"/runs/cats/pictures?seen={seen}").status_code == 204
    add_sample(run, 100)
    found = client.get(f"/runs/cats/pictures?seen={seen}").text
    assert found.index("samples of step 100") < found.index("samples of step 50")
    picture = client.get("/runs/cats/pictures/0")
    assert picture.content == first.read_bytes()
    assert picture.headers["content-type"] == "image/png"
    # A browser shows a picture alone in a page of its own, with a style in it.
    policy = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
    assert picture.headers["content-security-policy"] == policy
    assert client.get("/runs/cats/pictures/2").status_code == 404


def test_pictures_that_link_out_of_the_run_are_not_sent(
    client: TestClient, run: WatchedRun, tmp_path: Path
) -> None:
    """No link of a result folder from somebody else shows a file of the machine."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    (add_sample(run, 1).parent / "step-000002.png").symlink_to(secret)
    assert client.get("/runs/cats/pictures/0").status_code == 200
    assert client.get("/runs/cats/pictures/1").status_code == 404


@pytest.mark.parametrize("name", ["%2e%2e", "..%2f..%2fetc", "data", "dogs", "%2fetc"])
def test_names_that_are_no_runs_are_refused(client: TestClient, run: WatchedRun, name: str) -> None:
    """Neither a page nor a picture or command of another folder can be asked for."""
    for path in ("", "/live", "/pictures/0", "/controls"):
        assert client.get(f"/runs/{name}{path}").status_code in (404, 422)
    for path in ("/start", "/stop", "/switch/plan", "/switch"):
        assert client.post(f"/runs/{name}{path}").status_code in (404, 405, 422)


def test_buttons_follow_the_state(
    client: TestClient, run: WatchedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training can be stopped and switched; the buttons come anew only if others are possible."""
    page = client.get("/runs/cats").text
    assert "/runs/cats/stop" in page
    assert "/runs/cats/switch/plan" in page
    assert "/runs/cats/start" not in page
    assert client.get("/runs/cats/controls?mode=training").status_code == 204
    (run.folder.phase("plain").progress / "stop").touch()
    asked = client.get("/runs/cats/controls?mode=training").text
    assert "It was asked to stop" in asked
    assert "<button" not in asked
    (run.folder.phase("plain").progress / "lock").unlink()
    assert "/runs/cats/start" in client.get("/runs/cats/controls?mode=training").text
    stopped = []
    monkeypatch.setattr(run_pages, "stop", stopped.append)
    assert (
        client.post("/runs/cats/stop", follow_redirects=False).headers["location"] == "/runs/cats"
    )
    assert stopped == ["cats"]


def test_switch_is_of_the_configuration_that_was_shown(
    client: TestClient, run: WatchedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan shows the diff, and its confirmation is refused once the file is another."""
    switched: list[object] = []
    diff = "--- a\n+++ b\n@@ -1 +1 @@\n-old <b>\n+new\nsnakemake --cores all: 1 export_weights"
    monkeypatch.setattr(run_pages, "plan_switch", lambda *_: diff)
    monkeypatch.setattr(run_pages, "switch", lambda *given, **more: switched.append((given, more)))
    page = client.post("/runs/cats/switch/plan", data={"preset": "zero2"}).text
    assert '<span class="removed">-old &lt;b&gt;' in page
    digest = page.partition('name="digest" value="')[2].partition('"')[0]
    form = {"preset": "zero2", "digest": digest, "then_start": "on"}
    run.file.write_text(run.file.read_text() + "# edited\n")
    refused = client.post("/runs/cats/switch", data=form)
    assert refused.status_code == 422
    assert "was saved since the diff was shown" in refused.text
    assert switched == []
    run.file.write_text(run.file.read_text().removesuffix("# edited\n"))
    assert client.post("/runs/cats/switch", data=form, follow_redirects=False).status_code == 303
    assert len(switched) == 1


def test_text_of_others_is_escaped(client: TestClient, run: WatchedRun) -> None:
    """Output, names of phases and errors are text on the page, without control characters."""
    run.log(HOSTILE, 170)
    log = run.folder.path / "logs" / "builder.train.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text(f"{HOSTILE}\n")
    for path in ("", "/live"):
        page = client.get(f"/runs/cats{path}").text
        assert "&lt;img src=x" in page
        assert "<img src=x" not in page
        assert "\x1b" not in page
        assert "\x07" not in page


def test_curve_is_drawn_of_finite_values_alone() -> None:
    """Numbers that are none leave a gap; of two values there is a curve, of one there is none."""
    nan, inf = float("nan"), float("inf")
    curve = draw_loss([(1, 1.0), (2, nan), (3, 0.5), (4, inf)], [], [(1, "a"), (3, "b")])
    assert curve is not None
    assert len(curve.loss.split()) == 2
    assert [tick.text for tick in curve.phases] == ["b"]
    assert draw_loss([(1, nan), (2, 1.0)], [], []) is None
    same = draw_loss([(1, 0.0), (2, 0.0)], [], [])
    assert same is not None
    assert "nan" not in same.loss
    assert find_ticks(0, 700) == [0, 200, 400, 600]
    long = draw_loss([(step, step / 7) for step in range(100_000)], [], [])
    assert long is not None
    assert len(long.loss) < 6000
