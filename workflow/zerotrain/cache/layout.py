"""The format of a cache folder: index.json, and which key lies in which shard."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zerotrain.artifact import check_name, write_json

KIND = "cache"
FORMAT = 1
"""Part of every key: raise it when equal keys would hold other numbers."""

INDEX = "index.json"
LATENTS, TEXT = "latents", "text"
"""The two series of shards."""


@dataclass(frozen=True)
class Entry:
    """One sample: what identifies it, where its tensors are, and the sizes SDXL is told."""

    file: str
    image_sha256: str
    caption_sha256: str
    latents: str
    """Key of its latents."""
    text: str
    """Key of its caption's embeddings."""
    original_size: tuple[int, int]
    """Height and width of the image, after data.max_pixels."""
    crop_top_left: tuple[int, int]
    """Top and left of the crop, in pixels of the image scaled to the resolution."""
    target_size: tuple[int, int]
    """Height and width that were encoded."""
    split: Literal["train", "holdout"]


@dataclass(frozen=True)
class Shard:
    """A safetensors file of one series."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Series:
    """The shards of latents or of text embeddings."""

    count: int
    """Number of key ranges, a power of two; a range without keys has no file."""
    tensors: tuple[str, ...]
    """Names of the tensors stored for each key."""
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Index:
    """What index.json says."""

    resolution: int
    dtype: str
    repeats: int
    """How often an epoch sees each training sample."""
    entries: tuple[Entry, ...]
    """In the dataset's order."""
    empty_text: str
    """Key of the empty caption."""
    latents: Series
    text: Series


def shard_file(series: str, number: int, count: int) -> str:
    """Name of the file that holds key range `number` of `count`."""
    return f"{series}-{number:05d}-of-{count:05d}.safetensors"


def shard_number(key: str, count: int) -> int:
    """Which of `count` equal ranges a key (a hexadecimal digest) lies in."""
    return int(key[:8], 16) * count >> 32


def tensor_name(key: str, tensor: str) -> str:
    """Name within a shard of one of a key's tensors."""
    return f"{key}.{tensor}"


def key_of(name: str) -> str:
    """The key that a tensor in a shard belongs to."""
    return name.partition(".")[0]


def write_index(folder: Path, index: Index) -> None:
    """Write index.json."""
    write_json(folder / INDEX, {"format": FORMAT, **asdict(index)})


def read_index(folder: Path) -> Index:
    """Read index.json.

    Raises:
        OSError: there is none.
        ValueError: it is no index of this format.
    """
    found = json.loads((folder / INDEX).read_text())
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError(f"{folder / INDEX}: not an index of format {FORMAT}")
    try:
        return Index(
            **{
                **found,
                "entries": tuple(_entry(entry) for entry in found["entries"]),
                LATENTS: parse_series(found[LATENTS]),
                TEXT: parse_series(found[TEXT]),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX}: {error}") from error


def listed_shards(folder: Path, index: str = INDEX) -> list[Shard]:
    """The shards of every series that index.json lists, of images or of text, or another index.

    Raises:
        OSError: there is none.
        ValueError: it is no index of this format.
        PipelineError: it names a shard outside of the folder.
    """
    found = json.loads((folder / index).read_text())
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{folder / index}: not an index of format {FORMAT}")
    series = [value for value in found.values() if isinstance(value, dict) and "shards" in value]
    try:
        return [_shard(shard) for one in series for shard in one["shards"]]
    except TypeError as error:
        raise ValueError(f"{folder / index}: {error}") from error


def _entry(found: dict[str, Any]) -> Entry:
    sizes = ("original_size", "crop_top_left", "target_size")
    return Entry(**{**found, **{name: tuple(found[name]) for name in sizes}})


def parse_series(found: dict[str, Any]) -> Series:
    """A series as index.json holds it."""
    shards = tuple(_shard(shard) for shard in found["shards"])
    return Series(found["count"], tuple(found["tensors"]), shards)


def _shard(found: dict[str, Any]) -> Shard:
    shard = Shard(**found)
    check_name(shard.file, INDEX)
    return shard
