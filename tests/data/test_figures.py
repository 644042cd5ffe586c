"""The figures of small datasets, to the last digit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from zerotrain.config.data import BucketConfig
from zerotrain.data.buckets import centre_crop
from zerotrain.data.conversation import Message, conversation
from zerotrain.data.dataset import Sample
from zerotrain.data.figures import Row, Section, format_sections, image_sections, text_sections


def sample(
    file: str, width: int, height: int, caption: str = "a cat", *, content: str = "",
    split: Literal["train", "holdout"] = "train",
) -> Sample:  # fmt: skip
    """A sample of this size; equal contents are equal files."""
    size = (width, height)
    return Sample(file, content or file, caption, "c", size, size, centre_crop(size), split)


def rows(sections: Sequence[Section], title: str) -> list[Row]:
    """The rows of a section."""
    [found] = [section for section in sections if section.title == title]
    return [*found.rows]


def test_samples_are_counted_by_use() -> None:
    """Uses without samples have no row; without any sample there is nothing else to say."""
    bad = [{"file": "b.png", "reason": "empty file (0 bytes)"}]
    samples = [sample("a.png", 8, 8), sample("c.png", 8, 8, split="holdout")]
    sections = image_sections(samples, bad, resolution=8, buckets=None)
    assert rows(sections, "Samples") == [
        ("trained on", "1"), ("held out", "1"), ("left out as broken", "1")
    ]  # fmt: skip
    none = image_sections([], bad, resolution=8, buckets=None)
    assert [section.title for section in none] == ["Samples", "Problems"]
    assert text_sections([], []) == [Section("Samples", [])]


def test_sizes_and_shapes() -> None:
    """An aspect ratio at the end of a class belongs to the next one."""
    sizes = [(1000, 1000), (1000, 1000), (500, 1000), (499, 1000), (3000, 2000), (4000, 1000)]
    samples = [sample(f"{place}.png", *size) for place, size in enumerate(sizes)]
    sections = image_sections(samples, [], resolution=64, buckets=None)
    assert rows(sections, "Sizes") == [
        ("width in pixels", "499 to 4,000, median 1,000"),
        ("height in pixels", "1,000 to 2,000, median 1,000"),
        ("megapixels", "0.499 to 6, median 1"),
        ("sizes", "5 sizes, most often 1000x1000 (2)"),
    ]
    shares = rows(sections, "Aspect ratios (width by height)")
    assert [(name, *value.split()) for name, value in shares] == [
        ("below 1:2", "1", "17%", "█" * 12),
        ("1:2 to 2:3", "1", "17%", "█" * 12),
        ("2:3 to 4:5", "0", "0%"),
        ("4:5 to 5:4", "2", "33%", "█" * 24),
        ("5:4 to 3:2", "0", "0%"),
        ("3:2 to 2:1", "1", "17%", "█" * 12),
        ("2:1 and above", "1", "17%", "█" * 12),
    ]


def test_each_size_says_what_its_crops_lose() -> None:
    """With buckets: half of one panorama and nothing of the other; without: of all images."""
    samples = [
        *[sample(f"{number}.png", 1000, 1000) for number in range(2)],
        sample("pano.png", 4000, 500), sample("wide.png", 2000, 500),
        sample("tiny.png", 100, 100), sample("equal.png", 512, 512),
    ]  # fmt: skip
    buckets = BucketConfig(max_aspect=4)
    sections = image_sections(samples, [], resolution=512, buckets=buckets)
    crops = rows(sections, "Crops")
    counts = next(section.counts for section in sections if section.title == "Crops")
    assert counts == [("512x512", 4), ("1024x256", 2)]
    assert crops[:2] == [
        ("512x512", "4 images (67%), loses 0.0% of their area, 1 enlarged"),
        # 4000x500 keeps 2000x500: 1 of 2 megapixels, next to 1 megapixel that is kept whole
        ("1024x256", "2 images (33%), loses 33.3% of their area"),
    ]
    assert [name for name, _ in crops[2:]] == ["enlarged images", "crop"]
    squares = rows(image_sections(samples, [], resolution=512, buckets=None), "Crops")
    # of 2 + 2 + 1 + 0.01 + 0.26 megapixels 2 + 0.25 + 0.25 + 0.01 + 0.26 are kept
    assert squares[0] == (
        "512x512", "6 images (100%), loses 47.4% of their area, 3 enlarged"
    )  # fmt: skip
    assert [name for name, _ in squares[1:]] == ["enlarged images", "square crop"]


def test_captions_have_lengths_words_and_tags() -> None:
    """In lower case, each counted once for a caption; what is alone is not frequent."""
    captions = [
        "A red cat, sitting, red",
        "a blue cat, sitting",
        "犬の写真",
        "A dog's well-lit den",
    ]
    samples = [sample(f"{n}.png", 8, 8, one) for n, one in enumerate([*captions, captions[2]])]
    found = rows(image_sections(samples, [], resolution=8, buckets=None), "Captions")
    assert found == [
        ("captions", "4 different captions, most often (2): 犬の写真"),
        ("words", "1 to 5, median 4"),
        ("letters", "4 to 23, median 19"),
        ("captions with a word", "a 3, cat 2, sitting 2, 犬の写真 2"),
    ]
    tagged = [sample(f"{n}.png", 8, 8, one) for n, one in enumerate(captions[:2] * 2)]
    found = rows(image_sections(tagged, [], resolution=8, buckets=None), "Captions")
    assert found[-1] == ("captions with a tag", "sitting 4, a blue cat 2, a red cat 2, red 2")


def test_duplicates_are_grouped_and_splits_compared() -> None:
    """Equal bytes first; each different content is compared once, and only up to four bits."""
    samples = [
        sample("a.png", 8, 8, content="1"), sample("b.png", 8, 8, content="2"),
        sample("copy.png", 8, 8, content="1"), sample("far.png", 8, 8, content="3"),
        sample("held.png", 8, 8, content="4", split="holdout"),
    ]  # fmt: skip
    hashes = {"1": 0, "2": 0b1111, "3": 0b111111, "4": 1 << 40}
    found = rows(
        image_sections(samples, [], resolution=8, buckets=None, hashes=hashes), "Duplicates"
    )
    assert found == [
        ("equal bytes", "2 images in 1 group"),
        ("", "a.png = copy.png"),
        ("alike (4 of 64 bits)", "3 images in 1 group"),
        ("", "a.png ~ b.png (4 bits) ~ held.png (1 bit)"),
        (
            "alike, in both splits",
            "1 group: held-out images that resemble trained ones make the held-out loss too good",
        ),
    ]
    without = image_sections(samples[:2], [], resolution=8, buckets=None)
    assert rows(without, "Duplicates") == [("equal bytes", "none")]


def test_problems_are_grouped_by_reason() -> None:
    """Names and numbers in a reason make no other one; a single sample keeps its own words."""
    bad = [
        {"file": "a/1.jpg", "reason": "no caption: no a/1.txt next to it"},
        {
            "file": "b.jpg",
            "reason": "unreadable image (image file is truncated (4 bytes not read))",
        },
        *[
            {"file": f"{n}.jpg", "reason": f"no caption: no {n}.txt next to it"}
            for n in ("c", "d", "e", "f")
        ],
    ]
    assert rows(image_sections([], bad, resolution=8, buckets=None), "Problems") == [
        ("5 samples", "no caption: no NAME.txt next to it"),
        ("", "a/1.jpg, c.jpg, d.jpg, e.jpg, and 1 more"),
        ("1 sample", "unreadable image (image file is truncated (4 bytes not read))"),
        ("", "b.jpg"),
    ]


def test_text_has_lengths_turns_and_duplicates() -> None:
    """Of all turns; a question with two answers is no equal example."""
    ask, answer = (lambda text: Message("user", text)), (lambda text: Message("assistant", text))
    system = Message("system", "be brief")
    examples = [
        ("1", [ask("one and two"), answer("three")]),
        ("2", [ask("one and two"), answer("it is 3")]),
        ("3", [ask("one and two"), answer("three")]),
        ("4", [system, ask("hi"), answer("hello"), ask("and you?"), answer("well, thank you")]),
    ]
    samples = [conversation(name, messages, 0) for name, messages in examples]
    sections = text_sections(samples, [{"file": "5", "reason": "empty output"}])
    assert rows(sections, "Samples") == [("trained on", "4"), ("left out as broken", "1")]
    assert rows(sections, "Lengths") == [
        ("words of questions", "1 to 3, median 3"),
        ("letters of questions", "2 to 11, median 11"),
        ("words of answers", "1 to 3, median 1"),
        ("letters of answers", "5 to 15, median 5"),
    ]
    turns = [(name, *value.split()) for name, value in rows(sections, "Turns")]
    assert turns == [
        ("1 answer", "3", "75%", "█" * 24), ("2 answers", "1", "25%", "█" * 8),
        ("system messages", "1,", "1", "different"),
    ]  # fmt: skip
    assert rows(sections, "Duplicates") == [
        ("equal examples", "2 examples in 1 group"),
        ("", "1 = 3"),
        ("equal questions", "2 examples in 1 group, with other answers"),
        ("", "1 ~ 2"),
    ]
    assert rows(sections, "Problems") == [("1 sample", "empty output"), ("", "5")]


def test_lines_are_aligned_and_at_most_80_columns_wide() -> None:
    sections = [Section("One", [("name", "word " * 30)]), Section("Two", [("", "x"), ("b", "y")])]
    lines = [*format_sections(sections)]
    assert max(map(len, lines)) <= 80
    assert lines[0] == "One"
    assert [line.index("word") for line in lines[1:4]] == [24, 24, 24]
    assert lines[-4:] == ["", "Two", f"{'':24}x", f"  {'b':22}y"]
