"""build_base: presets, folders and hub ids, and the message to the user where one is wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from diffusers import StableDiffusionXLPipeline
from huggingface_hub import HfApi
from PIL import Image
from tests.builders.images import make_image_config

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.models.families import autoencoders
from zerotrain.stages.build_base import BuildSettings, build_base
from zerotrain.stages.prepare_dataset import prepare_dataset

PARTS = {
    *("model_index.json", "scheduler", "text_encoder", "text_encoder_2"),
    *("tokenizer", "tokenizer_2", "unet", "vae"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images that are no squares."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "images").mkdir()
    for name in ("red", "blue"):
        Image.new("RGB", (40, 24), name).save(folder / "images" / f"{name}.png")
        (folder / "images" / f"{name}.txt").write_text(f"a {name} house")
    prepare_dataset(config_of(folder / "dataset").data, folder / "dataset")
    return folder / "dataset"


def config_of(dataset: Path, **changes: object) -> RunConfig:
    """A run on the images next to the dataset."""
    return make_image_config(dataset.parent / "images", **changes)


def build(dataset: Path, output: Path, **changes: object) -> Artifact:
    """Build a base and read it back, verified."""
    build_base(BuildSettings.of(config_of(dataset, **changes)), dataset, output)
    return artifact.read(output, "base")


@pytest.fixture(scope="module")
def nano(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The preset."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoencoders, "VAE_STEPS", 2)
        return build(dataset, tmp_path_factory.mktemp("nano") / "base")


@pytest.fixture
def model(nano: Artifact, tmp_path: Path) -> Path:
    """A folder of one's own in diffusers' layout."""
    folder = Path(shutil.copytree(nano.folder, tmp_path / "model"))
    (folder / "manifest.json").unlink()
    return folder


def refusal(dataset: Path, output: Path, **changes: object) -> str:
    """The message to the user; nothing may be published."""
    with pytest.raises(PipelineError) as caught:
        build_base(BuildSettings.of(config_of(dataset, **changes)), dataset, output)
    assert not output.exists()
    return str(caught.value)


def test_a_preset_is_a_whole_base(nano):
    assert set(nano.content["parts"]) == PARTS
    assert nano.content["family"] == "sdxl"
    assert (nano.content["base"], nano.content["commit"]) == ("nano", None)
    assert list(nano.parents) == ["dataset"]


FIT = "fitting the autoencoder: 2 of 2 steps"


def files_of(base: Artifact) -> dict[str, str]:
    """The sha256 of a base's files by name."""
    return {name: entry["sha256"] for name, entry in base.files.items()}


