"""Every recipe in config/ is valid, fits the machine that it names, and gives a whole graph."""

from __future__ import annotations

import re

import pytest
from tests.conftest import ROOT

from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.planner import RESERVE, PlannedMachine, plan
from zerotrain.launch.planner.storage import encoder_bytes, parameters_of
from zerotrain.models.families.pipelines import WORKING, Placement, choose_placement

MACHINE = re.compile(r"# Machine: (\d+) GPUs? of (\d+) GB, (\d+) GB of host memory\.\n")
RECIPES = {
    path.stem: path
    for path in sorted((ROOT / "config").glob("*.yaml"))
    if "# Machine:" in path.read_text()
}
TEXT = {
    ".json": '[{"instruction": "Say yes.", "input": "", "output": "yes"}]',
    ".csv": "Tweet text,text_label\nlate again,complaint\n",
}
"""A user's data."""
SHAPES = ("qwen-image-edit-lora-24gb", "qwen2.5-7b-full-8x80gb", "sdxl-full-24gb")
"""One of each shape of graph: conditioning images, text, images alone."""
GIB = 2**30
PLACEMENTS = {
    "flux-lora-24gb": Placement.LAYERS,
    "qwen-image-edit-lora-24gb": Placement.LAYERS,
    "qwen-image-lora-24gb": Placement.LAYERS,
    "qwen-image-lora-48gb": Placement.PARTS,
}
"""How images are made where the whole pipeline does not fit, as docs/memory.md says."""


def machine_of(recipe: str) -> tuple[int, int, int]:
    """GPUs, and bytes of each and of the host, of the machine that a recipe names."""
    machine = MACHINE.search(RECIPES[recipe].read_text())
    assert machine
    gpus, device, host = (int(number) for number in machine.groups())
    return gpus, device * GIB, host * GIB


def test_no_two_files_have_one_run() -> None:
    """Their results would lie in one folder."""
    runs = [read_config(path).run for path in (ROOT / "config").glob("*.yaml")]
    assert sorted(runs) == sorted(set(runs))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_its_machine(recipe: str) -> None:
    """Each phase's own preset takes less than a device of that size, and less than the host has."""
    config = read_config(RECIPES[recipe])
    gpus, device, host = machine_of(recipe)
    for phase in config.phases:
        assert phase.launch.num_processes == gpus
        machine = PlannedMachine(device, host)
        made = plan(config, phase.name, machine, only=[phase.launch.preset])
        found = made.rows[phase.launch.preset][made.mode]
        assert found.device + RESERVE <= device
        assert found.host <= host


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_its_machine_before_and_after_training(recipe: str) -> None:
    """The kind of encoder at work, and all of them on the host; all that evaluates is on the host
    at first. Export has a tensor or an adapter at a time (test_export_weights.py)."""
    config = read_config(RECIPES[recipe])
    _, device, host = machine_of(recipe)
    base = find_architecture(config.family, config.base)
    if config.is_text:  # in fp32 for the held-out loss, in bf16 for answers
        size = 4 * parameters_of(base.trained, base.source)
        assert size + RESERVE <= device
        assert size <= host
        return
    encoders = encoder_bytes(base, config.resolved_cache.dtype)
    assert sum(encoders.values()) <= host
    at_work = max(encoders.pop("vae"), sum(encoders.values()))
    assert at_work + WORKING + RESERVE <= device
    sizes = [2 * parameters_of(part, base.source) for part in base.parts.values()]
    assert sum(sizes) <= host
    assert choose_placement(sizes, device - RESERVE) is PLACEMENTS.get(recipe, Placement.WHOLE)


def expected_jobs(config: RunConfig) -> dict[str, int]:
    """Each stage once, and once a phase."""
    once = ("prepare_dataset", "build_base", "cache_latents", "report")
    each = ("render_launch", "train_phase", "export_weights", "evaluate")
    return {**dict.fromkeys(once, 1), **dict.fromkeys(each, len(config.phases))}


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=() if one in SHAPES else pytest.mark.soak) for one in RECIPES],
)
def test_a_recipe_gives_a_whole_graph(recipe: str, project) -> None:
    """Nothing but the user's own data is missing; every job is planned, none runs."""
    config = read_config(RECIPES[recipe])
    if config.data.is_text:
        assert config.data.path
        data = project.folder / config.data.path
        data.parent.mkdir(exist_ok=True)
        data.write_text(TEXT[data.suffix])
    else:
        assert config.data.images
        folder = project.folder / config.data.images
        for place in (folder, *(project.folder / one for one in config.data.conditioning_folders)):
            place.mkdir(parents=True, exist_ok=True)
            (place / "one.png").write_bytes(b"pixels")
        (folder / "one.txt").write_text("a caption")
        if config.data.metadata:
            rows = "image,prompt\none.png,a caption\n"
            (project.folder / config.data.metadata).write_text(rows)
    planned = project.planned("train", "--configfile", f"config/{recipe}.yaml")
    assert planned == expected_jobs(config)
