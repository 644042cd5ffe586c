"""Aspect buckets: which size an image is trained at, and which part of it."""

from __future__ import annotations

from collections import Counter

import pytest
from PIL import Image

from zerotrain.config.data import BucketConfig
from zerotrain.data.buckets import (
    View,
    bucket_sizes,
    centre_crop,
    choose_bucket,
    choose_views,
    crop_and_resize,
    merge_small,
    square_view,
)
from zerotrain.data.dataset import Sample


def sample(size: tuple[int, int], sha256: str = "0" * 64, split: str = "train") -> Sample:
    return Sample(
        "a.png",
        sha256,
        "a",
        "b",
        size,
        size,
        centre_crop(size),
        split,  # type: ignore[arg-type]
    )


def test_the_sizes_are_those_that_sdxl_was_trained_at():
    """Podell et al. 2023, appendix I: about a million pixels, multiples of 64."""
    sizes = bucket_sizes(1024, BucketConfig())
    known = [(1024, 1024), (960, 1088), (896, 1152), (832, 1216), (768, 1344), (768, 1280)]
    for width, height in known:
        assert (width, height) in sizes
        assert (height, width) in sizes
    for width, height in sizes:
        assert width % 64 == height % 64 == 0
        assert width * height <= 1024**2
        assert 0.5 <= width / height <= 2


@pytest.mark.parametrize(
    ("original", "expected"),
    [
        ((4000, 4000), (1024, 1024)),
        ((3000, 2000), (1216, 832)),
        ((2000, 3000), (832, 1216)),
        ((1920, 1080), (1344, 768)),
        ((9000, 1000), (1408, 704)),
    ],
)
def test_an_image_gets_the_nearest_shape(original, expected):
    """Also one that is wider than the widest bucket."""
    assert choose_bucket(original, 1024, BucketConfig()) == expected


def test_there_is_always_a_square():
    """Also where no other shape is asked for, and the side is no multiple of the alignment."""
    assert bucket_sizes(100, BucketConfig(min_aspect=1, max_aspect=1)) == ((64, 64),)


def test_a_small_image_is_enlarged_no_more_than_allowed():
    """It gets a bucket with at most as many pixels as it has, times the factor."""
    small = (600, 400)
    assert choose_bucket(small, 1024, BucketConfig()) == (1216, 832)
    assert choose_bucket(small, 1024, BucketConfig(max_upscale=1)) == (512, 384)
    assert choose_bucket(small, 1024, BucketConfig(max_upscale=2)) == (1152, 768)
    assert choose_bucket((20, 20), 1024, BucketConfig(max_upscale=1)) == (64, 64)
    for original in ((2000, 500), (4000, 250), (1157, 827)):
        size = choose_bucket(original, 1024, BucketConfig(max_upscale=1))
        assert size[0] <= original[0]
        assert size[1] <= original[1]


def test_own_sizes_replace_the_computed_ones():
    """Those of more pixels than the resolution's square are for phases of a larger one."""
    own = BucketConfig(sizes=((512, 512), (640, 384), (1024, 1024)))
    assert bucket_sizes(512, own) == ((512, 512), (640, 384))
    few = BucketConfig(sizes=((512, 512), (640, 384)), max_upscale=1)
    assert choose_bucket((100, 100), 512, few) == (640, 384)
    with pytest.raises(ValueError, match="520x512 is no multiple of alignment: 64"):
        BucketConfig(sizes=((520, 512),))


def view_of(size: tuple[int, int], crop: str, sha256: str = "0" * 64) -> View:
    [view] = choose_views(
        [sample(size, sha256)],
        64,
        BucketConfig(alignment=16, crop=crop),  # type: ignore[arg-type]
    )
    return view


