"""Images of equal bytes, and images that look alike."""

from __future__ import annotations

import io
import random

from PIL import Image
from tests.builders.photographs import open_photograph

from zerotrain.data.image_summary import (
    DISTANCE,
    NearGroup,
    equal_groups,
    near_groups,
    perceptual_hash,
)


def saved_again(image: Image.Image, scale: float, quality: int, format: str) -> Image.Image:
    """The image as another program might have written it."""
    file = io.BytesIO()
    size = (round(image.width * scale), round(image.height * scale))
    image.resize(size).save(file, format, quality=quality)
    return Image.open(file).convert("RGB")


def test_equal_bytes_are_grouped_in_their_order() -> None:
    keys = [("a", 1), ("b", 2), ("c", 1), ("d", 3), ("e", 2), ("f", 1)]
    assert equal_groups(keys) == [["a", "c", "f"], ["b", "e"]]


def test_hashes_are_near_up_to_the_distance() -> None:
    """Four bits are near and six are not, wherever they are; the nearest first file counts."""
    base = 0x0123456789ABCDEF
    hashes = {
        "first": base,
        "near": base ^ 0b1111,
        "spread": base ^ (1 << 63 | 1 << 40 | 1 << 20 | 1),
        "far": base ^ 0b111111 << 30,
        "near far": base ^ 0b111111 << 30 ^ 0b11,
        "alone": ~base & 2**64 - 1,
    }
    assert DISTANCE == 4
    assert near_groups(hashes) == [
        NearGroup(("first", "near", "spread"), (0, 4, 4)),
        NearGroup(("far", "near far"), (0, 2)),
    ]


def test_a_chain_of_small_steps_joins_no_unlike_images() -> None:
    """Each file is near the first of its group, not only near another one of it."""
    steps = {str(number): (1 << 2 * number) - 1 for number in range(9)}
    groups = near_groups(steps)
    assert [group.files for group in groups] == [("0", "1", "2"), ("3", "4", "5"), ("6", "7", "8")]
    assert all(max(group.distances) <= DISTANCE for group in groups)


def test_comparing_parts_finds_what_comparing_all_finds() -> None:
    """Hashes in clusters, against every pair."""
    draw = random.Random(0)
    bases = [draw.getrandbits(64) for _ in range(20)]
    hashes = {}
    for number in range(300):
        flips = draw.sample(range(64), draw.randrange(5))
        hashes[str(number)] = draw.choice(bases) ^ sum(1 << bit for bit in flips)
    firsts: dict[str, list[str]] = {}
    for name, found in hashes.items():
        bits = {first: (hashes[first] ^ found).bit_count() for first in firsts}
        nearest = min(bits, key=bits.__getitem__, default=None)
        if nearest is None or bits[nearest] > DISTANCE:
            firsts[name] = []
        else:
            firsts[nearest].append(name)
    expected = [(first, *others) for first, others in firsts.items() if others]
    assert len(expected) > 10
    assert [group.files for group in near_groups(hashes)] == expected


def test_photographs_that_were_saved_again_look_alike() -> None:
    """Smaller, larger and compressed ones do; a mirrored one and another photograph do not."""
    china, flower = open_photograph("china"), open_photograph("flower")
    own = perceptual_hash(china)
    for scale, quality, format in [(0.5, 95, "JPEG"), (1.5, 95, "JPEG"), (1, 30, "JPEG")]:
        again = saved_again(china, scale, quality, format)
        assert (own ^ perceptual_hash(again)).bit_count() <= DISTANCE
    assert (own ^ perceptual_hash(saved_again(china, 0.4, 30, "WEBP"))).bit_count() <= DISTANCE
    mirrored = china.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for other in (flower, mirrored, china.crop((0, 0, 320, 427))):
        assert (own ^ perceptual_hash(other)).bit_count() > 2 * DISTANCE
