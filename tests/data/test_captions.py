"""Captions as they are trained: what the options add, remove and vary, to the letter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from tests.builders.images import make_image_config

from zerotrain.config.image_source import CaptionConfig
from zerotrain.data.captions import (
    describe_placeholders,
    edit_captions,
    prepare_captions,
    vary_captions,
)
from zerotrain.data.dataset import read_dataset
from zerotrain.data.source import Found
from zerotrain.stages.prepare_dataset import prepare_dataset

TAGS = "1girl, red hair, watermark, smile, sitting, indoors"


def edited(caption: str, **options: Any) -> tuple[str, ...]:
    return prepare_captions(Found("a", caption), CaptionConfig(**options), "train")


@pytest.mark.parametrize(
    ("caption", "removed", "left"),
    [
        (TAGS, ["watermark"], "1girl, red hair, smile, sitting, indoors"),
        ("watermark, a, watermark", ["watermark"], "a"),
        ("a watermark, and a watermarked cat", ["watermark"], "a, and a watermarked cat"),
        ("a cat in a category", ["cat"], "a in a category"),
        ("一只猫在沙发上", ["猫"], "一只在沙发上"),
        ("first line\nno watermark here", ["watermark"], "first line\nno here"),
        ("a (b) c", ["(b)"], "a c"),
        ("1,000 cats", ["dogs"], "1,000 cats"),
    ],
)
def test_removed_words_leave_no_gap(caption, removed, left):
    assert edited(caption, caption_filter_list=removed) == (left,)


def test_replacements_and_additions_come_in_this_order():
    """Removed, replaced, then the prefix and the suffix, which nothing changes any more."""
    options = {
        "caption_filter_list": ["blurry"], "caption_replacements": {"woman": r"sks\1 woman"},
        "caption_prefix": "woman,", "caption_suffix": "blurry",
    }  # fmt: skip
    assert edited("a woman, blurry", **options) == (r"woman, a sks\1 woman blurry",)


def test_lines_are_one_caption_or_the_first_or_several():
    text = "a red house\n\n  a house on a hill \na house"
    assert edited(text) == (text,)
    assert edited(text, multiline_captions="first") == ("a red house",)
    lines = ("a red house", "a house on a hill", "a house")
    assert edited(text, multiline_captions="split") == lines
    held_out = prepare_captions(
        Found("a", text), CaptionConfig(multiline_captions="split"), "holdout"
    )
    assert held_out == lines[:1]


def test_each_key_is_counted_by_the_captions_that_it_changed():
    options = CaptionConfig(
        multiline_captions="split", caption_filter_list=["blurry"], caption_prefix="sks,"
    )
    found = [Found("a", "a cat\na dog, blurry"), Found("b", "a cow"), Found("c", reason="bad")]
    entries, changed = edit_captions(found, lambda file: options)
    assert [(one.caption, one.other_captions) for one in entries] == [
        ("sks, a cat", ("sks, a dog",)), ("sks, a cow", ()), ("", ()),
    ]  # fmt: skip
    assert changed == {"multiline_captions": 1, "caption_filter_list": 1, "caption_prefix": 3}


def test_a_caption_of_which_nothing_is_left_is_a_bad_sample():
    options = CaptionConfig(caption_filter_list=["blurry"], caption_prefix="sks")
    [entry], _ = edit_captions([Found("a", "blurry, blurry")], lambda file: options)
    assert entry.reason == "nothing is left of its caption; shorten caption_filter_list"


def test_variants_keep_the_first_tags_and_drop_their_share():
    """Every variant begins with the kept tags; over many, each other tag is in its share and at
    every place."""
    options = CaptionConfig(
        shuffle_caption=True, keep_tokens=2, caption_tag_dropout_rate=0.25, caption_variants=400
    )
    found = [one.split(", ") for one in vary_captions([TAGS], options)]
    assert all(tags[:2] == ["1girl", "red hair"] for tags in found)
    rest = TAGS.split(", ")[2:]
    counts = Counter(tag for tags in found for tag in tags[2:])
    assert all(260 < counts[tag] < 340 for tag in rest)
    whole = Counter(tuple(tags[2:]) for tags in found if len(tags) == 6)
    assert len(whole) == 24


def test_a_variant_is_a_function_of_its_caption_and_number():
    """More variants change no earlier ones, nor does the separator's spacing; without a shuffle
    the order stays."""
    four = vary_captions([TAGS], CaptionConfig(shuffle_caption=True))
    assert len(four) == 4
    six = vary_captions([TAGS], CaptionConfig(shuffle_caption=True, caption_variants=6))
    assert six[:4] == four
    both = vary_captions(["x, y", TAGS], CaptionConfig(shuffle_caption=True))
    assert both[4:] == four
    assert four[0] == "watermark, smile, red hair, 1girl, sitting, indoors"
    dropped = vary_captions([TAGS], CaptionConfig(caption_tag_dropout_rate=0.5))
    tags = TAGS.split(", ")
    assert all(sorted(o.split(", "), key=tags.index) == o.split(", ") for o in dropped)
    natural = CaptionConfig(shuffle_caption=True, caption_separator=".", caption_variants=40)
    assert {*vary_captions(["A cat. A dog"], natural)} == {"A cat. A dog", "A dog. A cat"}


def test_keys_of_variants_alone_are_refused():
    with pytest.raises(ValidationError, match="keep_tokens counts only with shuffle_caption"):
        CaptionConfig(keep_tokens=1)
    with pytest.raises(ValidationError, match="caption_variants counts only with"):
        CaptionConfig(caption_variants=2)


def test_the_manifest_holds_the_captions_that_are_trained(tmp_path, capsys):
    """Held-out samples have one; without the keys the manifest has no word of them."""
    images = tmp_path / "images"
    images.mkdir()
    for number in range(12):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"a, b, c{number}")
    options = {"holdout": 0.5, "shuffle_caption": True, "caption_variants": 3,
               "caption_prefix": "sks,", "keep_tokens": 1}  # fmt: skip
    prepare_dataset(make_image_config(images, data=options).data, tmp_path / "dataset")
    shown = capsys.readouterr().out
    assert "captions changed, of 12: caption_prefix 12\n" in shown
    for sample in read_dataset(tmp_path / "dataset").samples:
        captions = sample.captions
        assert len(captions) == (3 if sample.split == "train" else 1)
        number = sample.file.removesuffix(".png")
        assert all(
            sorted(c.split(", ")) == sorted(["sks", "a", "b", f"c{number}"]) for c in captions
        )
        assert all(caption.startswith("sks, ") for caption in captions)
    prepare_dataset(make_image_config(images).data, tmp_path / "plain")
    text = (tmp_path / "plain" / "manifest.json").read_text()
    assert "caption_" not in text.replace("caption_sha256", "").replace(
        "caption_extension", ""
    ).replace("caption_strategy", "")
    assert "other_" not in text


def test_placeholders_that_nothing_replaces_are_named() -> None:
    """ai-toolkit puts its trigger word there; here they would be words of the prompt."""
    found = [Found("a", "[trigger] in a park"), Found("b", "a park"), Found("c", "a [trigger]")]
    options = CaptionConfig()
    entries, _ = edit_captions(found, lambda file: options)
    assert str(describe_placeholders(entries)).startswith("2 captions have [trigger]")
    options = CaptionConfig(caption_replacements={"[trigger]": "sks"})
    entries, _ = edit_captions(found, lambda file: options)
    assert [entry.caption for entry in entries] == ["sks in a park", "a park", "a sks"]
    assert describe_placeholders(entries) is None