def test_only_the_excess_of_one_side_is_cut():
    """The box has the bucket's shape, to a pixel; both ends lose the same."""
    view = view_of((300, 200), "center")
    assert 300 in view.box or 200 in view.box
    assert abs(view.box[2] / view.box[3] - view.size[0] / view.size[1]) < 1 / 188
    left, top, width, height = view.box
    assert abs((300 - width) // 2 - left) <= 1
    assert abs((200 - height) // 2 - top) <= 1


def test_a_random_part_is_drawn_from_the_content():
    """Equal images have equal parts, others different ones, all within the image."""
    digests = [f"{number:064x}" for number in range(1 << 56, (1 << 56) + 40)]
    digests = [digest[::-1] for digest in digests]
    boxes = [view_of((300, 90), "random", digest).box for digest in digests]
    assert boxes == [view_of((300, 90), "random", digest).box for digest in digests]
    assert len({box[0] for box in boxes}) > 20
    assert all(left >= 0 and left + width <= 300 for left, _, width, _ in boxes)


def test_without_a_crop_the_whole_image_is_stretched():
    view = view_of((300, 200), "none")
    assert view.box == (0, 0, 300, 200)
    assert view.dropped((300, 200)) == 0
    across, down = view.size[0] / 300, view.size[1] / 200
    assert view.stretch == max(across, down) / min(across, down)
    assert view.cut(Image.new("RGB", (300, 200))).size == view.size


@pytest.mark.parametrize("size", [(200, 200), (301, 300), (64, 64)])
def test_a_square_bucket_is_the_centre_square(size):
    """So that its latents are those of a run without buckets."""
    view = view_of(size, "center")
    assert view == square_view(centre_crop(size), 64)
    image = Image.effect_noise(size, 60).convert("RGB")
    assert view.cut(image).tobytes() == crop_and_resize(image, centre_crop(size), 64).tobytes()


@pytest.mark.parametrize("crop", ["center", "random", "none"])
def test_another_image_of_the_same_shape_is_cut_alike(crop):
    """Of one size the same box; of three times the size three times; of half of it, to a pixel."""
    for number, size in enumerate([(300, 200), (101, 333), (64, 64), (1, 1), (3, 2)]):
        view = view_of(size, crop, f"{number + 1:x}" * 64)
        assert view.of_other(size, size) == view
        tripled = view.of_other(size, (3 * size[0], 3 * size[1]))
        assert tripled == View((*(3 * one for one in view.box),), view.size)
        half = (-(-size[0] // 2), -(-size[1] // 2))
        left, top, width, height = box = view.of_other(size, half).box
        assert max(abs(2 * a - b) for a, b in zip(box, view.box, strict=True)) <= 2
        assert min(left, top) >= 0
        assert min(width, height) >= 1
        assert left + width <= half[0]
        assert top + height <= half[1]


def test_the_condition_of_sdxl_is_the_crop_in_the_scaled_image():
    """Top and left."""
    assert View((30, 0, 100, 50), (200, 100)).crop_top_left == (0, 60)
    assert View((0, 30, 100, 50), (200, 100)).crop_top_left == (60, 0)


def test_small_buckets_join_the_nearest_shape():
    """The smallest first; what it joins may then be large enough."""
    counts = Counter({(64, 64): 9, (80, 48): 1, (96, 48): 2, (48, 80): 4})
    assert merge_small(counts, 3) == {
        (64, 64): (64, 64), (80, 48): (96, 48), (96, 48): (96, 48), (48, 80): (48, 80),
    }  # fmt: skip
    assert {*merge_small(counts, 100).values()} == {(64, 64)}
    assert merge_small(counts, 0) == {size: size for size in counts}


def test_a_bucket_joins_the_nearest_area_among_equal_shapes():
    """So that small images are not enlarged more than needed."""
    counts = Counter({(1024, 1024): 50, (512, 512): 9, (448, 448): 3})
    assert merge_small(counts, 8)[448, 448] == (512, 512)


def test_held_out_images_join_a_bucket_of_training_images():
    """What is never trained at a size is not measured at it."""
    samples = [*[sample((100, 100))] * 3, sample((300, 100), split="holdout")]
    views = choose_views(samples, 64, BucketConfig(alignment=16, merge_below=2))
    assert {view.size for view in views} == {(64, 64)}
    views = choose_views(samples, 64, BucketConfig(alignment=16))
    assert views[3].size != (64, 64)
