"""A training as a person makes one with the page alone: planned, written, started, switched."""

from __future__ import annotations

import re
from pathlib import Path

from tests.browser.builder_server import Builder
from tests.browser.checks import check_look
from tests.browser.conftest import Visits
from tests.browser.form import change, write

RUN = "scripts"
START = """\
# What the page does not ask for: checkpoints to switch at, and few images of each prompt.
run: start
base: nano
data: {images: pictures, num_workers: 0}
train: {save_every: 5}
launch: {num_cpu_threads_per_process: 1}
phases: [{name: first, until: 5, launch: torch}]
evaluate: {images_per_prompt: 2, num_inference_steps: 2}
"""
SMALL = {
    "run": RUN,
    "launch.preset": "zero2_offload",
    "train.global_batch_size": "4",
    "train.resolution": "32",
    "phase.until": "500",
}
"""A configuration that a CPU trains, by the form's fields; long enough to be switched."""
STARTED, PLANNED, FINISHED = 180_000, 180_000, 480_000
"""Milliseconds until the first steps, for the plan of a switch and until the end."""


def train_from_the_page(visits: Visits, builder: Builder) -> Path:
    """Train a small SDXL, and switch it to plain PyTorch while it runs; the folder of the run."""
    from playwright.sync_api import expect

    (builder.folder / "config/start.yaml").write_text(START)
    page = visits.open(builder.address("/build", **{"from": "config/start.yaml"}))
    for name, value in SMALL.items():
        change(page, name, value)
    expect(page.get_by_text("All values are valid.")).to_be_visible()
    expect(page.locator(".preset").first).to_be_visible(timeout=STARTED)
    write(page, RUN)
    page.get_by_role("link", name=f"open the run {RUN}").click()
    page.get_by_role("button", name="Start", exact=True).click()
    page.locator("#controls summary", has_text="Switch").wait_for(timeout=STARTED)
    page.get_by_text(re.compile(rf"^([6-9]|[1-9]\d+) of {SMALL['phase.until']}$")).wait_for(
        timeout=STARTED
    )
    visits.keep(page, "running")
    check_look(page)
    if not page.locator("#controls details[open]").count():
        page.locator("#controls summary").click()
    page.locator("[name=preset]").select_option("torch")
    page.get_by_role("button", name="Show what changes").click(timeout=PLANNED)
    page.get_by_role("heading", name=f"Switch {RUN}").wait_for(timeout=PLANNED)
    visits.keep(page, "switch")
    check_look(page)
    page.get_by_role("button", name="Switch", exact=True).click()
    expect(page.locator(".state.finished")).to_be_visible(timeout=FINISHED)
    visits.keep(page, "finished")
    return builder.folder / "results" / RUN
