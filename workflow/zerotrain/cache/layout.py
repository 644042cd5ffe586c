"""The format of a cache folder: its index, and the assignment of keys to shards.

index.json lists the series with their shards, and index.arrow has a row for each sample
(artifact.columns), which is mapped and not loaded.

A text dataset's tokens are stored once per conversation. A row of its index is one training sample:
a conversation, or several concatenated ones if rows are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from zerotrain.artifact import check_name, file_sha256, streamed_digest, write_json
from zerotrain.artifact.columns import Columns, read_columns
from zerotrain.artifact.documents import check_type, read_object

T = TypeVar("T")

KIND = "cache"
FORMAT = 2
"""Format of the indexes of samples and of prompts; the format of the keys is in `sample_keys`."""

INDEX = "index.json"
COLUMNS = "index.arrow"
COLUMNS_SHA256 = "columns_sha256"
DATA_SHA256 = "data_sha256"
MOST_RANGES = 2**32
"""Key ranges: as many as there are values of the digits that choose one."""
LATENTS, TEXT, CONDITIONING, MASKS = "latents", "text", "conditioning", "masks"
"""The series of shards; the last two only for data with conditioning images, and with masks."""

MASK = "loss_mask"
"""The tensor of a mask, and its name in a batch: float32 [1, h, w], or [B, 1, h, w]."""


@dataclass(frozen=True)
class Entry:
    """One sample: its identity, the keys of its tensors, and the sizes for SDXL."""

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
    """Height and width of the encoded image."""
    split: Literal["train", "holdout"]
    flipped: str | None = None
    """Key of its mirror image's latents, if data.random_flip can draw it."""
    conditioning: str | None = None
    """Key of its encoded conditioning images, all together."""
    conditioning_sha256: tuple[str, ...] | None = None
    """Digests of its conditioning images."""
    empty_text: str | None = None
    """Key of the empty caption with its conditioning images, if the text encoder sees them."""
    repeats: int = 1
    """How often an epoch has it, times the index's repeats."""
    share: float = 1.0
    """How often on average, if that is no whole number."""
    is_regularisation_data: bool = False
    other_captions_sha256: tuple[str, ...] | None = None
    """Digests of its other captions, of which a turn can draw one."""
    other_texts: tuple[str, ...] | None = None
    """Keys of their embeddings."""
    other_latents: tuple[str, ...] | None = None
    """Keys of other parts of the image, of which a turn can draw one."""
    other_flipped: tuple[str, ...] | None = None
    """Keys of their mirror images."""
    other_crops: tuple[int, ...] | None = None
    """Their tops and lefts, as crop_top_left: two numbers for each."""
    loss_weight: float = 1.0
    """Factor of its loss in training."""
    background: str | None = None
    """The colour behind its transparent pixels, if it has some and the colour is not white."""
    mask_sha256: str | None = None
    """Digest of the file with its loss mask."""
    mask: str | None = None
    """Key of its loss mask, which is mirrored with its latents."""
    other_masks: tuple[str, ...] | None = None
    """Keys of the masks of other_latents."""
    other_conditioning: tuple[str, ...] | None = None
    """Keys of its conditioning images, cut as other_latents are."""


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

    def __post_init__(self) -> None:
        """Check the count, by which files and keys are found."""
        if self.count.bit_count() != 1 or not 0 < self.count <= MOST_RANGES:
            raise ValueError(f"count: {self.count} is no power of two up to {MOST_RANGES}")


@dataclass(frozen=True)
class Index:
    """The content of an index."""

    resolution: int
    dtype: str
    repeats: int
    """How often an epoch sees each training sample."""
    entries: Sequence[Entry]
    """In the dataset's order."""
    empty_text: str | None
    """Key of the empty caption; None if each entry has its own."""
    latents: Series
    text: Series
    conditioning: Series | None = None
    masks: Series | None = None
    data_sha256: str = field(kw_only=True)
    """Digest of what a training draws (cache.drawn_digest)."""


def shard_file(series: str, number: int, count: int) -> str:
    """Return the name of the file with key range `number` of `count`."""
    return f"{series}-{number:05d}-of-{count:05d}.safetensors"


def shard_number(key: str, count: int) -> int:
    """Return which of `count` equal ranges contains a key (a hexadecimal digest)."""
    return int(key[:8], 16) * count >> 32


@dataclass(frozen=True)
class KeyRange:
    """One of several equal ranges of keys; their number is a power of two, as that of shards."""

    number: int
    count: int

    def holds(self, key: str) -> bool:
        """Return whether a key is in the range."""
        return shard_number(key, self.count) == self.number

    def meets(self, file: str) -> bool:
        """Return whether a shard of this name may hold keys of the range."""
        number, count = (int(one) for one in file.partition(".")[0].split("-")[-3::2])
        return number * self.count < (self.number + 1) * count and (
            self.number * count < (number + 1) * self.count
        )


WHOLE = KeyRange(0, 1)


def tensor_name(key: str, tensor: str) -> str:
    """Return the name of one of a key's tensors within a shard."""
    return f"{key}.{tensor}"


def key_of(name: str) -> str:
    """Return the key that a tensor in a shard belongs to."""
    return name.partition(".")[0]


def write_index(folder: Path, index: Index) -> None:
    """Write index.json and index.arrow."""
    head = asdict(replace(index, entries=()))
    del head["entries"]
    for name in (CONDITIONING, MASKS):
        if head[name] is None:
            del head[name]
    write_records(folder, head, Columns.of(Entry, index.entries))


