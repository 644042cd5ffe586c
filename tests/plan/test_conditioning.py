"""What conditioning images add to a plan: tokens of the transformer and of the text, and cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.runs import make_config
from tests.plan.conftest import SMALL

from zerotrain.config.run import RunConfig
from zerotrain.launch.planner.activations import Forward
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.shape import Shape, text_tokens
from zerotrain.launch.planner.storage import conditioning_bytes

SIDE, BATCH, TOKENS = 128, 2, 24
LATENTS = 16
"""A side of latents of 128 pixels, where no autoencoder says another factor than 8."""


class Recorder(torch.nn.Module):
    """A transformer that answers zeros, and knows the shapes that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: dict[str, Any] = {}

    def forward(self, **given: Any) -> tuple[torch.Tensor]:
        self.seen = {
            name: value.shape if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
            if value is not None
        }
        return (given["hidden_states"] * self.weight,)


def run_of(family: str, base: str, count: int, **data: Any) -> RunConfig:
    """A run whose samples have so many conditioning images."""
    given = {"conditioning_images": [f"{n}" for n in range(count)]} if count else {}
    return make_config(family=family, base=base, data={"images": "x", **given, **data})


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("family", ["flux", "qwen_image"])
def test_conditioning_images_are_tokens_of_the_plan(family, count):
    """Tokens of conditioning images follow those of the image."""
    planned = Recorder()
    shape = Shape(BATCH, resolution=SIDE, tokens=TOKENS, conditioning_images=count)
    assert Forward(SMALL[family]).loss_of(planned, shape)() == 0
    assert planned.seen["hidden_states"][1] == (1 + count) * 64
    assert planned.seen["encoder_hidden_states"][1] == TOKENS


def test_a_mask_of_fill_adds_no_tokens():
    """Its image and mask are channels of the transformer's input."""
    architecture = find_architecture("flux", "black-forest-labs/FLUX.1-Fill-dev")
    model = Recorder()
    shape = Shape(1, resolution=64, tokens=TOKENS, conditioning_images=2)
    with pytest.raises(RuntimeError):  # it answers with all channels that it takes
        Forward(architecture).loss_of(model, shape)()
    assert model.seen["hidden_states"] == (1, 16, 384)
    assert conditioning_bytes(architecture, shape, "bf16") == 2 * (16 * 8 * 8 + 64 * 64)


@pytest.mark.parametrize(("base", "tokens"), [
    ("Qwen/Qwen-Image", 0), ("Qwen/Qwen-Image-Edit", 37**2), ("Qwen/Qwen-Image-Edit-2509", 14**2),
])  # fmt: skip
def test_captions_have_the_tokens_of_images_that_the_text_encoder_sees(base, tokens):
    """Of the first Qwen-Image-Edit at the resolution, of later ones at 384 pixels; 28 a token."""
    shape = Shape.of(run_of("qwen_image", base, 1), base, 1, 1024)
    assert (shape.conditioning_images, shape.image_text_tokens) == (1, tokens)
    assert text_tokens(SMALL["qwen_image"], shape) == 512 + tokens
    twice = Shape.of(run_of("qwen_image", base, 2), base, 1, 1024)
    assert twice.image_text_tokens == 2 * tokens


def test_the_image_of_redux_is_tokens_of_text_alone(tmp_path):
    """729 a caption, of SigLIP's 27 x 27 patches, and no latents; by the parts of the base."""
    (tmp_path / "image_embedder").mkdir()
    for base in ("a/dev:transformer/*,a/redux:image_embedder/x", str(tmp_path)):
        shape = Shape.of(run_of("flux", base, 1), base, 1, 1024)
        assert text_tokens(SMALL["flux"], shape) == 512 + 729
        assert conditioning_bytes(SMALL["flux"], shape, "bf16") == 0


def test_a_folder_says_what_it_is(tmp_path: Path):
    """By its model_index.json, whatever its name."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImageEditPlusPipeline"}')
    run = run_of("qwen_image", str(tmp_path), 2)
    assert Shape.of(run, str(tmp_path), 1, 512).image_text_tokens == 2 * 14**2


def test_columns_and_folders_count_and_are_cached():
    base = "black-forest-labs/FLUX.1-Kontext-dev"
    columns = run_of("flux", base, 0, conditioning_columns=["a", "b"], metadata="t.csv")
    for run in (columns, run_of("flux", base, 2)):
        shape = Shape.of(run, base, 1, 512)
        assert shape.conditioning_images == 2
        assert conditioning_bytes(SMALL["flux"], shape, "fp32") == 4 * 2 * (
            SMALL["flux"].trained.config["in_channels"] // 4 * 64 * 64
        )
    plain = Shape.of(run_of("flux", base, 0), base, 1, 512)
    assert conditioning_bytes(SMALL["flux"], plain, "fp32") == 0
