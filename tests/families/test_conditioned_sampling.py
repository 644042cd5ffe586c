"""What `draw` and `sample_latents` give a pipeline that takes conditioning images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.builders.images import build_nano, make_pictures

from zerotrain.config.models import EvaluateConfig
from zerotrain.data.buckets import to_pixels
from zerotrain.errors import PipelineError
from zerotrain.models.families import load_family
from zerotrain.models.families.conditioned_sampling import conditioning_pixels
from zerotrain.models.families.diffusion import DiffusionFamily

PROMPTS = ["a red house", "a blue house"]
VALUES = EvaluateConfig(num_inference_steps=2, batch_size=2)


FAMILY: Any = load_family("flux")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano Flux whose model_index.json names the pipeline of Kontext."""
    folder = tmp_path_factory.mktemp("kontext") / "base"
    return build_nano("flux", folder, pipeline="FluxKontextPipeline")


def test_images_of_any_size_are_cut_to_the_centre_square_and_scaled():
    """Of a wide image the middle is read, of a large square all of it."""
    square = make_pictures(16, 1)[0]
    wide = Image.new("RGB", (32, 16), "red")
    wide.paste(square, (8, 0))
    [pixels] = conditioning_pixels([[wide, square, Image.new("RGB", (64, 64), "blue")]], 16)
    assert pixels.shape == (3, 3, 16, 16)
    np.testing.assert_array_equal(pixels[0], to_pixels(square))
    np.testing.assert_array_equal(pixels[1], to_pixels(square))
    assert pixels[2].unique().tolist() == [-1.0, 1.0]


def test_the_pipeline_is_the_one_that_the_folder_names(base, nano, tmp_path):
    """A class that is none of the family's own counts as the plain one."""
    assert DiffusionFamily.pipeline_name(FAMILY, base) == "FluxKontextPipeline"
    assert load_family("sdxl").pipeline_name(nano) == "StableDiffusionXLPipeline"
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxOtherPipeline"}')
    assert DiffusionFamily.pipeline_name(FAMILY, tmp_path) == "FluxPipeline"


def test_a_family_without_an_input_for_them_says_so(nano):
    family = load_family("sdxl")
    pipeline = family.load_pipeline(nano, "cpu")
    with pytest.raises(PipelineError, match="sdxl has no input for conditioning images"):
        family.draw(
            pipeline, PROMPTS[:1], [7], VALUES, resolution=16, conditioning=[make_pictures(16, 1)]
        )
