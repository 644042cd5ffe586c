"""The page: what a change answers, what it shows of strangers' text, and what it refuses."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
from starlette.testclient import TestClient
from tests.builder.conftest import ADDRESS
from tests.builders.traced_models import traced_model

from zerotrain.builder.run_pages import find_sources
from zerotrain.builder.traces import Traces, Tracing

FULL = "config/sdxl-full-24gb.yaml"
CARD = {"machine.gpu": "RTX 4090", "machine.host_memory": "64 GiB"}
PROJECT = Path.cwd()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces of any model, without torch."""
    found = traced_model(batch=8)
    monkeypatch.setattr(Traces, "find", lambda *_, **__: found)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own, with this one's presets and models."""
    (tmp_path / "config").mkdir()
    for name in ("launch", "models"):
        (tmp_path / "config" / name).symlink_to(PROJECT / "config" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change(client: TestClient, before: dict[str, str], **values: str):
    """Send the form as htmx does: its values, and the address that holds those before."""
    shown = client.get("/build", params=before)
    assert shown.status_code == 200
    form = {**before, **{key.replace("__", "."): value for key, value in values.items()}}
    return client.post("/build", data=form, headers={"HX-Current-URL": str(shown.url)})


def wrong(text: str, field: str) -> str:
    """Return what stands next to a field."""
    found = re.search(rf'id="wrong-{re.escape(field)}"[^>]*>(.*?)</div>', text, re.S)
    assert found is not None
    return html.unescape(" ".join(re.sub("<[^>]+>", " ", found[1]).split()))


def test_a_change_is_marked_in_each_file(client: TestClient, traced: None) -> None:
    """In our phase and in the launchers' files, and nothing else is."""
    answer = change(client, {"from": FULL, **CARD}, train__global_batch_size="16")
    marked = [html.unescape(line).strip() for line in re.findall("<mark>(.*?)</mark>", answer.text)]
    assert marked == [
        "global_batch_size: 16", '"train_batch_size": 16,', '"train_micro_batch_size_per_gpu": 16,',
    ]  # fmt: skip
    address = answer.headers["hx-replace-url"]
    assert "train.global_batch_size=16" in address
    reloaded = client.get(address)
    assert 'name="train.global_batch_size" value="16"' in reloaded.text
    assert "<mark>" not in reloaded.text


def test_a_key_that_was_removed_is_marked_when_it_returns(client: TestClient, traced: None) -> None:
    """An empty field removes a key of the file that the form began with."""
    answer = change(client, {"from": FULL, "train.snr_gamma": "", "train.lr_warmup_steps": ""})
    assert "<mark>" not in answer.text
    assert "  lr_warmup_steps" not in answer.text
    before = {"from": FULL, "train.lr_warmup_steps": ""}
    answer = change(client, before, train__lr_warmup_steps="100")
    assert "<mark>  lr_warmup_steps: 100</mark>" in answer.text
    assert answer.headers["hx-replace-url"] == f"/build?{urlencode({'from': FULL})}"


def test_the_page_says_what_fits_and_how_long_it_takes(client: TestClient, traced: None) -> None:
    """For each preset, with its numbers as text next to the bar."""
    text = client.get("/build", params={"from": FULL, **CARD}).text
    presets = re.findall(r'<li class="preset.*?</li>', text, re.S)
    assert len(presets) == 7
    [best] = [one for one in presets if "recommended" in one]
    assert "<h3>zero2_offload</h3>" in best
    assert re.search(r"\d s per step", best)
    assert re.search(r'aria-label="GPU: [\d.]+ GiB of 24\.0 GiB, weights [\d.]+ GiB', best)
    assert 'class="curve"' in text


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("train.global_batch_size", "x", "must be a whole number (found 'x')"),
        ("train.global_batch_size", "0", "must be at least 1"),
        ("train.gradient_accumulation_steps", "3", "is no multiple of gradient_accumulation_steps"),
        ("train.optimizer", "lamb", "DeepSpeed has it only as CUDA code"),
        ("train.lr_warmup_steps", "5000", "5000 steps of warm-up, but the schedule has 2000"),
        ("train.learning_rate", "-1", "must be above 0"),
        ("phase.until", "soon", 'must be a step (300), "3 epochs"'),
        ("base", "stabilitya/stable-diffusion-xl-base-1.0", "nearly stabilityai"),
        ("machine.gpu", "RTX 4900", "this GPU is not known did you mean RTX 4090"),
        ("machine.host_memory", "", "of RTX 4090 is not given presets that offload depend on it"),
        ("launch.offload_path", "/disk", "offloads nothing to a disk"),
        ("data.images", "nowhere", "no such folder"),
    ],
)
def test_a_mistake_stands_next_to_its_field(
    client: TestClient, traced: None, field: str, value: str, expected: str
) -> None:
    """In the sentences of the reader and of the checks; it goes when it is corrected."""
    before = {"from": FULL, **CARD}
    answer = client.post("/build", data={**before, field: value})
    assert answer.status_code == 200
    assert expected in wrong(answer.text, field)
    good = {**before, "data.source": "digits", "data.images": ""}
    assert wrong(client.post("/build", data=good).text, field) == ""


def test_a_card_shows_the_comment_at_the_top_of_its_file(project: Path) -> None:
    """Without the line for editors, and without what is after the first key."""
    lines = ["# yaml-language-server: $schema=schema.json", "# Trains cats.", "# To run it: x"]
    (project / "config/cats.yaml").write_text("\n".join([*lines, "run: cats", "# more", ""]))
    assert [one.about for one in find_sources()] == ["Trains cats. To run it: x"]


