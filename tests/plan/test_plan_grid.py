"""Every family, base, resolution and adapter: a plan or a sentence, never a traceback."""

from __future__ import annotations

from typing import Any

import pytest
from tests.builders.runs import make_run
from tests.plan.conftest import shipped_models

from zerotrain.config.families import FAMILIES, LANGUAGE_MODELS
from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.options import PlanOptions
from zerotrain.launch.planner.planner import PlannedMachine, plan
from zerotrain.launch.planner.report import plan_report

GIB = 2**30
VALUES = {
    "base": "nano", "resolution": 1024, "max_length": 512, "batch_size": 1, "precision": "bf16",
    "processes": 1, "lora_rank": None, "gradient_checkpointing": False,
}  # fmt: skip
"""The command's own defaults."""
SIZES = (8, 40, 512, 4096)
WHOLE = [*((size, None, 1) for size in SIZES), (64, 4, 1), (64, None, 2)]
"""Of a preset: size, rank of an adapter or None, processes."""
SAMPLE = [(40, None, 1), (4096, None, 1), (64, 4, 2)]
"""A size that is no multiple, one beyond all positions, and an adapter on two processes."""
REFUSALS = ("is no multiple of", "has positions for images of up to")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_defaults_of_the_command_are_planned(family: str) -> None:
    """`plan --base nano --family FAMILY`, which for SD3 was a traceback."""
    lines = plan_report(PlanOptions(**{**VALUES, "family": family}, device_memory="24 GiB"))
    assert "Recommended: torch, the lowest that fits." in " ".join(lines)


def test_an_image_beyond_the_positions_is_refused() -> None:
    """SD3 has 192 x 192 positions of 16 px; a preset as many as its first phase needs."""
    values = {**VALUES, "family": "sd3", "base": "stabilityai/stable-diffusion-3-medium-diffusers"}
    with pytest.raises(PipelineError, match=r"resolution 3088: .* of up to 3072 px a side"):
        plan_report(PlanOptions(**{**values, "resolution": 3088}, device_memory="24 GiB"))
    phases = [{"name": "a", "until": 1}, {"name": "b", "until": 2, "resolution": 128}]
    raw = make_run(family="sd3", data={"images": "images"}, train={"resolution": 64}, phases=phases)
    with pytest.raises(PipelineError, match=r"resolution 128: nano .* of up to 64 px a side"):
        plan(parse_config(raw, "c"), "b", PlannedMachine(GIB, None))


def refusal_of(**values: Any) -> str:
    """Why it is not planned; empty where it is."""
    try:
        plan_report(
            PlanOptions(**{**VALUES, **values}, device_memory="24 GiB", host_memory="64 GiB")
        )
    except PipelineError as error:
        return str(error)
    return ""


def is_expected(refusal: str) -> bool:
    """Whether it is planned, or refused for one of REFUSALS."""
    return not refusal or any(reason in refusal for reason in REFUSALS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "preset", "grid"),
    [
        *((family, "nano", SAMPLE) for family in ("sdxl", "causal_lm")),
        *(pytest.param(one, "micro", WHOLE, marks=pytest.mark.soak) for one in FAMILIES),
    ],
)
def test_a_preset_of_any_size_is_planned_or_refused(
    family: str, preset: str, grid: list[tuple[int, int | None, int]]
) -> None:
    """With and without an adapter, on one process and on two."""
    refusals = {
        (size, rank, count): refusal_of(
            family=family, base=preset, resolution=size, max_length=size, lora_rank=rank,
            processes=count, batch_size=count, gradient_checkpointing=count == 2,
        )
        for size, rank, count in grid
    }  # fmt: skip
    assert all(map(is_expected, refusals.values())), refusals
    assert not any(refusal for (size, *_), refusal in refusals.items() if size % 64 == 0)


UNUSUAL = {"image": (1032, 4096), "text": (4096, 64)}


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("family", "base"), shipped_models())
def test_a_shipped_model_of_any_size_is_planned_or_refused(
    family: str, base: str, place: int
) -> None:
    """The models of config/models, at unusual sizes; at usual ones their recipes are planned
    (test_recipes.py)."""
    size = UNUSUAL["text" if family in LANGUAGE_MODELS else "image"][place]
    found = refusal_of(family=family, base=base, resolution=size, max_length=size)
    assert is_expected(found), found
