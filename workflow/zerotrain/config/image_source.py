"""The keys of one source of images: where they are, how they are read, their captions."""

from __future__ import annotations

import codecs
import operator
import string
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from zerotrain.config.section import Name, Section, Side, Whole, is_none

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


WHITE = "#ffffff"


class ImageOptions(Section):
    """What transparent images are on, and how much samples and parts of them count."""

    transparent_background: str = Field(
        WHITE,
        pattern=r"^#[0-9a-fA-F]{6}$",
        exclude_if=is_value(WHITE),
        description="The colour that transparent images are put on, as #rrggbb.",
    )
    loss_weight: float = Field(
        1.0,
        gt=0,
        exclude_if=is_value(1.0),
        description="Factor of each sample's loss; what prior_loss_weight is for images of "
        "prior preservation. See [loss-weights.md](loss-weights.md).",
    )
    loss_mask: Literal["alpha"] | None = Field(
        None,
        exclude_if=is_value(None),
        description="`alpha`: the loss of each part of an image is multiplied by its opacity.",
    )
    mask_images: str | None = Field(
        None,
        min_length=1,
        exclude_if=is_value(None),
        description="Folder of masks, each of the name without extension and of the size of its "
        "image: black parts are not learned, white ones are.",
    )

    @model_validator(mode="after")
    def _masks_have_one_source(self) -> ImageOptions:
        if self.loss_mask is not None and self.mask_images is not None:
            raise ValueError("give loss_mask or mask_images, not both")
        return self


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
Folders = Annotated[
    Names,
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""A list of folders; the name of one is taken as a list of it."""


SHARDS = ("huggingface", "webdataset")
"""Sources of images in few large files."""
OF_SHARDS = ("image_column", "caption_column")
OF_FOLDERS = (
    *("metadata", "caption_extension", "follow_symlinks", "folder_repeats"),
    *("conditioning_images", "conditioning_columns", "mask_images"),
)


class ImageSourceConfig(CaptionConfig, ImageOptions):
    """Images with their captions."""

    name: str | None = None
    source: str = "folder"
    images: str | None = Field(None, description="Folder of images, searched with its subfolders.")
    follow_symlinks: bool = Field(
        False, description="Take links in `images` that lead out of it, as DVC and hub caches make."
    )
    metadata: str | None = Field(
        None,
        description="metadata.csv, .jsonl, .json or .parquet with file_name,text or image,prompt "
        "(or `caption`), or kohya's meta_cap.json; it may lie anywhere. Default: one in the image "
        "folder, else a caption file next to each image, else those in subfolders.",
    )
    caption_extension: str = Field(
        ".txt", pattern=r"^\.", description="Extension of the caption files next to the images."
    )
    caption_strategy: Literal["textfile", "filename", "foldername", "instanceprompt"] = Field(
        "textfile",
        description="`textfile` reads metadata or a caption file next to each image; `filename` "
        "takes the image's name without extension, _ as a space; `foldername` takes the name of "
        "the image's folder; `instanceprompt` gives every image `instance_prompt`.",
    )
    instance_prompt: str | None = Field(
        None, min_length=1, description="The caption of every image: caption_strategy says so."
    )
    folder_repeats: bool = Field(
        False,
        exclude_if=operator.not_,
        description="Folders of images are named as kohya's, `10_sks dog`: their images come 10 "
        "times in an epoch, and `sks dog` is the caption of those without one of their own.",
    )
    image_column: str | None = Field(
        None,
        exclude_if=is_none,
        description="huggingface: the column of images. Default: the only one.",
    )
    caption_column: str | None = Field(
        None,
        exclude_if=is_none,
        description="huggingface, and .json files of webdataset: what has the caption. Default: "
        "text, caption or prompt.",
    )
    conditioning_images: Folders | None = Field(
        None,
        exclude_if=is_none,
        description="A folder of conditioning images, which the model reads next to the caption, "
        "or a list of them: each holds one for every image of `images`, of the same name without "
        "extension. See [conditioning.md](conditioning.md).",
    )
    conditioning_columns: Names | None = Field(
        None,
        exclude_if=is_none,
        description="Columns of the metadata table that name conditioning images in `images`: a "
        "file or a list of files in each cell.",
    )
    repeats: Whole = Field(1, ge=1, description="How often an epoch sees each sample.")
    max_pixels: Whole | None = Field(
        None, ge=64, description="Larger images count as scaled down to this area, aspect kept."
    )
    random_flip: bool = Field(
        False,
        description="Images: train on each image or its mirror image, drawn again for each epoch; "
        "both are encoded. Not for pictures with text or sides.",
    )

    @property
    def is_conditioned(self) -> bool:
        """Whether samples have conditioning images."""
        return bool(self.conditioning_images or self.conditioning_columns)

    @property
    def conditioning_folders(self) -> list[str]:
        """The folders of conditioning_images."""
        return self.conditioning_images or []

    @property
    def other_folders(self) -> list[str]:
        """All folders of images that belong to those of `images`: conditioning images, masks."""
        return [*self.conditioning_folders, *([self.mask_images] if self.mask_images else [])]

    @model_validator(mode="after")
    def _captions_have_one_source(self) -> Self:
        prompt = self.caption_strategy == "instanceprompt"
        if prompt != (self.instance_prompt is not None):
            raise ValueError(
                "caption_strategy: instanceprompt and instance_prompt belong together; "
                f"{'instance_prompt is missing' if prompt else 'set caption_strategy, too'}"
            )
        if self.caption_strategy != "textfile" and self.metadata:
            raise ValueError(
                f"caption_strategy: {self.caption_strategy} reads no metadata; remove one of them"
            )
        if self.caption_encoding != UTF_8 and (
            self.caption_strategy != "textfile" or self.source == "huggingface"
        ):
            raise ValueError("caption_encoding is of text files, and none is read; remove it")
        return self

    @model_validator(mode="after")
    def _shards_have_their_keys(self) -> Self:
        if self.source in SHARDS:
            if not self.images and not getattr(self, "path", None):
                raise ValueError(f"source: {self.source} needs `images`, the folder of its files")
            if self.caption_strategy in ("filename", "foldername"):
                raise ValueError(
                    f"caption_strategy: {self.caption_strategy} reads names of files, and source: "
                    f"{self.source} has none; use textfile or instanceprompt"
                )
        for key in OF_FOLDERS if self.source in SHARDS else OF_SHARDS:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} means nothing to source: {self.source}; remove it")
        if self.image_column and self.source != "huggingface":
            raise ValueError(f"image_column means nothing to source: {self.source}; remove it")
        return self

    @model_validator(mode="after")
    def _conditioning_has_one_source(self) -> Self:
        if self.conditioning_images is not None and self.conditioning_columns is not None:
            raise ValueError("give conditioning_images or conditioning_columns, not both")
        if self.conditioning_columns and self.caption_strategy != "textfile":
            raise ValueError(
                f"conditioning_columns are read from a metadata table, and caption_strategy: "
                f"{self.caption_strategy} reads none; use conditioning_images, or remove "
                "caption_strategy"
            )
        if self.is_conditioned and self.random_flip:
            raise ValueError(
                "random_flip would mirror images and leave their conditioning images as they are; "
                "remove one of them"
            )
        return self


def _plain_number(value: float) -> float:
    """Return a whole number as int: 10 is recorded as 10, and 10.0 says the same."""
    return int(value) if float(value).is_integer() else value


Repeats = Annotated[
    float, AfterValidator(_plain_number), PlainSerializer(_plain_number, return_type=int | float)
]


class SourceConfig(ImageSourceConfig):
    """One of several sources of images, whose samples are named `<name>/<file>`."""

    name: Name = Field(description="Name of the source, different from those of the others.")
    source: Literal["folder", "huggingface", "webdataset"] = Field(
        "folder", description="What `images` holds, as for `data.source`."
    )
    repeats: Repeats = Field(  # type: ignore[assignment]
        1,
        gt=0,
        description="How often an epoch sees each sample. 0.25 takes a quarter of the images in "
        "each epoch, others each time; 2.5 each image two or three times.",
    )
    resolution: Side | None = Field(
        None,
        description="Side of the square of these images, at most train.resolution, which is the "
        "default. Two sources of one folder train its images at two resolutions.",
    )
    is_regularisation_data: bool = Field(
        False, description="Mark the images as regularisation images (prior preservation)."
    )

    @model_validator(mode="after")
    def _has_images_alone(self) -> Self:
        if not self.images:
            raise ValueError("needs `images`, the folder that holds them")
        if self.is_conditioned:
            raise ValueError(
                "conditioning images are not read from several sources; put all images into one "
                "folder and name it in data.images"
            )
        return self
