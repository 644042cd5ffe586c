"""The keys that change captions: what is added and removed, and the variants that are trained."""

from __future__ import annotations

import codecs
import string
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from zerotrain.config.section import Section, Whole

UTF_8 = "utf-8"
ASCII = string.ascii_letters + string.digits + string.punctuation.replace("\\", "") + " \n"
DEFAULT_VARIANTS = 4
"""Of each caption whose tags are shuffled or dropped."""

Words = Annotated[str, Field(min_length=1)]


def is_value(default: Any) -> Callable[[Any], bool]:
    """Return a test for one value: datasets without a key depend on nothing of it (exclude_if)."""
    return lambda value: bool(value == default)


def _checked_encoding(name: str) -> str:
    """Return the name of an encoding, that of UTF-8 in one spelling.

    Raises:
        ValueError: it is unknown, or its ASCII letters are other bytes.
    """
    try:
        known = ASCII.encode().decode(name) == ASCII
    except (LookupError, UnicodeError, ValueError):
        known = False
    if not known:
        raise ValueError(
            f"{name!r} is no encoding of Python in which ASCII letters are those of ASCII, such as "
            "gbk, cp932, latin-1 or cp1252"
        )
    return UTF_8 if codecs.lookup(name).name.startswith(UTF_8) else name


class CaptionConfig(Section):
    """What becomes of the captions of a source."""

    caption_encoding: Annotated[str, AfterValidator(_checked_encoding)] = Field(
        UTF_8,
        exclude_if=is_value(UTF_8),
        description="Encoding of caption files and tables that are not UTF-8, as Python names it: "
        "`gbk`, `cp932`, `latin-1`. A file with the byte order mark of UTF-8 is UTF-8.",
    )
    multiline_captions: Literal["whole", "first", "split"] = Field(
        "whole",
        exclude_if=is_value("whole"),
        description="A caption of several lines is one caption (`whole`), its first line counts "
        "(`first`), or each line is a caption of its own and training draws one (`split`).",
    )
    caption_filter_list: list[Words] | None = Field(
        None,
        exclude_if=is_value(None),
        description="Words or phrases that are removed from captions, such as `watermark`. See "
        "[captions.md](captions.md).",
    )
    caption_replacements: dict[Words, str] | None = Field(
        None,
        exclude_if=is_value(None),
        description="Words or phrases in captions, and what replaces them.",
    )
    caption_prefix: Words | None = Field(
        None,
        exclude_if=is_value(None),
        description="Stands before every caption, then a space: a trigger word, such as `sks,`.",
    )
    caption_suffix: Words | None = Field(
        None, exclude_if=is_value(None), description="Stands after every caption and a space."
    )
    shuffle_caption: bool = Field(
        False,
        exclude_if=is_value(False),
        description="Train on several orders of a caption's tags: `caption_variants` of them.",
    )
    caption_tag_dropout_rate: float = Field(
        0.0,
        ge=0,
        lt=1,
        exclude_if=is_value(0.0),
        description="Share of tags that are left out of a variant of a caption.",
    )
    keep_tokens: Whole = Field(
        0,
        ge=0,
        exclude_if=is_value(0),
        description="Number of tags at the start of a caption that stay where they are.",
    )
    caption_separator: str = Field(
        ",", pattern=r"\S", exclude_if=is_value(","), description="What stands between tags."
    )
    caption_variants: Whole | None = Field(
        None,
        ge=1,
        exclude_if=is_value(None),
        description="How many variants of a caption are encoded with shuffle_caption or "
        f"caption_tag_dropout_rate; training draws one each time. Default: {DEFAULT_VARIANTS}.",
    )

    @property
    def varies_captions(self) -> bool:
        """Whether training draws variants of a caption."""
        return self.shuffle_caption or self.caption_tag_dropout_rate > 0

    @model_validator(mode="after")
    def _variants_differ(self) -> CaptionConfig:
        if self.varies_captions:
            return self
        for key in ("keep_tokens", "caption_variants"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} counts only with shuffle_caption or caption_tag_dropout_rate; set one "
                    f"of them, or remove {key}"
                )
        return self
