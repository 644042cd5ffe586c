"""Changes of captions as they are trained: lines, removed and replaced words, variants of tags.

All is decided when a dataset is prepared, so that its manifest has the captions that are encoded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from zerotrain.config.image_source import DEFAULT_VARIANTS
from zerotrain.data.dataset import caption_sha256
from zerotrain.data.draws import TAGS, generator
from zerotrain.data.source import Found

if TYPE_CHECKING:
    import numpy as np

    from zerotrain.config.image_source import CaptionConfig


PLACEHOLDER = "[trigger]"


def edit_captions(
    found: Iterable[Found], options_of: Callable[[str], CaptionConfig]
) -> tuple[list[Found], Counter[str]]:
    """Change the captions of a source's entries as the configuration says.

    Args:
        found: The entries; those with a reason against them stay as they are.
        options_of: Returns the options for a file.

    Returns:
        The entries, and how many captions each key changed.
    """
    changed: Counter[str] = Counter()
    editors: dict[int, _Editor] = {}
    edited = []
    for entry in found:
        if entry.reason:
            edited.append(entry)
            continue
        options = options_of(entry.file)
        editor = editors.setdefault(id(options), _Editor(options))
        lines = [line for text in entry.captions for line in editor.lines(text, changed)]
        captions = [editor.edit(line, changed) for line in lines]
        if not all(captions):
            reason = "nothing is left of its caption; shorten caption_filter_list"
            edited.append(replace(entry, reason=reason))
        else:
            first, *others = captions
            edited.append(replace(entry, caption=first, other_captions=tuple(others)))
    return edited, changed


def vary_captions(captions: Sequence[str], options: CaptionConfig) -> tuple[str, ...]:
    """Return the captions of a training image of which each turn draws one.

    Each caption has equally many variants, so that all are drawn equally often. A variant depends
    on its caption, its number and the options alone.
    """
    if not options.varies_captions:
        return tuple(captions)
    count = options.caption_variants or DEFAULT_VARIANTS
    return tuple(
        _vary(caption, generator(int(caption_sha256(caption)[:16], 16), TAGS, 0, number), options)
        for caption in captions
        for number in range(count)
    )


def prepare_captions(
    found: Found, options: CaptionConfig, split: Literal["train", "holdout"]
) -> tuple[str, ...]:
    """Return the captions that a sample gets from what its source says; none if nothing is left."""
    [entry], _ = edit_captions([found], lambda file: options)
    return () if entry.reason else split_captions(entry, options, split)


def split_captions(
    entry: Found, options: CaptionConfig, split: Literal["train", "holdout"]
) -> tuple[str, ...]:
    """Return the captions of an edited entry: all that are trained, or one that is measured."""
    if split == "holdout":
        return (entry.caption,)
    return vary_captions(entry.captions, options)


def describe_changes(changed: Counter[str], total: int) -> str | None:
    """Describe how many captions each key changed; None if no key is set."""
    if not changed:
        return None
    counts = ", ".join(f"{key} {count}" for key, count in changed.items())
    return f"captions changed, of {total}: {counts}"


def describe_placeholders(found: Iterable[Found]) -> str | None:
    """Describe how many captions have a placeholder that nothing replaces; None if none has."""
    texts = [caption for entry in found for caption in entry.captions]
    count = sum(PLACEHOLDER in text for text in texts)
    if not count:
        return None
    return (
        f"{count} captions have {PLACEHOLDER}, a placeholder of ai-toolkit, which is trained as it "
        f"stands: `data.caption_replacements: {{'{PLACEHOLDER}': WORD}}` replaces it"
    )


class _Editor:
    """Applies the options of one source."""

    def __init__(self, options: CaptionConfig) -> None:
        self._options = options
        self._removed = [
            re.compile(r"[^\S\n]*" + _word(one).pattern)
            for one in options.caption_filter_list or ()
        ]
        self._replaced = [
            (_word(old), new) for old, new in (options.caption_replacements or {}).items()
        ]

    def lines(self, caption: str, changed: Counter[str]) -> list[str]:
        """Return the captions in the text of a caption file or of a cell."""
        how = self._options.multiline_captions
        if how == "whole":
            return [caption]
        lines = [line.strip() for line in caption.splitlines() if line.strip()]
        changed["multiline_captions"] += len(lines) > 1
        return lines[:1] if how == "first" else lines

    def edit(self, caption: str, changed: Counter[str]) -> str:
        """Return a caption after all changes, empty if nothing is left of it."""
        options = self._options
        if self._removed:
            found = caption
            for pattern in self._removed:
                found = pattern.sub("", found)
            changed["caption_filter_list"] += found != caption
            caption = self._without_empty_tags(found) if found != caption else caption
        if self._replaced:
            found = caption
            for pattern, new in self._replaced:
                found = pattern.sub(new.replace("\\", r"\\"), found)
            changed["caption_replacements"] += found != caption
            caption = found.strip()
        if not caption:
            return ""
        if options.caption_prefix:
            caption = f"{options.caption_prefix} {caption}"
            changed["caption_prefix"] += 1
        if options.caption_suffix:
            caption = f"{caption} {options.caption_suffix}"
            changed["caption_suffix"] += 1
        return caption

    def _without_empty_tags(self, caption: str) -> str:
        separator = re.escape(self._options.caption_separator)
        joined = re.sub(
            rf"{separator}(?:\s*{separator})+",
            lambda match: self._options.caption_separator,
            caption,
        )
        return re.sub(rf"^(?:\s*{separator})+|(?:{separator}\s*)+$", "", joined).strip()


def _word(phrase: str) -> re.Pattern[str]:
    """Match a phrase that is no part of longer words; case counts.

    Only letters with case, and digits, continue a word: other scripts have no spaces between words,
    or join words to what follows them.
    """
    before = r"(?<![^\W_])" if _continues(phrase[0]) else ""
    after = r"(?![^\W_])" if _continues(phrase[-1]) else ""
    return re.compile(f"{before}{re.escape(phrase)}{after}")


def _continues(letter: str) -> bool:
    return letter.isdigit() or letter.lower() != letter.upper()


def _vary(caption: str, random: np.random.Generator, options: CaptionConfig) -> str:
    """Draw a variant: the kept tags, and the others without dropped ones, in another order."""
    separator = options.caption_separator
    tags = [tag.strip() for tag in caption.split(separator) if tag.strip()]
    kept, rest = tags[: options.keep_tokens], tags[options.keep_tokens :]
    uniform, order = random.random(len(rest)), random.permutation(len(rest))
    places = order.tolist() if options.shuffle_caption else range(len(rest))
    rest = [rest[place] for place in places if uniform[place] >= options.caption_tag_dropout_rate]
    return f"{separator.strip()} ".join([*kept, *rest])
