"""Models that are larger than the device are used from the host's memory, with the same numbers.

No GPU is needed: the library's hooks are the same on a CPU whose memory is reported to be small.
"""

from __future__ import annotations

import pytest
import torch
from tests.builders.images import draw_house

from zerotrain.models.families import load_family, pipelines
from zerotrain.models.families.pipelines import (
    Placement,
    choose_placement,
    place_model,
    place_pipeline,
)

GIB = 2**30
QWEN_IMAGE = (38 * GIB, 15 * GIB, GIB // 4)
FLUX = (22 * GIB, 9 * GIB, GIB // 4, GIB // 6)


@pytest.mark.parametrize(
    ("sizes", "free", "expected"),
    [
        (QWEN_IMAGE, 78, Placement.WHOLE),
        (QWEN_IMAGE, 47, Placement.PARTS),
        (QWEN_IMAGE, 23, Placement.LAYERS),
        (FLUX, 47, Placement.WHOLE),
        (FLUX, 31, Placement.PARTS),
        (FLUX, 23, Placement.LAYERS),
        ((38 * GIB,), 47, Placement.WHOLE),
        ((38 * GIB,), 41, Placement.LAYERS),
        (QWEN_IMAGE, None, Placement.WHOLE),
    ],
)
def test_the_fastest_placement_that_fits_is_chosen(sizes, free, expected):
    """With 4 GiB for activations; of a single model the part at work would be the whole."""
    assert choose_placement(sizes, free and free * GIB) is expected


@pytest.fixture
def small(monkeypatch):
    """Call with bytes that are given as free, and kept free for activations."""

    def make(free: int) -> None:
        monkeypatch.setattr(pipelines, "WORKING", 0)
        monkeypatch.setattr(pipelines, "free_device_bytes", lambda _: free)

    return make


@pytest.mark.parametrize(("name", "fitting"), zip(["sdxl", "sd3", "sd3"], Placement, strict=True))
def test_images_are_the_same_wherever_the_models_lie(name, fitting, small, request, capsys):
    family = load_family(name)
    folder = request.getfixturevalue("nano" if name == "sdxl" else "nano_sd3")
    pipeline = family.load_pipeline(folder, "cpu")
    expected = draw_house(pipeline)
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    sizes = [sum(t.nbytes for t in (*p.parameters(), *p.buffers())) for p in parts]
    small({"WHOLE": sum(sizes), "PARTS": max(sizes), "LAYERS": 1}[fitting.name])
    assert draw_house(place_pipeline(pipeline, "cpu")) == expected
    said = capsys.readouterr().err
    assert (f"{fitting} is there at a time" in said) == (fitting is not Placement.WHOLE)
    assert hasattr(pipeline.vae, "_hf_hook") == (fitting is Placement.PARTS)
    assert hasattr(pipeline.vae.post_quant_conv, "_diffusers_hook") == (fitting is Placement.LAYERS)


def test_a_model_answers_the_same_layer_by_layer(small, nano_sd3):
    model = load_family("sd3").load_trained(nano_sd3)
    source = torch.Generator().manual_seed(0)
    config = model.config
    arguments = {
        "hidden_states": torch.randn(1, config.in_channels, 4, 4, generator=source),
        "encoder_hidden_states": torch.randn(1, 8, config.joint_attention_dim, generator=source),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, generator=source),
        "timestep": torch.tensor([500.0]),
    }
    with torch.inference_mode():
        expected = model(**arguments).sample
        small(1)
        placed = place_model(model, "cpu")
        assert hasattr(placed.proj_out, "_diffusers_hook")
        assert torch.equal(placed(**arguments).sample, expected)
