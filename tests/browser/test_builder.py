"""The builder's pages: from nothing to a phase, from files of other programs, and what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from playwright.sync_api import expect
from tests.browser.builder_server import Builder
from tests.browser.checks import LOOKS, check_look
from tests.browser.conftest import Visits
from tests.browser.form import change, problems_of, use_preset, write
from tests.browser.training import START
from tests.builders.terminals import start_stand_in
from tests.builders.watched_runs import WatchedRun

from zerotrain.machine.processes import this_process

REFERENCES = Path("tests/importing/references")
SETS = [
    ("bf16", "diffsynth/commands.sh", "diffsynth/deepspeed_zero3_cpuoffload.yaml",
     "diffsynth/ds_z3_cpuoffload.json"),
    ("", "diffusers/sd3.sh"),
    ("", "diffusers/flux_lora.sh"),
    ("", "openmind/command.sh", "openmind/zero2.json"),
    ("bf16", "openmind/example_zero2.json"),
    ("bf16", "openmind/example_zero3.json"),
    ("", "peft/command.sh", "peft/ds_zero3_cpu.yaml"),
    ("", "simpletuner/config.json"),
    ("", "simpletuner/config_nvme.json"),
    ("", "simpletuner/default_config.yaml"),
]  # fmt: skip
"""A precision where the files leave it open, and files of a guide that are dropped together."""
NAMED = {"openmind/zero2.json": "ds_config.json"}
"""What a guide's command calls a file."""
TRACED = 120_000
"""Milliseconds within which an SDXL is traced, once; the page waits for it."""
SHOWN = START.replace("save_every: 5", "resolution: 32, global_batch_size: 4")
"""A small configuration, which is traced in seconds."""
INVALID = """\
# A run with three mistakes.
run: mistakes
base: nano
data:
  images: picture # its name has an s
train:
  resolution: 32
  learning_rate: fast # a number belongs here
phases:
  - {name: only, until: 0, launch: zero2_offload}
"""


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
@pytest.mark.parametrize("path", ["/", "/build", "/import", "/runs", "/templates"])
def test_page(visits: Visits, builder: Builder, path: str, scheme: str, width: int) -> None:
    """It fits the window, and axe-core finds nothing serious."""
    page = visits.open(builder.address(path), scheme=scheme, width=width)
    visits.keep(page, f"{path.strip('/') or 'start'}-{scheme}-{width}")
    check_look(page)


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_form_with_all_that_it_shows(
    visits: Visits, builder: Builder, scheme: str, width: int
) -> None:
    """Bars, tags, curve and previews of a change, and then messages in their place."""
    (builder.folder / "config/shown.yaml").write_text(SHOWN)
    page = visits.open(
        builder.address(
            "/build",
            **{
                "from": "config/shown.yaml",
                "machine.gpu": "RTX 4090",
                "machine.host_memory": "64 GiB",
            },
        ),
        scheme=scheme,
        width=width,
    )
    expect(page.locator(".preset").first).to_be_visible(timeout=TRACED)
    change(page, "train.learning_rate", "2e-4")
    for part in (".preset .bar", ".tag", ".curve", "mark"):
        expect(page.locator(part).first).to_be_visible()
    check_look(page)
    change(page, "machine.device_memory", "64 MiB")  # which the bars fill, and exceed
    expect(page.locator(".tag.not").first).to_be_visible()
    visits.keep(page, f"forecast-{scheme}-{width}")
    check_look(page)
    change(page, "train.learning_rate", "fast")
    change(page, "data.images", "picture")
    assert "fast" in problems_of(page, "train.learning_rate")
    visits.keep(page, f"messages-{scheme}-{width}")
    check_look(page)


