"""docs/schedules.md shows the arguments that are taken and the curves that are trained with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.builders.runs import make_config

from zerotrain.config.lr_scheduler import ARGUMENTS, OWN_KEYS
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.launch.preset import Preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.schedules import learning_rate, momentum
from zerotrain.run.report.figures import format_learning_rate

PAGE, PICTURE = Path("docs/schedules.md"), Path("docs/images/schedules.png")
BEGIN, END = "<!-- arguments: generated -->", "<!-- arguments: end -->"
STEPS = 1000
CYCLE = {"cycle_min_lr": 1e-5, "cycle_first_step_size": 300, "decay_step_size": 100,
         "decay_lr_rate": 0.5}  # fmt: skip
PANELS: dict[str, tuple[str, dict[str, Any]]] = {
    "constant": ("constant", {}),
    "linear": ("linear", {}),
    "cosine": ("cosine", {}),
    "cosine_with_restarts": ("cosine_with_restarts", {"num_cycles": 3}),
    "polynomial": ("polynomial", {"power": 2}),
    "inverse_sqrt": ("inverse_sqrt", {}),
    "cosine_with_min_lr": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "warmup_stable_decay": ("warmup_stable_decay", {"num_decay_steps": 300}),
    "sine": ("sine", {"half_period_steps": 300, "lr_end": 0}),
    "WarmupLR": ("WarmupLR", {}),
    "WarmupLR, linear": ("WarmupLR", {"warmup_type": "linear"}),
    "WarmupDecayLR": ("WarmupDecayLR", {}),
    "WarmupCosineLR": ("WarmupCosineLR", {}),
    "OneCycle": ("OneCycle", CYCLE),
    "OneCycle: beta1": ("OneCycle", CYCLE),
    "LRRangeTest": ("LRRangeTest", {"lr_range_test_step_size": 250}),
}
LIKE_ANOTHER = {"constant_with_warmup", "cosine_warmup_with_min_lr"}
"""Schedules that would look like another in the picture."""


def curve(title: str) -> list[float]:
    """The rates of a panel, or its betas."""
    name, args = PANELS[title]
    train = {"lr_scheduler": name, "lr_scheduler_args": args, "learning_rate": 1e-4}
    if name not in ("OneCycle", "LRRangeTest", "sine"):
        train["lr_warmup_steps"] = 100
    settings = LaunchSettings.of(
        make_config(phases=[{"name": "a", "until": STEPS}], train=train), "a"
    )
    phase = resolve_phase(settings, Preset("torch", "torch", {}), 100)
    found = momentum if title.endswith("beta1") else learning_rate
    return [float(found(phase.train, step, STEPS) or 0) for step in range(STEPS)]


def digest() -> str:
    """Of every value of the picture, to nine digits."""
    curves = {title: [f"{value:.9g}" for value in curve(title)] for title in PANELS}
    return hashlib.sha256(json.dumps(curves).encode()).hexdigest()


def draw(path: Path) -> None:
    """A panel for each curve; the file holds the digest of what it shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, title in zip(figure.subplots(4, 4, sharex=True).flat, PANELS, strict=True):
        values = curve(title)
        axes.plot(range(1, STEPS + 1), values, color="#1f4e8c", linewidth=1.5)
        axes.set_title(title, fontsize=10)
        axes.set_xlim(0, STEPS)
        low = min(values) if title.endswith("beta1") else 0
        axes.set_ylim(bottom=low)
        axes.set_xticks([0, STEPS // 2, STEPS])
        axes.set_yticks([low, max(values)])
        axes.yaxis.set_major_formatter(
            lambda number, _: format_learning_rate(float(f"{number:.2g}"))
        )
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None, "Description": digest()})


def test_the_picture_shows_these_curves(request: pytest.FixtureRequest) -> None:
    """Renewed with --fix; the bytes of a font are no matter, every value of a curve is."""
    if request.config.getoption("--fix"):
        draw(PICTURE)
    with Image.open(PICTURE) as image:
        assert image.info["Description"] == digest(), f"{PICTURE} is out of date: pytest --fix"


def test_the_table_holds_every_argument(generated: Callable[[Path, str], None]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    rows = ["| schedule | argument | default | meaning |", "|---|---|---|---|", *_rows()]
    generated(PAGE, before + "\n".join([BEGIN, *rows, END]) + rest.partition(END)[2])


def _rows() -> Iterator[str]:
    for name, arguments in ARGUMENTS.items():
        for number, (key, field) in enumerate(arguments.model_fields.items()):
            default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
            default = "" if field.default is None else default
            shown = f"`{name}`" if number == 0 else ""
            about = f"Another name of `{OWN_KEYS[key]}`." if key in OWN_KEYS else field.description
            yield f"| {shown} | `{key}` | {default} | {about} |"


def test_every_schedule_is_in_the_table_of_curves_and_in_the_picture() -> None:
    curves = (
        PAGE.read_text(encoding="utf-8").partition("## The curves")[2].partition("## Arguments")[0]
    )
    for name in ARGUMENTS:
        assert f"`{name}`" in curves
    assert {name for name, _ in PANELS.values()} == ARGUMENTS.keys() - LIKE_ANOTHER
