"""The figures of a dataset, as `zerotrain data show` and the report have them: captions, images."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING

from zerotrain.data.buckets import choose_source_views
from zerotrain.data.conversation import PROMPT, SYSTEM, TOOLS, Conversation, count_keys
from zerotrain.data.image_summary import (
    BITS,
    DISTANCE,
    BucketUse,
    bucket_uses,
    count_aspects,
    equal_groups,
    near_groups,
    summarise_images,
    summary_rows,
)

if TYPE_CHECKING:
    from zerotrain.config.data import BucketConfig
    from zerotrain.data.dataset import Sample

Row = tuple[str, str]
"""A name and its value."""
COUNTS = {"train": "trained on", "holdout": "held out", "bad": "left out as broken"}
"""Labels of the counts of a dataset."""
WIDTH, LABEL_WIDTH = 80, 24
BAR = 24
"""Letters of the longest bar of a histogram."""
MOST_BUCKETS, MOST_GROUPS, MOST_FILES = 20, 5, 4
"""Rows and names that are listed; what follows is counted."""


@dataclass(frozen=True)
class Section:
    """Rows under a title."""

    title: str
    rows: Sequence[Row]
    counts: Sequence[tuple[str, int]] = ()
    """Samples of each kind, where the section is about kinds that a bar chart can compare."""


def image_sections(
    samples: Sequence[Sample],
    bad: Sequence[Mapping[str, str]],
    *,
    resolution: int,
    buckets: BucketConfig | None,
    own: Mapping[str, int] | None = None,
    hashes: Mapping[str, int] | None = None,
    tokens: Sequence[Row] = (),
    left_out: Sequence[Row] = (),
) -> list[Section]:
    """Return the figures of a dataset of images.

    Args:
        samples: The usable samples.
        bad: `file` and `reason` of each other one.
        resolution: Side of the largest squares in pixels.
        buckets: The section `data.aspect_buckets`; None for squares.
        own: The resolutions of sources that have one, by their names.
        hashes: Perceptual hash of an image by its sha256; None for no near duplicates.
        tokens: Rows about the tokens of captions.
        left_out: Names of the source that are not used, with their numbers.
    """
    sections = [_counts(samples, bad)]
    if samples:
        captions = [sample.caption for sample in samples]
        aspects = count_aspects(samples)
        uses = bucket_uses(samples, choose_source_views(samples, resolution, buckets, own or {}))
        sizes = [(f"{use.size[0]}x{use.size[1]}", use.images) for use in uses[:MOST_BUCKETS]]
        sections += [
            Section("Sizes", [*_sizes(samples)]),
            Section("Aspect ratios (width by height)", [*_histogram(aspects)], aspects),
            Section("Crops", [*_crops(samples, uses, resolution, buckets, own or {})], sizes),
            Section("Captions", [*_captions(captions), *tokens, *_frequent(captions)]),
            Section("Duplicates", [*_image_duplicates(samples, hashes)]),
        ]
    return [*sections, *_problems(bad, left_out)]


def text_sections(
    samples: Sequence[Conversation],
    bad: Sequence[Mapping[str, str]],
    left_out: Sequence[Row] = (),
) -> list[Section]:
    """Return the figures of a dataset of text.

    Args:
        samples: The usable examples.
        bad: `file` and `reason` of each refused row.
        left_out: Names of the source that are not used, with their numbers.
    """
    sections = [_counts(samples, bad)]
    if samples:
        turns = Counter(
            sum(message.role == "assistant" for message in one.messages) for one in samples
        )
        sections += [
            Section("Lengths", [*_text_lengths(samples)]),
            Section(
                "Turns",
                [
                    *_histogram([(_number(turn, "answer"), turns[turn]) for turn in sorted(turns)]),
                    *_system_messages(samples),
                    *_further_turns(samples),
                ],
            ),
            Section("Duplicates", [*_text_duplicates(samples)]),
        ]
    return [*sections, *_problems(bad, left_out)]


def format_sections(sections: Iterable[Section]) -> Iterator[str]:
    """Yield the lines of sections, 80 columns wide, with an empty line between two."""
    for place, section in enumerate(sections):
        if place:
            yield ""
        yield section.title
        for name, value in section.rows:
            first, further = f"  {name:{LABEL_WIDTH - 3}} ", " " * LABEL_WIDTH
            yield from textwrap.wrap(
                f"{first}{value}", WIDTH, subsequent_indent=further, break_on_hyphens=False
            )


def _counts(samples: Sequence[Sample | Conversation], bad: Sequence[Mapping[str, str]]) -> Section:
    splits = Counter(sample.split for sample in samples)
    numbers = {"train": splits["train"], "holdout": splits["holdout"], "bad": len(bad)}
    return Section(
        "Samples", [(COUNTS[key], f"{count:,}") for key, count in numbers.items() if count]
    )


def _sizes(samples: Sequence[Sample]) -> Iterator[Row]:
    widths, heights = zip(*(sample.original_size for sample in samples), strict=True)
    areas = [width * height / 1e6 for width, height in zip(widths, heights, strict=True)]
    yield "width in pixels", describe_lengths(widths)
    yield "height in pixels", describe_lengths(heights)
    yield "megapixels", f"{min(areas):.3g} to {max(areas):.3g}, median {median(areas):.3g}"
    sizes = Counter(sample.original_size for sample in samples)
    (width, height), count = min(sizes.items(), key=lambda one: (-one[1], one[0]))
    yield "sizes", f"{_number(len(sizes), 'size')}, most often {width}x{height} ({count:,})"


def _crops(
    samples: Sequence[Sample],
    uses: Sequence[BucketUse],
    resolution: int,
    buckets: BucketConfig | None,
    own: Mapping[str, int],
) -> Iterator[Row]:
    for use in uses[:MOST_BUCKETS]:
        enlarged = f", {use.enlarged:,} enlarged" if use.enlarged else ""
        yield (
            f"{use.size[0]}x{use.size[1]}",
            f"{_number(use.images, 'image')} ({use.images / len(samples):.0%}), loses "
            f"{use.dropped:.1%} of their area{enlarged}",
        )
    if more := uses[MOST_BUCKETS:]:
        yield "further sizes", f"{len(more)}, {_number(sum(use.images for use in more), 'image')}"
    shown_otherwise = ("aspect buckets", "duplicate images")
    summary = summarise_images(samples, resolution, buckets, own)
    yield from (row for row in summary_rows(summary) if row[0] not in shown_otherwise)


def _captions(captions: Sequence[str]) -> Iterator[Row]:
    counts = Counter(captions)
    caption, count = min(counts.items(), key=lambda one: (-one[1], one[0]))
    shown = textwrap.shorten(caption, 60, placeholder=" …") or caption[:60]
    most = f", most often ({count:,}): {shown}" if count > 1 else ""
    yield "captions", f"{_number(len(counts), 'different caption')}{most}"
    yield "words", describe_lengths([count_words(one) for one in captions])
    yield "letters", describe_lengths([len(one) for one in captions])


def _frequent(captions: Sequence[str]) -> Iterator[Row]:
    if words := describe_frequent(frequent_words(captions)):
        yield "captions with a word", words
    if tags := describe_frequent(frequent_tags(captions)):
        yield "captions with a tag", tags


def _image_duplicates(samples: Sequence[Sample], hashes: Mapping[str, int] | None) -> Iterator[Row]:
    equal = equal_groups((sample.file, sample.image_sha256) for sample in samples)
    yield "equal bytes", _describe_groups(equal, "image")
    yield from (("", " = ".join(_files(group))) for group in equal[:MOST_GROUPS])
    if hashes is None:
        return
    first: dict[str, str] = {}
    for sample in samples:
        first.setdefault(sample.image_sha256, sample.file)
    near = near_groups({file: hashes[sha256] for sha256, file in first.items()})
    yield (
        f"alike ({DISTANCE} of {BITS} bits)",
        _describe_groups([group.files for group in near], "image"),
    )
    for group in near[:MOST_GROUPS]:
        others = [
            f"{file} ({_number(bits, 'bit')})"
            for file, bits in zip(group.files[1:], group.distances[1:], strict=True)
        ]
        yield "", " ~ ".join([group.files[0], *_files(others)])
    splits = {sample.file: sample.split for sample in samples}
    if mixed := [one for one in near if len({splits[file] for file in one.files}) > 1]:
        yield (
            "alike, in both splits",
            f"{_number(len(mixed), 'group')}: held-out images that resemble trained ones make the "
            "held-out loss too good",
        )


def _text_lengths(samples: Sequence[Conversation]) -> Iterator[Row]:
    for name, roles in (("questions", ("user", PROMPT)), ("answers", ("assistant",))):
        texts = [
            message.content for one in samples for message in one.messages if message.role in roles
        ]
        yield f"words of {name}", describe_lengths([count_words(text) for text in texts])
        yield f"letters of {name}", describe_lengths([len(text) for text in texts])


def _system_messages(samples: Sequence[Conversation]) -> Iterator[Row]:
    systems = [
        message.content for one in samples for message in one.messages if message.role in SYSTEM
    ]
    if systems:
        yield (
            "system messages",
            f"{len(systems):,}, {len({*systems}):,} different",
        )


def _further_turns(samples: Sequence[Conversation]) -> Iterator[Row]:
    """Yield rows about tools, thoughts, and answers that are not learned."""
    roles = Counter(message.role for one in samples for message in one.messages)
    if tools := roles[TOOLS]:
        yield "with tools", _number(tools, "example")
    for key, count in sorted(count_keys(samples).items()):
        yield key, _number(count, "turn")
    unlearned = sum(
        message.role == "assistant" and not message.learned
        for one in samples
        for message in one.messages
    )
    if unlearned:
        yield "not learned", f"{_number(unlearned, 'answer')} (weight: 0 or train: false)"


def _text_duplicates(samples: Sequence[Conversation]) -> Iterator[Row]:
    equal = equal_groups((one.file, one.sha256) for one in samples)
    yield "equal examples", _describe_groups(equal, "example")
    yield from (("", " = ".join(_files(group))) for group in equal[:MOST_GROUPS])
    first: dict[str, Conversation] = {}
    for one in samples:
        first.setdefault(one.sha256, one)
    asked = equal_groups((one.file, _asked(one)) for one in first.values())
    yield (
        "equal questions",
        _describe_groups(asked, "example") + ", with other answers" * bool(asked),
    )
    yield from (("", " ~ ".join(_files(group))) for group in asked[:MOST_GROUPS])


def _asked(one: Conversation) -> tuple[str, ...]:
    """Return what comes before the first answer."""
    before = takewhile(lambda message: message.role != "assistant", one.messages)
    return tuple(message.content for message in before)


def _problems(bad: Sequence[Mapping[str, str]], left_out: Sequence[Row]) -> list[Section]:
    """Return what is left out, and the refused samples by their reasons.

    Names and numbers in reasons do not count.
    """
    groups: dict[str, list[Mapping[str, str]]] = {}
    for entry in bad:
        groups.setdefault(_kind(entry), []).append(entry)
    rows: list[Row] = []
    for kind, entries in sorted(groups.items(), key=lambda one: -len(one[1])):
        reason = entries[0]["reason"] if len(entries) == 1 else kind
        rows.append((_number(len(entries), "sample"), reason))
        rows.append(("", ", ".join(_files([entry["file"] for entry in entries]))))
    sections = [Section("Left out", [*left_out]), Section("Problems", rows)]
    return [section for section in sections if section.rows]


def _kind(entry: Mapping[str, str]) -> str:
    stem = entry["file"].rpartition(".")[0] or entry["file"]
    reason = entry["reason"]
    for name, word in ((entry["file"], "FILE"), (stem, "NAME")):
        reason = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word, reason)
    return re.sub(r"\d[\d,.]*", "N", reason)


def _histogram(counts: Sequence[tuple[str, int]]) -> Iterator[Row]:
    total, most = sum(count for _, count in counts), max(count for _, count in counts)
    for name, count in counts:
        bar = "█" * -(-BAR * count // most)
        yield name, f"{count:>8,} {count / total:>4.0%}  {bar}".rstrip()


def _describe_groups(groups: Sequence[Sequence[str]], what: str) -> str:
    if not groups:
        return "none"
    return f"{_number(sum(map(len, groups)), what)} in {_number(len(groups), 'group')}"


def _files(names: Sequence[str]) -> list[str]:
    more = len(names) - MOST_FILES
    return [*names[:MOST_FILES], f"and {more:,} more"] if more > 0 else [*names]


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


WORD = re.compile(r"\w+(?:['’\-]\w+)*")  # noqa: RUF001
"""A word. Scripts without spaces between words give whole phrases."""
SHOWN = 12
"""Frequent words or tags that are listed."""
LEAST_TAGGED = 0.5
"""Share of captions with a comma above which captions are lists of tags."""


def count_words(text: str) -> int:
    """Count the words of a text."""
    return len(WORD.findall(text))


def describe_lengths(lengths: Sequence[int]) -> str:
    """Describe at least one length by the smallest, the largest and the median."""
    least, most = min(lengths), max(lengths)
    if least == most:
        return f"{least:,}"
    return f"{least:,} to {most:,}, median {median(lengths):,.0f}"


def frequent_words(captions: Iterable[str]) -> Counter[str]:
    """Count for each word, in lower case, the captions that have it."""
    return Counter(word for caption in captions for word in {*WORD.findall(caption.casefold())})


def frequent_tags(captions: Sequence[str]) -> Counter[str]:
    """Count for each tag the captions that have it; none if few captions are lists of tags."""
    if sum("," in caption for caption in captions) < LEAST_TAGGED * len(captions):
        return Counter()
    return Counter(
        tag
        for caption in captions
        for tag in {part.strip().casefold() for part in caption.split(",")}
        if tag
    )


def describe_frequent(counts: Counter[str]) -> str:
    """List the most frequent ones that are not alone, with their counts; equals by the alphabet."""
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{name} {count:,}" for name, count in ordered[:SHOWN] if count > 1)
