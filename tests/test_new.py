"""`zerotrain new` writes a configuration that runs, or says what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from PIL import Image
from ruamel.yaml import YAML

from zerotrain.config import RunConfig, parse_config, read_config
from zerotrain.config.document import schema
from zerotrain.config.objective import ObjectiveConfig
from zerotrain.errors import PipelineError
from zerotrain.families import FAMILIES
from zerotrain.new import OF_TEXT, new

HUB_ID = "stabilityai/stable-diffusion-xl-base-1.0"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four small images with captions."""
    folder = tmp_path / "my photos"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a photo, number {number}")
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config"


def model(folder: Path, kind: str = "StableDiffusionXLPipeline", denoiser: str = "unet") -> Path:
    """The configuration files of a model, which is all that is looked at."""
    for part, content in {
        ".": {"_class_name": kind},
        denoiser: {"sample_size": 64},
        "vae": {"block_out_channels": [1, 2, 3, 4]},
    }.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        name = "model_index.json" if part == "." else "config.json"
        (folder / part / name).write_text(json.dumps(content))
    return folder


def refusal(name: str, images: Path, base: str, config: Path) -> str:
    with pytest.raises(PipelineError) as caught:
        new(name, images, base, config)
    assert not (config / "flowers.yaml").exists()
    return str(caught.value)


@pytest.mark.parametrize("base", [HUB_ID, "nano"])
def test_written_file_is_valid(photos: Path, config: Path, base: str) -> None:
    """It runs as it is, and editors find nothing in it."""
    path = new("flowers", photos, base, config)
    assert path == config / "flowers.yaml"
    found = read_config(path)
    assert (found.run, found.base, found.data.images) == ("flowers", base, str(photos))
    assert len(found.phases) == 1
    jsonschema.validate(YAML(typ="safe").load(path.read_text()), schema())


def test_every_line_with_a_default_can_be_uncommented(photos: Path, config: Path) -> None:
    """Each shown key is real, each shown value is the default, and the second phase is one."""
    path = new("flowers", photos, HUB_ID, config)
    text = path.read_text()
    full = re.sub(r"(?m)^( *)#(?=[a-z_]+:|- name:)", r"\1", text)
    full = re.sub(r"(?m)^  #  ", "    ", full)
    assert full != text
    found = parse_config(YAML(typ="safe").load(full), "uncommented")
    assert [phase.launch.preset for phase in found.phases] == ["torch", "zero2_offload"]
    assert found.phases[0] == read_config(path).phases[0]


def test_every_key_is_in_it(photos: Path, config: Path) -> None:
    """A user sees all there is for the family without another page."""
    text = new("flowers", photos, HUB_ID, config).read_text()
    for section, field in RunConfig.model_fields.items():
        assert re.search(rf"(?m)^#?{section}:", text), section
        keys = getattr(field.annotation, "model_fields", {}).keys()
        others = ObjectiveConfig.model_fields.keys() - {*FAMILIES["sdxl"].objective}
        for key in keys - others - {*OF_TEXT}:
            assert re.search(rf"(?m)^  #?{key}: ", text), f"{section}.{key}"


def test_it_fits_the_images(photos: Path, config: Path) -> None:
    """Few images are seen many times; the comment says how many steps that is."""
    path = new("flowers", photos, HUB_ID, config)
    assert read_config(path).phases[0].until == "100 epochs"
    assert "100 times through 4 images are 400 steps" in path.read_text()


def test_it_fits_the_model(photos: Path, config: Path, tmp_path: Path) -> None:
    """A local model's own resolution is taken: 64 latents of 8 pixels."""
    path = new("flowers", photos, str(model(tmp_path / "sdxl")), config)
    assert read_config(path).phases[0].train.resolution == 512


