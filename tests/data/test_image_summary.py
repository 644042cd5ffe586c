"""What the user reads of enlarged, cropped and duplicate images."""

from __future__ import annotations

from zerotrain.config.data import BucketConfig
from zerotrain.data.buckets import centre_crop
from zerotrain.data.dataset import Sample
from zerotrain.data.image_summary import format_summary, summarise_images, summary_rows


def sample(file: str, width: int, height: int, content: str = "") -> Sample:
    """A sample of this size; equal contents are equal files."""
    size = (width, height)
    digest = content or file
    return Sample(file, digest, "a cat", "c", size, size, centre_crop(size), "train")


def test_enlarged_cropped_and_duplicate_images_are_counted():
    samples = [
        sample("a.jpg", 2000, 1000),
        sample("b.jpg", 320, 240),
        sample("c.jpg", 1000, 1000),
        sample("copy.jpg", 2000, 1000, "a.jpg"),
        sample("pano.jpg", 4000, 500),
    ]
    summary = summarise_images(samples, 1024)
    area = 2 * 2000 * 1000 + 320 * 240 + 1000 * 1000 + 4000 * 500
    kept = 3 * 1000 * 1000 + 240 * 240 + 500 * 500
    assert abs(summary.dropped - (1 - kept / area)) < 1e-12
    assert format_summary(summary) == [
        "enlarged images: 5 of 5 are smaller than 1024 px and are enlarged, up to 4.3 times "
        "(b.jpg, 320x240)",
        "square crop: drops 53% of all image area, most of pano.jpg (88%)",
        "duplicate images: 1 of 5 have the same bytes as an earlier one (copy.jpg = a.jpg)",
    ]
    assert summary_rows(summarise_images(samples, 512))[0] == (
        "enlarged images",
        "2 of 5 are smaller than 512 px and are enlarged, up to 2.1 times (b.jpg, 320x240)",
    )


def test_square_images_that_are_large_enough_need_no_words():
    assert format_summary(summarise_images([sample("a.png", 64, 64)], 64)) == []
    assert format_summary(summarise_images([sample("a.png", 32, 32)], None)) == []


def test_buckets_are_counted_with_what_they_lose_or_stretch():
    """A crop drops the ends of a panorama; without one it is squeezed."""
    samples = [*[sample(f"{n}.jpg", 1000, 1000) for n in range(3)], sample("pano.jpg", 4000, 500)]
    rows = dict(summary_rows(summarise_images(samples, 512, BucketConfig(max_aspect=4))))
    assert rows == {
        "aspect buckets": "2 sizes, images of each: 512x512 (3), 1024x256 (1)",
        "crop": "drops 20% of all image area, most of pano.jpg (50%)",
    }
    whole = BucketConfig(max_aspect=4, crop="none")
    rows = dict(summary_rows(summarise_images(samples, 512, whole)))
    assert rows["stretched images"] == ("1 of 4, up to 2.00 times (pano.jpg), by crop: none")
    assert "crop" not in rows
