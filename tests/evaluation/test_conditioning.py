"""Evaluation and validation of a model that reads conditioning images."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.builders.images import draw_of, make_image_config, prepare_inputs
from tests.builders.models import move_far
from tests.training.saving_trials import Log

from zerotrain import artifact
from zerotrain.artifact import link_or_copy
from zerotrain.cache.reader import Cache, read_cache
from zerotrain.cache.record import Prompts
from zerotrain.config.models import EvaluateConfig
from zerotrain.config.run import RunConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.data.draws import IMAGE_SEEDS, generator
from zerotrain.data.sheets import cut_rows
from zerotrain.errors import PipelineError
from zerotrain.evaluation.images import EvaluateSettings, measure_images
from zerotrain.models.families import load_family
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.training.reporting.samples import LatentSampler

SIDE = 16
FAMILY: Any = load_family("flux")
SAMPLING = {"images_per_prompt": 1, "num_inference_steps": 2}


def config_of(folder: Path, **changes: Any) -> RunConfig:
    """A run on the edits in a folder."""
    data = {"conditioning_images": str(folder / "before"), "holdout": 0.5}
    phases = [{"name": "only", "until": 20}]
    sections = {"run": "edits", "family": "flux", "phases": phases, "evaluate": SAMPLING}
    return make_image_config(folder / "after", data=data, **sections | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight edits under one caption, up to weights that are far from the base's."""
    folder = tmp_path_factory.mktemp("edits")
    draw = np.random.default_rng(0)
    for name in ("after", "before"):
        (folder / name).mkdir()
    for number in range(8):
        for name in ("after", "before"):
            pixels = draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
        (folder / "after" / f"{number}.txt").write_text("make it noise")
    prepare_inputs(config_of(folder), folder)
    base = artifact.read(folder / "base", "base")
    with artifact.publish(folder / "weights", "weights") as draft:
        for name in base.files:
            if not name.startswith("transformer/"):
                link_or_copy(base.path(name), draft.folder / name)
        model = FAMILY.load_model(folder / "base")
        moved = move_far(dict(model.named_parameters()), seed=1)
        model.load_state_dict(moved, strict=False)
        model.save_pretrained(draft.folder / "transformer")
    return folder


def measure(run: Path, **evaluation: Any) -> Any:
    """What the evaluation of the weights measures."""
    config = config_of(run, evaluate={**SAMPLING, **evaluation})
    settings = EvaluateSettings.of(config, "only")
    return measure_images(settings, run / "dataset", run / "cache", run / "weights", "cpu")


def test_default_prompts_are_samples_with_their_own_images(run, tmp_path):
    """Each of the eight edits, though all have one caption; the images are in the folder and on
    the left of the grid's rows."""
    found = measure(run)
    assert found.prompts == ["make it noise"] * 8
    assert [list(files) for files in found.conditioning_images] == [
        [f"conditioning/{number:02d}-00.png"] for number in range(8)
    ]
    found.write(tmp_path)
    rows = cut_rows(Image.open(tmp_path / "grid.png"), 8)
    for number, sample in enumerate(read_dataset(run / "dataset").samples):
        source = Image.open(run / "before" / sample.file)
        square = source.resize((SIDE, SIDE), Image.Resampling.LANCZOS, box=(2, 0, 22, 20))
        saved = Image.open(tmp_path / "conditioning" / f"{number:02d}-00.png")
        assert saved.tobytes() == square.tobytes()
        shown = rows[number].crop((0, 0, 64, 64)).resize((SIDE, SIDE), Image.Resampling.NEAREST)
        assert shown.tobytes() == square.tobytes()
    samples = [(tmp_path / "samples" / f"{number:02d}-00.png").read_bytes() for number in range(8)]
    assert len(set(samples)) == 8


def test_the_held_out_loss_reads_conditioning_images(run):
    """A model that answers by them has another loss where they are others."""
    loss = measure(run).metrics["val_loss"]
    assert loss is not None
    model = FAMILY.load_trained(run / "weights")
    cache = read_cache(run / "cache", verify=False)
    assert isinstance(cache, Cache)
    batch = {name: tensor[None] for name, tensor in cache.sample(0).items()}
    batch |= {"noise": torch.ones_like(batch["latents"]), "uniform": torch.tensor([0.5]).double()}
    objective = FAMILY.objective(run / "base")
    with torch.no_grad():
        own = objective.loss(model, batch)
        batch["conditioning_latents"] = batch["conditioning_latents"] + 1
        assert not torch.equal(objective.loss(model, batch), own)


