"""The encoder of a cache waits neither for pixels nor for the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from safetensors.torch import save_file
from tests.builders.caching import SIDE, FakeFamily

from zerotrain.cache import encoding, writer
from zerotrain.cache.encoding import Encoding, batch_size

GIB = 2**30
SECONDS = 20


def test_the_next_batch_is_read_while_one_is_encoded(run, family, monkeypatch):
    """Across windows as well."""
    monkeypatch.setattr(encoding, "IMAGES_IN_WINDOW", 4)
    read = threading.Semaphore(0)
    pixels = Encoding._pixels
    waited: list[bool] = []

    def reading(self: Encoding, key: str) -> torch.Tensor:
        found = pixels(self, key)
        read.release()
        return found

    def encode(images: torch.Tensor) -> torch.Tensor:
        if len(waited) < 4:  # the next four are read without being asked for
            images_read = 4 if waited else 8
            waited.append(all(read.acquire(timeout=SECONDS) for _ in range(images_read)))
        return FakeFamily.encode_images(family, images)

    monkeypatch.setattr(Encoding, "_pixels", reading)
    monkeypatch.setattr(family, "encode_images", encode)
    run.cache(data={"num_workers": 1}, batch_size=4)
    assert waited == [True] * 4


def test_the_next_shard_is_encoded_while_one_is_written(tmp_path, monkeypatch):
    """Two keys, each in a shard of its own."""
    writing, encoding = threading.Event(), threading.Event()
    waited: list[bool] = []

    def encode(keys: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        yield {"latents": torch.zeros(100)}
        writing.wait(SECONDS)
        encoding.set()
        yield {"latents": torch.ones(100)}

    def saving(tensors, path) -> None:
        writing.set()
        waited.append(encoding.wait(SECONDS))
        save_file(tensors, path)

    monkeypatch.setattr(writer, "save_file", saving)
    keys = ["0" * 64, "f" * 64]
    stored = writer.StoredShards(tmp_path)
    written = writer.write_series("latents", keys, encode, stored, folder=tmp_path, shard_size=1000)
    assert waited == [True, True]
    assert written.series.count == 2


@pytest.mark.parametrize(
    ("side", "gpu_bytes", "images"),
    [
        (1024, None, 1),
        (512, None, 4),
        (SIDE, None, 32),
        (1024, 80 * GIB, 8),
        (1024, 24 * GIB, 2),
        (1024, 8 * GIB, 2),
        (2048, 24 * GIB, 2),
        (512, 24 * GIB, 8),
    ],
)
def test_a_gpu_encodes_several_images_at_a_time(side, gpu_bytes, images):
    """By its memory; on a CPU by the size of the images alone."""
    assert batch_size((side, side), gpu_bytes) == images
