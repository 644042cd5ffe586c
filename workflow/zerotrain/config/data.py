"""The section `data`: where samples come from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from zerotrain.config.image_source import (
    CaptionConfig,
    ImageOptions,
    ImageSourceConfig,
    SourceConfig,
    is_value,
)
from zerotrain.config.section import Name, Section, Side, Whole, is_none

TEXT_SOURCES = ("text", "sums", "complaints")
IMAGE_KEYS = (
    *("sources", "images", "follow_symlinks", "metadata", "caption_extension", "max_pixels"),
    *("caption_strategy", "instance_prompt", "folder_repeats", "aspect_buckets", "random_flip"),
    *("image_column", "caption_column", "conditioning_images", "conditioning_columns"),
    *CaptionConfig.model_fields,
    *ImageOptions.model_fields,
)
HUB_KEYS = ("path", "subset", "hub_split", "revision")
TEXT_KEYS = (
    *("format", *HUB_KEYS),
    *("prompt_column", "response_column", "prompt_template", "label_names"),
)
ALPACA = "alpaca"
"""The prompt_template that is a text of its own, of rows of that format."""
COLUMN = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
"""What is replaced in a prompt_template: a column's name, or a brace that is written twice."""


def _switched_on(value: Any) -> Any:
    """Take `true` as a section of defaults, and `false` as none."""
    return {True: {}, False: None}.get(value, value) if isinstance(value, bool) else value


class BucketConfig(Section):
    """Sizes of images of other shapes than a square, with about as many pixels as one."""

    alignment: Side = Field(64, description="Widths and heights are multiples of it, in pixels.")
    min_aspect: float = Field(
        0.5, gt=0, le=1, description="Width through height of the narrowest bucket."
    )
    max_aspect: float = Field(2.0, ge=1, description="Width through height of the widest bucket.")
    sizes: tuple[tuple[Side, Side], ...] | None = Field(
        None,
        min_length=1,
        description="Buckets of your own, as [width, height], instead of the computed ones.",
    )
    crop: Literal["center", "random", "none"] = Field(
        "center",
        description="What is cut from an image of another shape than its bucket: both ends, a part "
        "drawn once by its content, or nothing: then the image is stretched.",
    )
    crop_variants: Whole = Field(
        1,
        ge=1,
        exclude_if=is_value(1),
        description="With crop: random, how many parts of a training image are encoded; training "
        "draws one each time.",
    )
    max_upscale: float | None = Field(
        None,
        gt=0,
        description="An image that would be enlarged by more gets a smaller bucket, down to one "
        "of the alignment.",
    )
    merge_below: Whole = Field(
        0,
        ge=0,
        description="A bucket of fewer training images is dissolved: they join the bucket of the "
        "nearest shape.",
    )

    @model_validator(mode="after")
    def _variants_are_random(self) -> BucketConfig:
        if self.crop_variants > 1 and self.crop != "random":
            raise ValueError(
                f"crop_variants: {self.crop_variants} parts of an image differ only with "
                f"crop: random, and crop is {self.crop}"
            )
        return self

    @model_validator(mode="after")
    def _sizes_are_aligned(self) -> BucketConfig:
        for width, height in self.sizes or ():
            if width % self.alignment or height % self.alignment:
                raise ValueError(
                    f"sizes: {width}x{height} is no multiple of alignment: {self.alignment}"
                )
        return self