def test_prompts_of_the_user_have_the_images_that_are_named(run):
    """Of any size; the files are those of the list, in its order."""
    files = [[str(run / "before" / "3.png")], [str(run / "before" / "5.png")]]
    found = measure(run, prompts=["a", "b"], conditioning_images=files)
    assert found.prompts == ["a", "b"]
    assert [len(files) for files in found.conditioning_images] == [1, 1]
    (run / "text.png").write_text("no image")
    for file, why in (("text.png", "not an image that Pillow can read"), ("0.png", "no such file")):
        with pytest.raises(PipelineError, match=rf"evaluate\.conditioning_images: .*{file}: {why}"):
            measure(run, prompts=["a"], conditioning_images=[[str(run / file)]])


def test_prompts_of_validations_are_cached_with_their_images(run, tmp_path):
    """The same tensors as those of a sample with this caption and image; other prompts change
    nothing that is trained on."""
    file = str(run / "before" / "0.png")
    asked = {"prompts": ["make it noise"], "conditioning_images": [[file]]}
    config = config_of(run, validation=asked)
    cache_latents(CacheSettings.of(config), SIDE, run / "dataset", run / "base", tmp_path / "cache")
    cache = read_cache(tmp_path / "cache", verify=False)
    assert isinstance(cache, Cache)
    assert cache.artifact.identity == artifact.read(run / "cache", "cache").identity
    found = Prompts(cache.artifact).tensors(("make it noise", (file,)))
    sample = cache.sample(0)
    for name, tensor in {**found.text, **(found.conditioning or {})}.items():
        assert torch.equal(tensor, sample[name])
    assert not torch.equal(found.empty["prompt_embeds"], found.text["prompt_embeds"])
    with pytest.raises(PipelineError, match=r"prompt 'make it noise' with other\.png"):
        Prompts(cache.artifact).tensors(("make it noise", ("other.png",)))


def test_images_while_training_are_those_of_an_evaluation(run, tmp_path):
    """Of the same prompts, images and seeds: pixels within one level."""
    files = [str(run / "before" / f"{number}.png") for number in (3, 5)]
    asked = {"prompts": ["a", "a"], "conditioning_images": [[file] for file in files]}
    found = measure(run, **asked)
    (tmp_path / "evaluation").mkdir()
    found.write(tmp_path / "evaluation")
    config = config_of(run, validation=asked)
    cache_latents(CacheSettings.of(config), SIDE, run / "dataset", run / "base", tmp_path / "cache")
    cache = read_cache(tmp_path / "cache", verify=False)
    engine = SimpleNamespace(
        model=FAMILY.load_trained(run / "weights"), rank=0, world_size=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    settings = {
        **asked, "images_per_prompt": 1, "num_inference_steps": 2, "guidance_scale": None,
        "scheduler": "default", "decode": "inline",
    }  # fmt: skip
    phase = SimpleNamespace(
        seed=config.seed,
        derived=SimpleNamespace(validation=settings, zero_stage=0),
        train=SimpleNamespace(resolution=SIDE),
    )
    sampler = LatentSampler(engine, FAMILY, run / "base", cache, phase, tmp_path, Log())  # type: ignore[arg-type]
    with torch.inference_mode():
        sampler.sample(3)
    made = [
        np.asarray(Image.open(folder / f"{number:02d}-00.png")).astype(int)
        for folder in (tmp_path / "samples" / "step-00000003", tmp_path / "evaluation" / "samples")
        for number in (0, 1)
    ]
    assert np.abs(made[0] - made[2]).max() <= 1
    assert np.abs(made[1] - made[3]).max() <= 1
    for number, file in enumerate(files):
        seed = int(generator(config.seed, IMAGE_SEEDS, number, 0).integers(2**63))
        values = EvaluateConfig(num_inference_steps=2, batch_size=1)
        [expected] = draw_of(
            FAMILY, run / "weights", ["a"], [seed], values, resolution=SIDE, device="cpu",
            conditioning=[[Image.open(file)]],
        )  # fmt: skip
        assert np.array_equal(np.asarray(expected), made[2 + number])
