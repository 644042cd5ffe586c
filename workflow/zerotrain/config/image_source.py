"""The keys of one source of images: where they are, their captions, how an epoch sees them."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from zerotrain.config.captions import UTF_8, CaptionConfig
from zerotrain.config.image_options import ImageOptions
from zerotrain.config.section import Name, Side, Whole, is_none


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
