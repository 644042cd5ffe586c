"""A family is one file and a line in a table: one is added to a copy of the project, and runs."""

from __future__ import annotations

import shutil

import pytest
import torch
from diffusers import StableDiffusionPipeline
from tests.builders.commands import run_in_project
from tests.builders.images import CAPTIONS, make_pictures
from tests.families.promises import TOY, TOY_SPEC

from zerotrain import artifact

CONFIG = """
{run: r, family: toy, base: nano, data: {images: photos, num_workers: 0},
 train: {resolution: 16, global_batch_size: 4, learning_rate: 1.0e-3},
 launch: {num_cpu_threads_per_process: 1}, phases: [{name: only, until: 2}]}
"""


def test_a_family_has_under_80_lines():
    assert sum(len(file.read_text().splitlines()) for file in (TOY, TOY_SPEC)) < 80


@pytest.mark.slow
def test_a_family_is_added_by_two_files(quick_project):
    """Its preset is built, cached, trained, exported, and loaded by the library's own pipeline."""
    project = quick_project("project")
    shutil.copy(TOY, project / "workflow/zerotrain/models/families/toy.py")
    shutil.copy(TOY_SPEC, project / "workflow/zerotrain/config/families/toy.py")
    (project / "photos").mkdir()
    for number, image in enumerate(make_pictures(16, 8)):
        image.save(project / f"photos/{number}.png")
        (project / f"photos/{number}.txt").write_text(CAPTIONS[number % 3])
    (project / "config/toy.yaml").write_text(CONFIG)
    words = ("--cores", 2, "results/r/only/weights/manifest.json", "--configfile")
    run_in_project(project, "snakemake", *words, "config/toy.yaml")
    run = project / "results/r"
    assert artifact.read(run / "only/weights", "weights").content["step"] == 2
    loaded = StableDiffusionPipeline.from_pretrained(run / "only/weights", safety_checker=None)
    base = StableDiffusionPipeline.from_pretrained(run / "base", safety_checker=None)
    trained, before = loaded.unet.state_dict(), base.unet.state_dict()
    assert not all(torch.equal(trained[name], before[name]) for name in before)
    image = loaded(CAPTIONS[0], height=16, width=16, num_inference_steps=2).images[0]
    assert image.size == (16, 16)
