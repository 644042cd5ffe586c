"""The section `data`: where samples come from."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from zerotrain.config.section import Name, Section, Whole

TEXT_SOURCES = ("text", "sums", "complaints")
IMAGE_KEYS = ("images", "follow_symlinks", "metadata", "caption_extension", "max_pixels")
TEXT_KEYS = (
    *("path", "format", "subset", "hub_split"),
    *("prompt_column", "response_column", "prompt_template", "label_names"),
)
COLUMN = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
"""What is replaced in a prompt_template: a column's name, or a brace that is written twice."""


class DataConfig(Section):
    """Where samples come from. A data name is shared by runs: it is encoded once."""

    name: Name | None = Field(
        None, description="Folder under results/data; default: the run's name."
    )
    source: Literal["digits", "folder", "text", "sums", "complaints"] = Field(
        "folder",
        description="`folder` reads images from `images`, `text` reads `path`; built-in examples "
        "are `digits` (images), `sums` and `complaints` (text).",
    )
    images: str | None = Field(None, description="Folder of images, searched with its subfolders.")
    follow_symlinks: bool = Field(
        False, description="Take links in `images` that lead out of it, as DVC and hub caches make."
    )
    metadata: str | None = Field(
        None,
        description="metadata.csv or .jsonl with file_name,text or image,prompt; it may lie "
        "anywhere. Default: one in the image folder, else a caption file beside each image.",
    )
    caption_extension: str = Field(
        ".txt", pattern=r"^\.", description="Extension of the caption files beside the images."
    )
    path: str | None = Field(
        None,
        description="Text: a .json, .jsonl or .csv file, or a dataset of Hugging Face: its id, or "
        "the folder that save_to_disk wrote.",
    )
    format: Literal["auto", "alpaca", "chat", "columns"] = Field(
        "auto",
        description="Text: alpaca rows have instruction, input and output; chat rows messages or "
        "conversations; columns are named below. `auto` looks at the first row.",
    )
    subset: str | None = Field(None, description="Text: a Hugging Face dataset's configuration.")
    hub_split: str = Field("train", description="Text: the split of a Hugging Face dataset.")
    prompt_column: str | None = Field(None, description="Text, columns: what is asked.")
    response_column: str | None = Field(None, description="Text, columns: what is answered.")
    prompt_template: str | None = Field(
        None,
        description="Text, columns: the question, with {column} where a row's value goes, such as "
        '"Tweet text : {Tweet text} Label :", and {{ or }} for a brace; it replaces prompt_column.',
    )
    label_names: list[str] | dict[str, str] | None = Field(
        None,
        description="Text, columns: words for the labels in response_column, by number or by "
        "value. Default: a Hugging Face dataset's own names.",
    )
    repeats: Whole = Field(1, ge=1, description="How often an epoch sees each sample.")
    max_pixels: Whole | None = Field(
        None, ge=64, description="Larger images count as scaled down to this area, aspect kept."
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

    @model_validator(mode="after")
    def _source_has_its_keys(self) -> DataConfig:
        if self.source == "folder" and not self.images:
            raise ValueError("source: folder needs `images`, the folder that holds them")
        if self.source == "digits" and (self.images or self.metadata):
            raise ValueError("source: digits brings its own images; remove `images` and `metadata`")
        if self.source == "text" and not self.path:
            raise ValueError("source: text needs `path`, a file or a dataset of Hugging Face")
        others = () if self.source == "text" else TEXT_KEYS
        if self.is_text:
            others = (*others, *IMAGE_KEYS)
        if wrong := [key for key in others if key in self.model_fields_set]:
            raise ValueError(f"{wrong[0]} means nothing to source: {self.source}; remove it")
        return self

    @model_validator(mode="after")
    def _columns_are_named(self) -> DataConfig:
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
