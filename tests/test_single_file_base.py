"""A base that is one file in SDXL's original layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.builders.runs import make_run
from tests.formats.conftest import base, whole  # noqa: F401

from zerotrain import artifact
from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.export.command import convert
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.stages.build_base import BuildSettings
from zerotrain.stages.build_base import build_base as build_stage

PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")


@pytest.fixture(scope="module")
def exported(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A whole model as `export --to ldm` writes it."""
    folder = tmp_path_factory.mktemp("single") / "ldm"
    convert(whole, "ldm", folder)
    return folder


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    """The file and its config/ without a manifest, as a user has them."""
    shutil.copytree(exported, tmp_path / "own")
    (tmp_path / "own" / "manifest.json").unlink()
    return tmp_path / "own" / "model.safetensors"


def build(file: Path, out: Path, **changes: Any) -> artifact.Artifact:
    """The base that the stage makes of the file."""
    raw = make_run(base=str(file), data={"source": "digits"}) | changes
    build_stage(BuildSettings.of(parse_config(raw, "test")), None, out)
    return artifact.read(out, "base")


def refusal(file: Path, out: Path, **changes: Any) -> str:
    with pytest.raises(PipelineError) as caught:
        build(file, out, **changes)
    assert not out.exists()
    return str(caught.value)


def tensors(folder: Path, part: str) -> dict[str, torch.Tensor]:
    (file,) = (folder / part).glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize(("dtype", "named"), [("fp32", "folder"), ("fp16", "file")])
def test_an_exported_ldm_is_a_base_bit_for_bit(whole, tmp_path, dtype, named):  # noqa: F811
    """Every tensor of every part, in its type, and the small files as they were."""
    convert(whole, "ldm", tmp_path / "ldm", dtype=dtype)
    file = tmp_path / "ldm" / ("" if named == "folder" else "model.safetensors")
    published = build(file, tmp_path / "base")
    sha256 = artifact.file_sha256(tmp_path / "ldm" / "model.safetensors")
    assert published.content["file_sha256"] == sha256
    made = published.folder
    for part in PARTS:
        expected, found = tensors(whole, part), tensors(made, part)
        assert found.keys() == expected.keys()
        kind = {"fp32": torch.float32, "fp16": torch.float16}[dtype]
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name].to(kind)), name
        assert (made / part / "config.json").read_text() == (
            whole / part / "config.json"
        ).read_text()
    assert find_architecture("sdxl", str(file)).trained.config["cross_attention_dim"] == 128


def change(file: Path, **tensors: torch.Tensor | None) -> None:
    """Put tensors into a file in place, or take those whose names begin so."""
    found = load_file(file)
    for name, tensor in tensors.items():
        found = {key: value for key, value in found.items() if not key.startswith(name)}
        if tensor is not None:
            found[name] = tensor
    save_file(found, file)


def test_averaged_weights_and_marks_are_understood(copied, tmp_path, capsys):
    """EMA keys are left out aloud; the marks of v prediction change the run's own scheduler."""
    own = copied.parent / "config" / "scheduler" / "scheduler_config.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"prediction_type": "epsilon"}))
    before = own.read_text()
    marks = {"v_pred": torch.empty(0), "ztsnr": torch.empty(0)}
    change(copied, **{"model_ema.diffusion_modelx": torch.ones(1)}, **marks)
    made = build(copied, tmp_path / "base").folder
    said = capsys.readouterr().out
    assert "1 tensors, such as model_ema.diffusion_modelx, are not taken: averaged weights" in said
    scheduler = json.loads((made / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "v_prediction"
    assert scheduler["rescale_betas_zero_snr"] is True
    assert own.read_text() == before


def test_files_that_are_no_whole_sdxl_are_a_sentence(copied, tmp_path):
    change(copied, first_stage_model=None)
    assert f"base: {copied} has no autoencoder" in refusal(copied, tmp_path / "base")
    names = {
        "lora_unet_x.lora_down.weight": "a LoRA in kohya's layout",
        "cond_stage_model.transformer.x": "Stable Diffusion 1.x",
        "conditioner.embedders.0.model.x": "SDXL's refiner",
        "model.diffusion_model.joint_blocks.0.x": "SD3",
    }
    for name, kind in names.items():
        save_file({name: torch.ones(1)}, copied)
        assert f"base: {copied} is {kind}, and not a whole SDXL" in refusal(
            copied, tmp_path / "base"
        )
    copied.write_bytes(b"")
    text = refusal(copied, tmp_path / "base")
    assert f"{copied}: no safetensors file" in text


def test_where_tokenizers_come_from_is_reported(copied, tmp_path, monkeypatch):
    """Without config/ and without the hub; and of a config/ that is not whole."""
    shutil.rmtree(copied.parent / "config" / "tokenizer_2")
    assert "has no files of the part tokenizer_2" in refusal(copied, tmp_path / "base")
    shutil.rmtree(copied.parent / "config")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    text = refusal(copied, tmp_path / "base")
    assert "holds weights alone; its tokenizers and configurations are looked for in" in text
    assert "stabilityai/stable-diffusion-xl-base-1.0" in text


def test_a_file_of_another_family_is_refused(copied, tmp_path):
    text = refusal(copied, tmp_path / "base", family="flux")
    assert f"base: {copied} is a file, not a folder" in text
    assert "from_single_file" in text
