"""The builder's pages: from nothing to a phase, from files of other programs, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import expect
from tests.browser.builder_server import Builder
from tests.browser.checks import LOOKS, serious_problems, sideways
from tests.browser.conftest import Visits
from tests.browser.form import change, problems_of, use_preset, write

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
    assert sideways(page) <= 0
    assert serious_problems(page) == []


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
    page.locator("[name=name]").first.fill(name)
    keep.click()
    expect(page.locator("#form")).to_be_visible()
    assert page.locator("[name=from]").first.input_value().endswith(f"{name}.yaml")
