"""`zerotrain new` writes a configuration that runs, or says what is missing."""

from __future__ import annotations

import json
import re
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML
from safetensors.torch import save_file
from tests.conftest import ROOT
from tests.pages.configuration import schema

from zerotrain.config.families import FAMILIES
from zerotrain.config.read import parse_config, read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.training import ObjectiveConfig
from zerotrain.errors import PipelineError
from zerotrain.graph.checks import read_checked_runs
from zerotrain.graph.new_run import new as write
from zerotrain.graph.new_text import OF_OTHERS
from zerotrain.graph.options import NewOptions
from zerotrain.models.base_places import PARTS

HUB_ID = "stabilityai/stable-diffusion-xl-base-1.0"


def new(name: str, images: Path, base: str, folder: Path, **options: Any) -> Path:
    return write(NewOptions(name, base, images, **options), folder)


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


@pytest.mark.parametrize(
    ("base", "resolution", "kept"), [(HUB_ID, 512, True), (HUB_ID, 56, False), ("nano", 64, False)]
)
def test_images_of_a_real_model_keep_their_shape(
    photos: Path, config: Path, base: str, resolution: int, kept: bool
) -> None:
    """Where buckets of the usual alignment have the resolution's square."""
    found = read_config(new("flowers", photos, base, config, resolution=resolution))
    assert (found.data.aspect_buckets is not None) == kept


@pytest.mark.parametrize("base", [HUB_ID, "nano"])
def test_written_file_is_valid(photos: Path, config: Path, base: str) -> None:
    """It runs as it is, and editors find nothing in it."""
    path = new("flowers", photos, base, config)
    assert path == config / "flowers.yaml"
    found = read_config(path)
    assert (found.run, found.base, found.data.images) == ("flowers", base, str(photos))
    assert len(found.phases) == 1
    jsonschema.validate(YAML(typ="safe").load(path.read_text()), schema())


