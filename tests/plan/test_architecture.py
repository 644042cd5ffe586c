"""Architectures: shipped ones, folders and the headers of files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from zerotrain.artifact.documents import read_header
from zerotrain.errors import PipelineError
from zerotrain.launch.planner import architecture
from zerotrain.launch.planner.architecture import find_architecture, read_shipped

COUNTS = {
    "stabilityai/stable-diffusion-xl-base-1.0": 2_567_463_684,
    "stabilityai/stable-diffusion-3-medium-diffusers": 2_028_328_000,
    "Qwen/Qwen-Image": 20_430_401_088,
    "Qwen/Qwen-Image-Edit": 20_430_401_088,
    "Qwen/Qwen-Image-Edit-2509": 20_430_401_088,
    "Qwen/Qwen-Image-Edit-2511": 20_430_401_088,
    "FireRedTeam/FireRed-Image-Edit-1.0": 20_430_401_088,
    "FireRedTeam/FireRed-Image-Edit-1.1": 20_430_401_088,
    "black-forest-labs/FLUX.1-dev": 11_901_408_320,
    "black-forest-labs/FLUX.1-Kontext-dev": 11_901_408_320,
    "black-forest-labs/FLUX.1-Fill-dev": 11_902_391_360,
    "ostris/Flex.2-preview": 8_163_669_568,
    "Qwen/Qwen1.5-7B": 7_721_324_544,
    "PyTorch-NPU/qwen1.5_7b_chat": 7_721_324_544,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "facebook/bart-large": 406_291_456,
    "bigscience/T0_3B": 2_849_757_184,
}


@pytest.mark.parametrize("base", COUNTS)
def test_models_of_recipes_are_known_by_their_hub_ids(base):
    family = next(known.family for known in read_shipped() if base in known.source.split(", "))
    assert find_architecture(family, base).trained.parameters == COUNTS[base]


def test_only_edit_2511_has_a_timestep_of_zero_for_conditioning_images():
    """It makes activations of the modulation larger; the plain one stands first."""
    found = {
        a.source: a.trained.config.get("zero_cond_t", False) for a in read_shipped("qwen_image")
    }
    assert [*found.values()] == [False, True]
    assert [*found][1] == "Qwen/Qwen-Image-Edit-2511"


def test_a_model_of_another_family_is_refused_with_its_own():
    with pytest.raises(PipelineError, match="is of the family flux") as refused:
        find_architecture("sdxl", "black-forest-labs/FLUX.1-dev")
    assert refused.value.hint == "set family: flux"
    with pytest.raises(PipelineError, match="no folder or file here") as refused:
        find_architecture("qwen_image", "Qwen/Qwen-Imag")
    assert "Qwen/Qwen-Image" in refused.value.hint


def test_a_folder_is_read_by_its_config_files(tmp_path):
    """Only models count: schedulers and tokenizers have no parameters."""
    (known,) = read_shipped("sd3")
    index = {"_class_name": "StableDiffusion3Pipeline"}
    for name, part in known.parts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(part.config))
        index[name] = [part.library, part.class_name]
    index |= {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}
    index |= {"tokenizer": ["transformers", "CLIPTokenizer"], "image_encoder": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    found = find_architecture("sd3", str(tmp_path))
    assert {n: (p.class_name, p.config) for n, p in found.parts.items()} == {
        n: (p.class_name, p.config) for n, p in known.parts.items()
    }
    with pytest.raises(PipelineError, match="the part unet is missing"):
        find_architecture("sdxl", str(tmp_path))
    (tmp_path / "transformer" / "config.json").unlink()
    with pytest.raises(PipelineError, match="no such file"):
        find_architecture("sd3", str(tmp_path))


def test_a_folder_is_read_without_parts_that_training_does_not_load(tmp_path):
    """SD3's T5 may be listed and absent; parts that the family does not know may lie there."""
    (known,) = read_shipped("sd3")
    index = {"image_processor": ["transformers", "CLIPImageProcessor"]}
    for name, part in known.parts.items():
        index[name] = [part.library, part.class_name]
        if name != "text_encoder_3":
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps(part.config))
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    found = find_architecture("sd3", str(tmp_path))
    assert found.parts.keys() == known.parts.keys() - {"text_encoder_3"}


def test_a_folder_of_a_language_model_names_its_class(tmp_path):
    config = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = find_architecture("causal_lm", str(tmp_path)).trained
    assert (found.library, found.class_name) == ("transformers", "Qwen2ForCausalLM")
    for family, kind, name in (
        ("causal_lm", "qwen2", "Qwen2ForCausalLM"),
        ("seq2seq_lm", "t5", "T5ForConditionalGeneration"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert find_architecture(family, str(tmp_path)).trained.class_name == name
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PipelineError, match="it names no class"):
        find_architecture("causal_lm", str(tmp_path))


@pytest.fixture
def small_sd3(tmp_path, monkeypatch):
    """A shipped SD3 of 30 parameters."""
    parts = {
        "transformer": {
            "library": "diffusers",
            "class": "SD3Transformer2DModel",
            "parameters": 30,
            "config": {},
        }
    }
    models = tmp_path / "models"
    models.mkdir()
    document = {"hub": ["a/b"], "family": "sd3", "parts": parts}
    (models / "sd3.json").write_text(json.dumps(document))
    monkeypatch.setattr(architecture, "MODELS", models)


@pytest.mark.usefixtures("small_sd3")
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "transformer."])
def test_a_single_file_is_recognised_by_its_header(tmp_path, prefix):
    """Other parts than the denoiser and SD3's table of positions do not count."""
    tensors = {f"{prefix}a": torch.zeros(4, 5), f"{prefix}b": torch.zeros(10)}
    tensors[f"{prefix}pos_embed"] = torch.zeros(7)
    if prefix:
        tensors["first_stage_model.a"] = torch.zeros(3)
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    assert read_header(file).shapes[f"{prefix}a"] == (4, 5)
    assert find_architecture("sd3", str(file)).trained.class_name == "SD3Transformer2DModel"
    save_file({"a": torch.zeros(31)}, file)
    with pytest.raises(PipelineError, match=r"31 parameters of a denoiser .* have 30 \(a/b\)"):
        find_architecture("sd3", str(file))
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(PipelineError, match="its header ends after"):
        find_architecture("sd3", str(file))