@pytest.fixture
def own_dataset(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of images and dataset, without a fit; one takes two steps."""
    monkeypatch.setattr(autoencoders, "VAE_STEPS", 2)
    shutil.copytree(dataset.parent / "images", tmp_path / "images")
    prepare_dataset(config_of(tmp_path / "dataset").data, tmp_path / "dataset")
    return tmp_path / "dataset"


def test_an_autoencoder_is_fitted_once_for_all_captions(own_dataset, tmp_path, capsys):
    """Another caption fits nothing, and the base is the one that is built without a stored fit."""
    build(own_dataset, tmp_path / "first")
    assert FIT in capsys.readouterr().err
    caption = tmp_path / "images" / "red.txt"
    caption.write_text("a very red house")
    prepare_dataset(config_of(own_dataset).data, own_dataset)
    capsys.readouterr()
    shared = build(own_dataset, tmp_path / "second")
    said = capsys.readouterr()
    assert FIT not in said.err
    assert "fitted to these images before" in said.out
    shutil.rmtree(own_dataset / "autoencoders")
    assert files_of(build(own_dataset, tmp_path / "alone")) == files_of(shared)


@pytest.mark.slow
def test_families_with_the_same_autoencoder_share_a_fit(own_dataset, tmp_path, capsys):
    build(own_dataset, tmp_path / "sdxl")
    capsys.readouterr()
    shared = build(own_dataset, tmp_path / "sd3", family="sd3")
    assert FIT not in capsys.readouterr().err
    assert build(own_dataset, tmp_path / "micro", base="micro").content["base"] == "micro"
    assert FIT not in capsys.readouterr().err
    shutil.rmtree(own_dataset / "autoencoders")
    assert files_of(build(own_dataset, tmp_path / "alone", family="sd3")) == files_of(shared)


@pytest.mark.slow
def test_an_autoencoder_is_fitted_again_for_other_images_or_seeds_or_where_it_is_damaged(
    own_dataset, tmp_path, capsys
):
    build(own_dataset, tmp_path / "first")
    whole = build(own_dataset, tmp_path / "second", seed=3)
    assert capsys.readouterr().err.count(FIT) == 2
    stored = own_dataset / "autoencoders" / "AutoencoderKL-16px-seed3" / "fitted.safetensors"
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.write_bytes(data)
    again = build(own_dataset, tmp_path / "third", seed=3)
    said = capsys.readouterr()
    assert FIT in said.err
    assert "the autoencoder is fitted again" in said.out
    assert files_of(again) == files_of(whole)
    Image.new("RGB", (40, 24), "green").save(tmp_path / "images" / "red.png")
    prepare_dataset(config_of(own_dataset).data, own_dataset)
    assert files_of(build(own_dataset, tmp_path / "green", seed=3)) != files_of(whole)
    assert FIT in capsys.readouterr().err


def test_a_folder_is_linked_not_copied(nano, model, dataset, tmp_path):
    """Its files are hashed and listed like any other, and the pipeline loads through the links."""
    (model / "unet" / "notes.bin").write_bytes(b"0")
    found = build(dataset, tmp_path / "base", base=str(model))
    assert set(found.content["parts"]) == PARTS
    assert found.parents == {}
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert found.path(weights).is_symlink()
    assert found.files[weights] == nano.files[weights]
    assert "unet/notes.bin" not in found.files
    assert "manifest.json" not in found.files
    for part in PARTS - {"model_index.json"}:
        assert found.content["parts"][part] == nano.content["parts"][part]
    StableDiffusionXLPipeline.from_pretrained(found.folder, add_watermarker=False)


def test_a_copied_base_needs_the_folder_no_more(model, dataset, tmp_path, monkeypatch):
    """`base_copy: copy` gives the same base in files of its own; `reflink` where blocks can be
    shared, and else a sentence instead of a copy that no one asked for."""
    linked = build(dataset, tmp_path / "base", base=str(model))
    monkeypatch.setattr("zerotrain.artifact.publication.reflink", lambda source, target: False)
    text = refusal(dataset, tmp_path / "other", base=str(model), base_copy="reflink")
    assert f"the file system cannot share the blocks of {model}/" in text
    assert "base_copy: copy takes room of its own" in text
    copied = build(dataset, tmp_path / "base", base=str(model), base_copy="copy")
    assert copied.identity == linked.identity
    shutil.rmtree(model)
    for name in copied.files:
        assert not (copied.folder / name).is_symlink()
    artifact.read(copied.folder, "base")


def test_a_model_that_predicts_epsilon_keeps_some_signal(model, dataset, tmp_path):
    """Without signal the noise would be what it is given; as v the same base can learn there."""
    path = model / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prediction_type": "epsilon"}))
    changes = {"base": str(model), "rescale_betas_zero_snr": True}
    text = refusal(dataset, tmp_path / "base", **changes)
    assert f"rescale_betas_zero_snr: the base {model} predicts epsilon, of which nothing" in text
    found = build(dataset, tmp_path / "base", **changes, prediction_type="v_prediction")
    schedule = json.loads(found.path("scheduler/scheduler_config.json").read_text())
    assert (schedule["prediction_type"], schedule["rescale_betas_zero_snr"]) == (
        "v_prediction",
        True,
    )


def test_a_changed_weight_changes_its_parts_digest_alone(model, dataset, tmp_path):
    """The digest is what caches depend on: the autoencoder's does not move with the U-Net's."""
    before = build(dataset, tmp_path / "base", base=str(model)).content["parts"]
    config = model / "unet" / "config.json"
    config.write_text(config.read_text() + "\n")
    after = build(dataset, tmp_path / "base", base=str(model)).content["parts"]
    assert {part for part in PARTS if before[part] != after[part]} == {"unet"}


def test_a_missing_folder_is_named(dataset, tmp_path):
    text = refusal(dataset, tmp_path / "base", base="/no/such/model")
    assert "base: there is no folder /no/such/model" in text
    assert "a preset: nano" in text


def test_a_single_file_checkpoint_is_named(dataset, tmp_path):
    file = tmp_path / "sdxl.safetensors"
    file.write_bytes(b"")
    text = refusal(dataset, tmp_path / "base", base=str(file), family="sd3")
    assert f"base: {file} is a file, not a folder" in text
    assert "from_single_file" in text


def test_a_private_file_stays_where_it_is(model, dataset, tmp_path, capsys):
    """A link to a token among a model's files ends neither in base/ nor in a sentence's way; one
    under the name of a file that is loaded stops the build."""
    token = tmp_path / "token"
    token.write_text("secret")
    (model / "vae" / "notes.txt").symlink_to(token)
    base = build(dataset, tmp_path / "base", base=str(model))
    assert not [path for path in base.folder.rglob("*") if path.name == "notes.txt"]
    assert f"{model}: not part of the model, not taken: vae/notes.txt" in capsys.readouterr().out
    (model / "vae" / "config.json").unlink()
    (model / "vae" / "config.json").symlink_to(token)
    text = refusal(dataset, tmp_path / "other", base=str(model))
    assert f"{model}: vae/config.json is a link that leads out of it, to {token}" in text


def test_a_published_base_is_a_base_again(model, dataset, tmp_path):
    """base/ of another run is made of links out of it, to files that it lists by their hashes; a
    link that was changed since is not followed."""
    base = build(dataset, tmp_path / "base", base=str(model)).folder
    again = build(dataset, tmp_path / "again", base=str(base))
    assert again.files["vae/config.json"]["sha256"]
    size = (base / "vae" / "config.json").stat().st_size
    (tmp_path / "docker.json").write_text("secret".ljust(size))
    (base / "vae" / "config.json").unlink()
    (base / "vae" / "config.json").symlink_to(tmp_path / "docker.json")
    text = refusal(dataset, tmp_path / "other", base=str(base))
    assert "vae/config.json is a link that leads out of it" in text


def test_a_revision_of_no_hub_model_is_refused(model, dataset, tmp_path):
    for base in ("nano", str(model)):
        text = refusal(dataset, tmp_path / "base", base=base, revision="main")
        assert f"revision: 'main' is set, but base {base!r} is not a hub id" in text


def test_an_unreachable_hub_is_named(dataset, tmp_path, monkeypatch):
    """No network and nothing in the hub's cache: one sentence, and what to do."""

    def unreachable(*arguments: object, **options: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    text = refusal(dataset, tmp_path / "base", base="owner/model-that-is-not-cached")
    assert "the hub cannot be reached (no route to host)" in text
    assert "HF_ENDPOINT" in text


def test_a_hub_model_in_the_local_cache_needs_no_network(model, dataset, tmp_path, monkeypatch):
    """Its commit is known from the cache."""
    commit = "0123456789abcdef0123456789abcdef01234567"

    def unreachable(*arguments: object, **options: object) -> None:
        raise ConnectionError("no route to host")

    def cached(base: str, *, revision: str | None, local_files_only: bool) -> str:
        assert (base, revision, local_files_only) == ("owner/model", None, True)
        return os.fspath(shutil.move(model, tmp_path / commit))

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    found = build(dataset, tmp_path / "base", base="owner/model")
    assert found.content["commit"] == commit
    assert set(found.content["parts"]) == PARTS
