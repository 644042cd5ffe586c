"""Encoding on the GPU: batches give what single images give, and keys name the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.builders.images import make_image_config, prepare_inputs, write_pictures
from tests.gpu.conftest import DEVICE

from zerotrain import artifact
from zerotrain.cache.layout import LATENTS
from zerotrain.cache.reader import Cache, read_cache
from zerotrain.stages.cache_latents import CacheSettings, cache_latents

pytestmark = pytest.mark.gpu

SIDE, COUNT = 16, 12
BOUND = {"fp32": 1e-5, "bf16": 2.0**-7}
"""Of the largest value: in fp32 kernels of other batch sizes add in another order; bf16 is what the
latents are rounded to, and a value at the border may go either way."""


def largest_difference(one: Cache, other: Cache) -> float:
    """Of all tensors of all samples, relative to each tensor's largest value."""
    most = 0.0
    assert len(one.entries) == len(other.entries) == COUNT
    for number in range(COUNT):
        first, second = one.sample(number), other.sample(number)
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            if tensor.is_floating_point():
                scale = float(tensor.float().abs().max()) or 1.0
                difference = (tensor.float() - second[name].float()).abs().max()
                most = max(most, float(difference) / scale)
    return most


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux", "qwen_image"])
def test_batches_encode_as_single_images(tmp_path: Path, family: str, dtype: str) -> None:
    """Latents and embeddings within the type's bound; a second encoding to the bit; and the kind of
    device is recorded, as it is in the keys."""
    images = write_pictures(tmp_path / "images", ("a red house", "boat"), SIDE, COUNT)

    def config(batch_size: int) -> object:
        return make_image_config(
            images, family=family, cache={"dtype": dtype, "batch_size": batch_size}
        )

    prepare_inputs(config(4), tmp_path, steps=2)

    def encode(name: str, batch_size: int) -> Cache:
        cache_latents(
            CacheSettings.of(config(batch_size)), SIDE, tmp_path / "dataset", tmp_path / "base",
            tmp_path / name,
        )  # fmt: skip
        found = read_cache(tmp_path / name)
        assert isinstance(found, Cache)
        return found

    four, again, single = read_cache(tmp_path / "cache"), encode("again", 4), encode("single", 1)
    assert isinstance(four, Cache)
    for number in range(COUNT):
        first, second = four.sample(number), again.sample(number)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert torch.isfinite(first[LATENTS].float()).all()
    apart = largest_difference(four, single)
    print(f"{family} {dtype}: {apart:.1e}")
    assert apart <= BOUND[dtype]
    assert artifact.read(tmp_path / "cache", "cache").made_by["device"] == DEVICE