class DataConfig(ImageSourceConfig):
    """Where samples come from. A data name is shared by runs: it is encoded once."""

    name: Name | None = Field(
        None, description="Folder under results/data; default: the run's name."
    )
    source: Literal[
        "digits", "folder", "huggingface", "webdataset", "text", "sums", "complaints"
    ] = Field(
        "folder",
        description="`folder` reads images from `images`, `huggingface` a dataset on disk there, "
        "or one of the hub at `path`, `webdataset` tar shards in `images`; `text` reads `path`; "
        "built-in examples are `digits` (images), `sums` and `complaints` (text).",
    )
    path: str | None = Field(
        None,
        description="Text: a .json, .jsonl or .csv file, or a dataset of Hugging Face: its id, or "
        "the folder that save_to_disk wrote. huggingface: the id of a dataset of images on the "
        "hub, instead of `images`.",
    )
    format: Literal["auto", "alpaca", "chat", "columns"] = Field(
        "auto",
        description="Text: alpaca rows have instruction, input and output; chat rows messages or "
        "conversations; columns are named below. `auto` looks at the first row.",
    )
    subset: str | None = Field(None, description="With `path`: a dataset's configuration.")
    hub_split: str = Field("train", description="With `path`: the split of a dataset.")
    revision: str | None = Field(
        None,
        exclude_if=is_none,
        description="With `path`: branch, tag or commit of a dataset of the hub; a commit pins it.",
    )
    prompt_column: str | None = Field(None, description="Text, columns: what is asked.")
    response_column: str | None = Field(None, description="Text, columns: what is answered.")
    prompt_template: str | None = Field(
        None,
        description="Text, columns: the question, with {column} where a row's value goes, such as "
        '"Tweet text : {Tweet text} Label :", and {{ or }} for a brace; it replaces prompt_column. '
        "`alpaca`: rows of that format in the prompt text of Stanford Alpaca, without a chat "
        "template.",
    )
    label_names: list[str] | dict[str, str] | None = Field(
        None,
        description="Text, columns: words for the labels in response_column, by number or by "
        "value. Default: a Hugging Face dataset's own names.",
    )
    sources: list[SourceConfig] | None = Field(
        None,
        min_length=1,
        exclude_if=is_none,
        description="Several folders of images instead of one, each with the keys below. See "
        "[datasets.md](datasets.md).",
    )
    aspect_buckets: Annotated[BucketConfig | None, BeforeValidator(_switched_on)] = Field(
        None,
        exclude_if=is_none,
        description="Keep the shape of images instead of the centre square: `true`, or the keys "
        "below. A batch has images of one size. See [aspect-buckets.md](aspect-buckets.md).",
    )
    holdout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of samples kept from training, chosen by the hash of the image, or of "
        "what stands before the first answer.",
    )
    max_bad_samples: Whole = Field(
        0, ge=0, description="More unusable samples than this stop the run."
    )
    num_workers: Whole = Field(2, ge=0, description="Threads that read and decode images.")

    @property
    def is_text(self) -> bool:
        """Whether samples are text and no images."""
        return self.source in TEXT_SOURCES

    @property
    def is_on_hub(self) -> bool:
        """Whether samples are images of a dataset of the hub."""
        return self.source == "huggingface" and self.path is not None

    @property
    def has_image_files(self) -> bool:
        """Whether samples are images in the user's folders."""
        return not self.is_text and self.source != "digits" and not self.is_on_hub

    @property
    def parts(self) -> Sequence[ImageSourceConfig]:
        """The sources of images: those of `sources`, else the section itself."""
        return self.sources or [self]

    @property
    def place(self) -> str:
        """Where samples come from, for messages: a folder, a file, names of sources."""
        names = ", ".join(one.name for one in self.sources or ())
        return names or self.images or self.path or self.source

    @property
    def resolutions(self) -> dict[str, int]:
        """The sides of squares in pixels of the sources that have one of their own, by name."""
        return {one.name: one.resolution for one in self.sources or () if one.resolution}

    def part_of(self, file: str) -> ImageSourceConfig:
        """Return the source of an image by the name of its sample."""
        name = file.partition("/")[0]
        return next((one for one in self.sources or () if one.name == name), self)

    @model_validator(mode="after")
    def _sources_have_their_keys(self) -> DataConfig:
        if self.sources is None:
            return self
        if self.source != "folder":
            raise ValueError(f"source: {self.source} is read alone; remove it, or sources")
        defaults = {key: field.default for key, field in ImageSourceConfig.model_fields.items()}
        given = {key for key, default in defaults.items() if getattr(self, key) != default}
        if moved := sorted(given - {"name", "source"}):
            raise ValueError(f"with sources, {moved[0]} is a key of each of them; move it there")
        names = [one.name for one in self.sources]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"sources: two are named {twice[0]}; rename one")
        return self

    @model_validator(mode="after")
    def _source_has_its_keys(self) -> DataConfig:
        if self.source == "folder" and not self.images and self.sources is None:
            raise ValueError(
                "source: folder needs `images`, the folder that holds them, or `sources`"
            )
        if self.source == "digits" and (self.images or self.metadata):
            raise ValueError("source: digits brings its own images; remove `images` and `metadata`")
        if self.source == "digits" and self.is_conditioned:
            raise ValueError(
                "source: digits has no conditioning images; remove conditioning_images and "
                "conditioning_columns"
            )
        for key in ("transparent_background", "loss_mask", "mask_images"):
            if self.source == "digits" and key in self.model_fields_set:
                raise ValueError(f"source: digits has opaque images and no masks; remove {key}")
        if self.source == "text" and not self.path:
            raise ValueError("source: text needs `path`, a file or a dataset of Hugging Face")
        if self.is_on_hub and self.images:
            raise ValueError("give images, a folder, or path, a dataset of the hub, not both")
        taken = HUB_KEYS if self.is_on_hub else ()
        others = () if self.source == "text" else tuple(k for k in TEXT_KEYS if k not in taken)
        if self.is_text:
            others = (*others, *IMAGE_KEYS)
        if wrong := [key for key in others if key in self.model_fields_set]:
            raise ValueError(f"{wrong[0]} means nothing to source: {self.source}; remove it")
        return self

    @model_validator(mode="after")
    def _columns_are_named(self) -> DataConfig:
        if self.prompt_template == ALPACA:
            if self.format not in ("auto", "alpaca"):
                raise ValueError(
                    f"prompt_template: {ALPACA} is for rows of the format alpaca, and format is "
                    f"{self.format}"
                )
            if self.prompt_column or self.response_column or self.label_names:
                raise ValueError(
                    f"prompt_template: {ALPACA} has columns of its own; remove the others"
                )
            return self
        asked = self.prompt_column or self.prompt_template
        named = [asked, self.response_column]
        if self.format == "columns" and not all(named):
            raise ValueError(
                "format: columns needs response_column, and prompt_column or prompt_template"
            )
        if any([*named, self.label_names]) and self.format not in ("auto", "columns"):
            raise ValueError(f"format: {self.format} has columns of its own; remove the others")
        if (any(named) or self.label_names) and not all(named):
            raise ValueError("give response_column, and prompt_column or prompt_template")
        if self.prompt_column and self.prompt_template:
            raise ValueError("give prompt_column or prompt_template, not both")
        if self.prompt_template and not any(COLUMN.findall(self.prompt_template)):
            raise ValueError(
                f"prompt_template: {self.prompt_template!r} names no column, so that every row "
                "would ask the same; write {column} where its value goes"
            )
        return self