def test_an_invalid_value_hides_no_file(client: TestClient, traced: None) -> None:
    """The configuration is shown as it is; the launchers' files say why they are not there."""
    text = client.post("/build", data={"from": FULL, **CARD, "train.learning_rate": "-1"}).text
    shown = dict(re.findall(r'<pre tabindex="0" aria-label="([^"]+)">(.*?)</pre>', text, re.S))
    assert list(shown) == ["Configuration"]
    assert "\n  learning_rate: -1" in re.sub("</?mark>", "", shown["Configuration"])
    assert text.count('<p class="soft">They return when the values are valid.</p>') == 2


def test_another_family_has_its_own_form(client: TestClient, traced: None) -> None:
    """With its own base and size, and what was chosen of launch and machine."""
    before = {"family": "sdxl", **CARD}
    answer = change(client, before, family="causal_lm", launch__preset="zero2", base="x")
    page = client.get(answer.headers["hx-redirect"]).text
    assert 'name="train.max_length"' in page
    assert 'name="train.resolution"' not in page
    assert 'name="base" value="Qwen/Qwen2.5-7B"' in page
    assert '<option value="zero2" selected>' in page
    assert 'name="machine.gpu" value="RTX 4090"' in page


def test_values_of_each_phase_are_kept_when_another_is_shown(
    client: TestClient, traced: None
) -> None:
    """There and back, and in what is written."""
    before = {"from": "config/config.yaml"}
    answer = change(client, before, phase="offload", train__learning_rate="3e-3")
    address = answer.headers["hx-redirect"]
    shown = client.get(address)
    assert 'name="train.learning_rate" value="3e-3"' not in shown.text
    assert "learning_rate: 0.003" in shown.text
    there = dict(parse_qsl(urlsplit(address).query))
    back = client.post(
        "/build",
        data={**there, "train.learning_rate": "4e-3", "phase": "plain"},
        headers={"HX-Current-URL": str(shown.url)},
    ).headers["hx-redirect"]
    text = client.get(back).text
    assert 'name="train.learning_rate" value="3e-3"' in text
    assert "learning_rate: 0.003" in text
    assert "learning_rate: 0.004" in text


def test_html_and_controls_in_names_are_text(
    client: TestClient, project: Path, traced: None
) -> None:
    """Of a file, its comment and its values: nothing of it is markup or reaches the terminal."""
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    name = "config/<b>x.yaml"
    Path(name).write_text(
        f"# {evil}\nrun: a\nfamily: sdxl\nbase: '{evil}'\n"
        f'data: {{images: "\\e[31m{evil}"}}\n'
        f"train: {{optimizer: '{evil}'}}\nphases: [{{name: '\"{evil}', until: 1}}]\n",
        encoding="utf-8",
    )
    pages = [client.get("/"), client.get("/build", params={"from": name})]
    pages.append(client.post("/build", data={"from": name, "train.optimizer": evil}))
    pages.append(client.get("/build", params={"from": evil}))
    for answer in pages:
        assert "alert(1)" in answer.text
        for tag in ("<script>alert", "<img", "<b>", "\x1b"):
            assert tag not in answer.text, tag


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("!!python/object/apply:os.system [touch ran]", "config/x.yaml"),
        ("a: &a [x]\nb: *c", "config/x.yaml"),
        ("- 1\n- 2", "it is no configuration of one run with phases"),
        ("runs: [a.yaml]", "it is no configuration of one run with phases"),
        ("run: a\nphases: [1]", "it is no configuration of one run with phases"),
        ("\x00\x01", "config/x.yaml"),
        ("#" * 2_000_000, "has more than 1,048,576 bytes"),
    ],
)
def test_a_hostile_configuration_is_a_sentence(
    client: TestClient, project: Path, text: str, expected: str
) -> None:
    """No code of it runs, and no traceback is shown."""
    Path("config/x.yaml").write_text(text, encoding="utf-8")
    answer = client.get("/build", params={"from": "config/x.yaml"})
    assert answer.status_code == 422
    assert expected in html.unescape(answer.text)
    assert not Path("ran").exists()
    assert client.get("/").status_code == 200


def test_a_model_that_is_being_traced_is_asked_for_again(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page does so by itself; where the trace fails, it shows why and stops."""
    pending = Tracing("sdxl, micro batch 8 at 1024 px")
    monkeypatch.setattr(Traces, "find", lambda *_, **__: pending)
    text = client.get("/build", params={"from": FULL, **CARD}).text
    assert 'hx-trigger="load delay' in text
    # A name that is typed meanwhile stays: neither the form that writes nor the whole is replaced.
    assert 'hx-select="#forecast" hx-target="#forecast"' in text
    parts = ('id="forecast"', 'hx-select-oob="#files"', 'id="files"')
    assert [*map(text.index, parts)] == sorted(map(text.index, parts))
    failed = Tracing("sdxl", "base: no such model")
    monkeypatch.setattr(Traces, "find", lambda *_, **__: failed)
    text = client.get("/build", params={"from": FULL, **CARD}).text
    assert 'hx-trigger="load delay' not in text
    assert "base: no such model" in text


def test_the_server_imports_no_torch() -> None:
    """Neither at its start nor to show a page: its start takes a second."""
    code = (
        "import sys\n"
        "from starlette.testclient import TestClient\n"
        "from zerotrain.builder.app import create_app\n"
        "from zerotrain.builder.pages import BuilderSettings\n"
        "from zerotrain.builder.traces import Traces, Tracing\n"
        "Traces.find = lambda *_, **__: Tracing('')\n"
        f"client = TestClient(create_app(BuilderSettings(token='t')), base_url='{ADDRESS}')\n"
        "client.get('/?token=t')\n"
        f"assert client.get('/build?from={FULL}').status_code == 200\n"
        "print(sorted({'torch', 'deepspeed', 'diffusers', 'transformers'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