@pytest.mark.parametrize(
    ("family", "pipeline", "hub_id"),
    [
        ("sdxl", "StableDiffusionXLPipeline", HUB_ID),
        ("sd3", "StableDiffusion3Pipeline", "stabilityai/stable-diffusion-3-medium-diffusers"),
        ("qwen_image", "QwenImagePipeline", "Qwen/Qwen-Image"),
        ("flux", "FluxPipeline", "black-forest-labs/FLUX.1-dev"),
    ],
)
def test_it_is_of_the_models_family(
    photos: Path, config: Path, tmp_path: Path, family: str, pipeline: str, hub_id: str
) -> None:
    """As model_index.json or a known hub id says; keys of others are left out."""
    folder = model(tmp_path / family, pipeline, FAMILIES[family].trained_part)
    others = {key for kind in FAMILIES.values() for key in kind.objective}
    for name, base in {"a": str(folder), "b": hub_id}.items():
        path = new(name, photos, base, config)
        assert read_config(path).family == family
        keys = set(re.findall(r"(?m)^  #?(\w+): ", path.read_text()))
        assert keys & others == {*FAMILIES[family].objective}
    assert read_config(config / "a.yaml").phases[0].train.resolution == 512


def test_every_family_of_images_is_known() -> None:
    """The test above names each."""
    (mark,) = test_it_is_of_the_models_family.pytestmark  # type: ignore[attr-defined]
    of_images = [name for name, kind in FAMILIES.items() if kind.modality == "image"]
    assert [family for family, *_ in mark.args[1]] == of_images


def test_captions_in_a_table_are_noticed(photos: Path, config: Path) -> None:
    """metadata.csv inside the folder counts, as it will in the run."""
    for caption in photos.glob("*.txt"):
        caption.unlink()
    (photos / "metadata.csv").write_text("file_name,text\n0.png,a photo\n")
    text = new("flowers", photos, HUB_ID, config).read_text()
    assert "1 captioned images" in text
    assert "# 3 of 4 entries cannot be used, first 1.png:" in text


def test_nothing_is_overwritten(photos: Path, config: Path) -> None:
    """A configuration with a user's edits stays."""
    path = new("flowers", photos, HUB_ID, config)
    path.write_text("mine")
    with pytest.raises(PipelineError, match=r"flowers\.yaml exists already"):
        new("flowers", photos, HUB_ID, config)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["", "data", "a b", "../up", "-x", ".hidden", "a.b"])
def test_bad_names_are_refused(photos: Path, config: Path, name: str) -> None:
    """A run's name is a folder's."""
    text = refusal(name, photos, HUB_ID, config)
    assert f"{name!r} cannot name a run" in text
    assert "use letters, digits, - and _" in text


def test_missing_folder_is_refused(config: Path, tmp_path: Path) -> None:
    """The folder that was named is in the message."""
    assert f"{tmp_path / 'no'}: no such folder" in refusal(
        "flowers", tmp_path / "no", HUB_ID, config
    )


def test_folder_without_images_is_refused(config: Path, tmp_path: Path) -> None:
    """An empty folder is no dataset."""
    (tmp_path / "empty").mkdir()
    assert "no image in it" in refusal("flowers", tmp_path / "empty", HUB_ID, config)


def test_images_without_captions_are_refused(photos: Path, config: Path) -> None:
    """The hint shows both ways to give captions."""
    for caption in photos.glob("*.txt"):
        caption.unlink()
    text = refusal("flowers", photos, HUB_ID, config)
    assert "none of its 4 images has a caption" in text
    assert "NAME.txt beside each NAME.png" in text
    assert "metadata.csv" in text


def test_models_that_cannot_be_used_are_refused(photos: Path, config: Path, tmp_path: Path) -> None:
    """A missing folder, a single file, something else and another family: each has its sentence."""
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "other").mkdir()
    kolors = model(tmp_path / "kolors", "KolorsPipeline")
    known = "the families of images are sdxl, sd3, qwen_image, flux"
    for base, message in {
        "./nowhere": "no such folder, and no hub id",
        str(tmp_path / "model.safetensors"): "a single file, not a folder",
        str(tmp_path / "other"): "holds no model_index.json",
        "Qwen/Qwen2.5-7B": f"a model of causal_lm, and {known}",
        str(kolors): f"a KolorsPipeline, and {known}",
    }.items():
        assert f"--base {base}: {message}" in refusal("flowers", photos, base, config)