def read_index(folder: Path) -> Index:
    """Read an index.

    Raises:
        OSError: a file is missing.
        ValueError: it is not an index of this format.
    """

    def parse(found: dict[str, Any]) -> Index:
        names = (LATENTS, TEXT, CONDITIONING, MASKS)
        series = {name: parse_series(found[name]) for name in names if name in found}
        entries = take_records(folder, found, Entry)
        return Index(**{**found, **series, "entries": entries})

    return read_document(folder / INDEX, parse)


def write_records(folder: Path, head: Mapping[str, Any], records: Columns[Any]) -> None:
    """Write an index of images or text: its records as columns, the rest as index.json."""
    records.write(folder / COLUMNS)
    sha256 = file_sha256(folder / COLUMNS)
    write_json(folder / INDEX, {"format": FORMAT, **head, COLUMNS_SHA256: sha256})


def take_records(folder: Path, found: dict[str, Any], record: type[T]) -> Columns[T]:
    """Map the records of a parsed index.json, and take the digest of their file out of it."""
    del found[COLUMNS_SHA256]
    return read_columns(folder / COLUMNS, record)


def check_columns(folder: Path) -> None:
    """Check that index.arrow is the one that index.json names.

    Raises:
        OSError: a file is missing.
        ValueError: it is not an index of this format, or index.arrow has another digest.
    """

    def parse(found: dict[str, Any]) -> None:
        if file_sha256(folder / COLUMNS) != found[COLUMNS_SHA256]:
            raise ValueError(f"{folder / COLUMNS}: is not the one that {INDEX} names")

    read_document(folder / INDEX, parse)


def listed_shards(folder: Path, index: str = INDEX) -> list[Shard]:
    """List the shards of every series in index.json, of images or text, or in another index.

    Raises:
        OSError: the file is missing.
        ValueError: it is not an index of this format.
        PipelineError: it names a shard outside the folder.
    """

    def parse(found: dict[str, Any]) -> list[Shard]:
        series = [one for one in found.values() if isinstance(one, dict) and "shards" in one]
        return [shard for one in series for shard in parse_series(one).shards]

    return read_document(folder / index, parse)


def read_document(path: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """Read and parse an index of images, text or prompts.

    Raises:
        OSError: the file is missing.
        ValueError: it is not an index of this format.
    """
    found = read_object(path)
    if found.pop("format", None) != FORMAT:
        raise ValueError(f"{path}: not an index of format {FORMAT}")
    try:
        return parse(found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def parse_series(found: dict[str, Any]) -> Series:
    """Parse a series from index.json."""
    series = check_type(found, Series, INDEX)
    for shard in series.shards:
        check_name(shard.file, INDEX)
    return series


OTHERS = (
    *("repeats", "share", "other_captions_sha256", "other_crops"),
    *("loss_weight", "background", "mask_sha256"),
)
"""What else a turn of a sample can draw, and how it counts."""


def drawn_digest(entries: Iterable[Entry], dtype: Any, max_sequence_length: Any) -> str:
    """Compute the digest of the train split's pixels, captions, crops and sizes.

    It says what a training draws, regardless of keys and code. A cache's index has it, so that a
    training of millions of images does not compute it at its start.

    It is the digest of {"samples": [...], "dtype": ..., "max_sequence_length": ...}.

    Args:
        entries: Samples of both splits.
        dtype: The cache's dtype.
        max_sequence_length: The setting that texts were encoded with.
    """
    samples = (_drawn(one) for one in entries if one.split == "train")
    values = {"samples": samples, "dtype": dtype, "max_sequence_length": max_sequence_length}
    return streamed_digest(values)


def _drawn(entry: Entry) -> list[Any]:
    return [
        entry.image_sha256,
        entry.caption_sha256,
        entry.original_size,
        entry.crop_top_left,
        entry.target_size,
        entry.flipped is not None,
        entry.conditioning_sha256,
        *(getattr(entry, name) for name in OTHERS),
    ]


TOKENS = "tokens"
"""The only series of shards."""


@dataclass(frozen=True)
class Row:
    """One training sample."""

    keys: tuple[str, ...]
    """Keys of its conversations, in order."""
    split: Literal["train", "holdout"]
    sha256: str = ""
    """Digest of a held-out row's conversation, by which a subset is chosen."""


@dataclass(frozen=True)
class TokenIndex:
    """The content of an index."""

    max_length: int
    packing: bool
    repeats: int
    """How often an epoch sees each row of the train split."""
    rows: Sequence[Row]
    tokens: Series


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Pack conversations into rows of at most max_length tokens by "best fit decreasing".

    Johnson, "Near-optimal bin packing algorithms" (1973). Rows, and conversations within them, are
    in the order of their first members.

    Returns:
        The positions of each row's conversations.
    """
    rows: list[list[int]] = []
    room: list[list[int]] = [[] for _ in range(max_length + 1)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        left = next((n for n in range(lengths[i], max_length + 1) if room[n]), None)
        if left is None:
            rows.append([])
            left, number = max_length, len(rows) - 1
        else:
            number = room[left].pop()
        rows[number].append(i)
        room[left - lengths[i]].append(number)
    return sorted(sorted(row) for row in rows)


def write_token_index(folder: Path, index: TokenIndex) -> None:
    """Write index.json and index.arrow."""
    head = asdict(replace(index, rows=()))
    del head["rows"]
    write_records(folder, head, Columns.of(Row, index.rows))


def read_token_index(folder: Path) -> TokenIndex:
    """Read an index.

    Raises:
        OSError: a file is missing.
        ValueError: it is not an index of this format.
    """

    def parse(found: dict[str, Any]) -> TokenIndex:
        rows = take_records(folder, found, Row)
        return TokenIndex(**{**found, "rows": rows, TOKENS: parse_series(found[TOKENS])})

    return read_document(folder / INDEX, parse)