def uncomment(text: str) -> str:
    """A file with every default taken out of its comment."""
    full = re.sub(r"(?m)^( *)#(?=[a-z_]+:|- name:)", r"\1", text)
    return re.sub(r"(?m)^  #  ", "    ", full)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora": True},
        {"instance_prompt": "a dog"},
        {"text": "t.json", "base": "Qwen/Qwen2.5-7B"},
        {"base": "nano"},
    ],
)
def test_by_default_each_value_has_one_line_of_comment(
    photos: Path, config: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """And nothing else is in it but the head; --all-keys has the same values, and all defaults."""
    monkeypatch.chdir(photos.parent)
    Path("t.json").write_text(json.dumps(TALKS), encoding="utf-8")
    given = {"base": HUB_ID, "images": None if "text" in options else photos, **options}
    path = write(NewOptions("flowers", **given), config)
    head, _, body = path.read_text().partition("\n\n")
    assert head.splitlines()[0] == "# yaml-language-server: $schema=schema.json"
    assert "docs/configuration.md" in head
    assert "`zerotrain new --all-keys`" in head
    lines = [line.strip() for line in body.splitlines()]
    assert all(len(line) <= 100 for line in lines if str(photos) not in line)
    for before, line in pairwise(lines):
        if line.startswith("#"):
            assert not before.startswith("#")
            assert line.endswith(".")
        elif re.match(r"[\w-][\w ]*: \S", line):
            assert before.startswith("# "), line
    assert len(body.splitlines()) <= 65
    whole = write(NewOptions("all", **given, all_keys=True), config).read_text()
    assert len(whole.splitlines()) > 200
    values, of_all = (YAML(typ="safe").load(text) for text in (path.read_text(), whole))
    sections = {key: value for key, value in of_all.items() if value is not None}
    assert values == {**sections, "run": "flowers"}


def test_every_line_with_a_default_can_be_uncommented(photos: Path, config: Path) -> None:
    """Each shown key is real, each shown value is the default, and the second phase is one."""
    path = new("flowers", photos, HUB_ID, config, all_keys=True)
    text = path.read_text()
    full = uncomment(text)
    assert full != text
    found = parse_config(YAML(typ="safe").load(full), "uncommented")
    assert [phase.launch.preset for phase in found.phases] == ["torch", "zero2_offload"]
    assert found.phases[0] == read_config(path).phases[0]


def test_every_key_is_in_it(photos: Path, config: Path) -> None:
    """With --all-keys a user sees all there is for the family without another page."""
    text = new("flowers", photos, HUB_ID, config, all_keys=True).read_text()
    for section, field in RunConfig.model_fields.items():
        assert re.search(rf"(?m)^#?{section}:", text), section
        keys = getattr(field.annotation, "model_fields", {}).keys()
        others = ObjectiveConfig.model_fields.keys() - {*FAMILIES["sdxl"].objective}
        for key in keys - others - {*chain.from_iterable(OF_OTHERS["image"].values())}:
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
        path = new(name, photos, base, config, all_keys=True)
        assert read_config(path).family == family
        keys = set(re.findall(r"(?m)^  #?(\w+): ", path.read_text()))
        assert keys & others == {*FAMILIES[family].objective}
    assert read_config(config / "a.yaml").phases[0].train.resolution == 512


@pytest.mark.parametrize(
    "base", ["Qwen/Qwen-Image-Edit-2509", "Qwen/Qwen-Image-Edit-2511", "QwenImageEditPlusPipeline"]
)
def test_a_model_that_edits_images_is_of_its_family(
    photos: Path, config: Path, tmp_path: Path, base: str
) -> None:
    """By its hub id, and by the pipeline of its model_index.json."""
    if "/" not in base:
        base = str(model(tmp_path / "edit", base, "transformer"))
    assert read_config(new("a", photos, base, config)).family == "qwen_image"


def test_every_family_of_images_is_known() -> None:
    """The test above names each."""
    (mark,) = test_it_is_of_the_models_family.pytestmark  # type: ignore[attr-defined]
    of_images = [name for name, kind in FAMILIES.items() if kind.modality == "image"]
    assert {family for family, *_ in mark.args[1]} == {*of_images}


def test_captions_in_a_table_are_noticed(photos: Path, config: Path) -> None:
    """metadata.csv inside the folder counts, as it will in the run."""
    for caption in photos.glob("*.txt"):
        caption.unlink()
    (photos / "metadata.csv").write_text("file_name,text\n0.png,a photo\n")
    text = new("flowers", photos, HUB_ID, config).read_text()
    assert "1 captioned images" in text
    assert f"# 3 of 4 samples of {photos} are bad, first 1.png:" in text


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
    assert "NAME.txt next to each NAME.png" in text
    assert "metadata.csv" in text


def test_a_single_file_is_a_base_of_sdxl(photos: Path, config: Path, tmp_path: Path) -> None:
    """One of another model is refused by name."""
    file = tmp_path / "model.safetensors"
    save_file({"cond_stage_model.transformer.x": torch.ones(1)}, file)
    assert f"{file} is Stable Diffusion 1.x" in refusal("flowers", photos, str(file), config)
    save_file({f"{part}x": torch.ones(1) for part in PARTS}, file)
    new("flowers", photos, str(file), config)
    assert "\nfamily: sdxl\n" in (config / "flowers.yaml").read_text()


def test_models_that_cannot_be_used_are_refused(photos: Path, config: Path, tmp_path: Path) -> None:
    """A missing folder, something else and another family: each has its sentence."""
    (tmp_path / "other").mkdir()
    kolors = model(tmp_path / "kolors", "KolorsPipeline")
    known = "the families of images are sdxl, flux, qwen_image, sd3"
    for base, message in {
        "./nowhere": "no such folder, and no hub id",
        str(tmp_path / "other"): "holds no model_index.json",
        "Qwen/Qwen2.5-7B": f"a model of causal_lm, and {known}",
        str(kolors): f"a KolorsPipeline, and {known}",
    }.items():
        assert f"--base {base}: {message}" in refusal("flowers", photos, base, config)


TALKS = [
    {"instruction": "Add.", "input": f"{number}+1", "output": str(number + 1)}
    for number in range(8)
]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, {"family": "sdxl", "train.resolution": 32, "until": "100 epochs", "lora": None}),
        ({"lora_rank": 8}, {"lora.rank": 8, "train.learning_rate": 1e-3}),
        ({"base": HUB_ID, "lora_rank": 4}, {"lora.rank": 4, "train.learning_rate": 1e-4}),
        ({"resolution": 64}, {"train.resolution": 64}),
        ({"until": "1000"}, {"until": "1000 steps"}),
        ({"until": "2.5 epochs"}, {"until": "2.5 epochs"}),
        ({"until": "0.75 epochs"}, {"until": "0.75 epochs"}),
        ({"family": "flux"}, {"family": "flux"}),
        (
            {"instance_prompt": "a photo of sks dog"},
            {
                "data.instance_prompt": "a photo of sks dog",
                "data.caption_strategy": "instanceprompt",
            },
        ),
        ({"text": True}, {"family": "causal_lm", "data.source": "text", "train.max_length": 64}),
        ({"text": True, "family": "seq2seq_lm"}, {"family": "seq2seq_lm"}),
        ({"text": True, "base": "Qwen/Qwen2.5-7B", "lora_rank": 16}, {"family": "causal_lm"}),
        ({"text": True, "base": "google/flan-t5-xl"}, {"family": "seq2seq_lm"}),
        ({"text": "owner/dataset", "base": "me/model"}, {"data.path": "owner/dataset"}),
    ],
)
def test_options_are_written_and_the_file_passes_check(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    values: dict[str, Any],
) -> None:
    """Text and images, a LoRA, another size or end: what is written is right as it stands, and
    with every default taken out of its comment."""
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    Path("config/launch").symlink_to(ROOT / "config/launch")
    Path("talks.json").write_text(json.dumps(TALKS), encoding="utf-8")
    wanted = {"base": "nano", "images": Path(photos.name), **options}
    if "text" in options:
        wanted |= {
            "images": None,
            "text": "talks.json" if options["text"] is True else options["text"],
        }
    path = write(NewOptions("flowers", **wanted))
    run = read_checked_runs(path)[str(path)]
    for name, value in values.items():
        found: Any = run.phases[0] if name == "until" else run
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name
    jsonschema.validate(YAML(typ="safe").load(path.read_text()), schema())
    path = write(NewOptions("all", **wanted, all_keys=True))
    path.write_text(uncomment(path.read_text()))
    assert [phase.name for phase in read_checked_runs(path)[str(path)].phases] == [
        "plain",
        "offload",
    ]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"images": None}, "new: give --images DIR or --text FILE", "--text talks.json"),
        ({"text": "talks.json"}, "new: give --images DIR or --text FILE", "--text talks.json"),
        ({"resolution": 60}, "--resolution: 60 is not a multiple of 8", "give --resolution 56"),
        ({"until": "soon"}, "--until: 'soon' is no end of a phase", "'3 epochs'"),
        ({"family": "fluks"}, "--family fluks: no family of image", "did you mean flux?"),
        ({"base": "nanoo"}, "--base nanoo: no such folder, and no hub id", "did you mean nano?"),
        (
            {"images": None, "text": "gone.json"},
            "data.path: gone.json: no such file",
            "correct data.path",
        ),
        ({"images": None, "text": "a/b", "resolution": 64}, "--resolution: text has none", "leave"),
    ],
)
def test_options_that_cannot_be_are_refused(
    photos: Path, config: Path, options: dict[str, Any], message: str, hint: str
) -> None:
    """In a sentence that names the option."""
    with pytest.raises(PipelineError) as caught:
        write(NewOptions("flowers", **{"base": "nano", "images": photos, **options}), config)
    assert caught.value.what == message
    assert hint in caught.value.hint