def test_stop_asks_a_training_to_end(
    visits: Visits, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its stop file and no signal; once it has ended, the page offers to start it again."""
    monkeypatch.chdir(builder.folder)
    run = WatchedRun("stopped")
    run.make_data()
    run.make(run.folder.phase("plain").launch)
    run.log("plain", *range(10, 160, 10))
    trainer = start_stand_in(Path())
    try:
        started = psutil.Process(trainer.pid).create_time()
        owner = replace(this_process(), pid=trainer.pid, started=started)
        progress = run.lock("plain", owner)
        page = visits.open(builder.address("/runs/stopped"))
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(page.get_by_text("It was asked to stop")).to_be_visible()
        assert (progress / "stop").is_file()
        assert trainer.poll() is None
        visits.keep(page, "asked")
        (progress / "lock").unlink()  # as a training that ends
    finally:
        trainer.kill()
        trainer.wait()
    expect(page.get_by_role("button", name="Start", exact=True)).to_be_visible()
    expect(page.locator(".state.stopped")).to_be_visible()
    visits.keep(page, "stopped")
    check_look(page)


def test_from_nothing_to_an_offloading_phase_of_sdxl(visits: Visits, builder: Builder) -> None:
    """By the names of a model, a folder and a GPU; what is written is what was shown."""
    page = visits.open(builder.address("/"))
    page.get_by_role("link", name="Nothing").click()
    change(page, "run", "sdxl-page")
    change(page, "data.images", "pictures")
    change(page, "machine.gpu", "RTX 4090")
    change(page, "machine.host_memory", "64 GiB")
    expect(page.get_by_text("All values are valid.")).to_be_visible()
    expect(page.locator(".preset").first).to_be_visible(timeout=TRACED)
    use_preset(page, "zero2_offload")
    visits.keep(page, "chosen")
    shown = page.locator("pre[aria-label='deepspeed.json']").inner_text()
    zero = json.loads(shown)["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (2, "cpu")
    write(page, "sdxl-page")
    made = yaml.safe_load((builder.folder / "config/sdxl-page.yaml").read_text())
    assert made["base"] == "stabilityai/stable-diffusion-xl-base-1.0"
    assert made["phases"][0]["launch"] in ("zero2_offload", {"preset": "zero2_offload"})


def test_an_invalid_configuration_is_fixed_by_its_messages(
    visits: Visits, builder: Builder
) -> None:
    """Each stands at its field until the value is right; comments of the file stay."""
    file = builder.folder / "config/mistakes.yaml"
    file.write_text(INVALID)
    page = visits.open(builder.address("/build", **{"from": "config/mistakes.yaml"}))
    assert "fast" in problems_of(page, "train.learning_rate")
    assert "0" in problems_of(page, "phase.until")
    visits.keep(page, "messages")
    change(page, "train.learning_rate", "1e-4")
    change(page, "phase.until", "10")
    expect(page.locator(".wrong", has_text="picture")).to_be_visible()  # found once all are read
    change(page, "data.images", "pictures")
    expect(page.get_by_text("All values are valid.")).to_be_visible()
    write(page, "mistakes")
    assert file.read_text() == (
        INVALID.replace("images: picture #", "images: pictures #")
        .replace("learning_rate: fast", "learning_rate: 0.0001")
        .replace("until: 0", "until: 10")
    )


@pytest.mark.parametrize(("precision", "names"), [(first, rest) for first, *rest in SETS])
def test_files_of_a_guide_are_imported(
    visits: Visits, builder: Builder, precision: str, names: list[str]
) -> None:
    """Dropped together; they open in the form as a template."""
    page = visits.open(builder.address("/import"))
    dropped = [(NAMED.get(one, Path(one).name), (REFERENCES / one).read_bytes()) for one in names]
    page.locator("[name=files]").set_input_files(
        [{"name": name, "mimeType": "text/plain", "buffer": text} for name, text in dropped]
    )
    page.locator("[name=precision]").select_option(precision)
    page.get_by_role("button", name="Import", exact=True).click()
    keep = page.get_by_role("button", name="Save as template and open in the form").first
    expect(keep).to_be_visible()
    assert page.locator(".problem").count() == 0
    name = names[0].replace("/", "-").partition(".")[0]
    visits.keep(page, name)
    check_look(page)
    page.locator("[name=name]").first.fill(name)
    keep.click()
    expect(page.locator("#form")).to_be_visible()
    assert page.locator("[name=from]").first.input_value().endswith(f"{name}.yaml")
