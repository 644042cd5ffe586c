"""Where the parts of a pipeline lie while they encode, in which type, and how it is guided."""

from __future__ import annotations

import inspect

import pytest
import torch

from zerotrain.config.models import EvaluateConfig
from zerotrain.models.families import load_family

PIXELS = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
TEXT = {"nano": ["text_encoder", "text_encoder_2"]}
TEXT["nano_sd3"] = [*TEXT["nano"], "text_encoder_3"]


@pytest.fixture(params=["nano", "nano_sd3"])
def base(request):
    """A family and its small model."""
    family = load_family("sdxl" if request.param == "nano" else "sd3")
    return family, request.getfixturevalue(request.param), TEXT[request.param]


def test_autoencoder_and_text_encoders_are_on_the_device_in_turns(base, monkeypatch):
    """What works comes once the others have left; nothing is there before it works."""
    family, folder, text = base
    encoders = family.load_encoders(folder, "cuda")
    names = {id(part): name for name, part in encoders.pipeline.components.items()}
    moves: list[tuple[str, str]] = []
    monkeypatch.setattr(
        torch.nn.Module, "to", lambda part, device: moves.append((names[id(part)], device))
    )
    encoders.encode_images(PIXELS)
    assert sorted(moves[:-1]) == [(name, "cpu") for name in text]
    assert moves[-1] == ("vae", "cuda")
    moves.clear()
    encoders.encode_prompts(["a red house"])
    assert moves[0] == ("vae", "cpu")
    assert sorted(moves[1:]) == [(name, "cuda") for name in text]


def test_text_is_encoded_in_the_type_that_is_asked_for_and_images_in_float32(base):
    """Close to float32's within the 8 bits of a bfloat16."""
    family, folder, text = base
    exact, rounded = (
        family.load_encoders(folder, "cpu", dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert {getattr(rounded.pipeline, name).dtype for name in text} == {torch.bfloat16}
    assert torch.equal(rounded.encode_images(PIXELS), exact.encode_images(PIXELS))
    for name, expected in exact.encode_prompts(["a red house"]).items():
        found = rounded.encode_prompts(["a red house"])[name]
        assert found.dtype == torch.float32
        assert not torch.equal(found, expected)
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_guidance_is_the_pipelines_own_where_nothing_is_set(base):
    """5 for SDXL, 7 for SD3."""
    family, folder, _ = base
    pipeline = family.load_pipeline(folder, "cpu")
    said = family.sampling_arguments(pipeline, EvaluateConfig(), None)
    assert "guidance_scale" not in said
    assert family.sampling_arguments(pipeline, EvaluateConfig(guidance_scale=3.0), None) == {
        **said,
        "guidance_scale": 3.0,
    }
    default = inspect.signature(type(pipeline).__call__).parameters["guidance_scale"].default
    assert default == {"sdxl": 5.0, "sd3": 7.0}[family.name]
