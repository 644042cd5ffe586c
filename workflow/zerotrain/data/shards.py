"""Images in few large files: a dataset of Hugging Face, or tar shards of WebDataset.

On disk both are read in place: an image by its row, or by its offset in the tar.
"""

from __future__ import annotations

import os
import tarfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from errno import ENOENT
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerotrain.artifact.documents import DocumentError, LeftOut, Names, parse_json, read_bytes
from zerotrain.config.data import DataConfig
from zerotrain.config.image_source import WHITE
from zerotrain.data.caption_file import (
    MOST_BYTES,
    BadCaptionError,
    decode_caption,
    read_caption_cell,
)
from zerotrain.data.listing import EXTENSIONS, check_usable_path, root_of
from zerotrain.data.source import MOST_IMAGE_BYTES, Found, Source
from zerotrain.data.table import IRRELEVANT, check_parquet, printable
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_to_read

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.config.image_source import ImageSourceConfig

CAPTIONS = ("text", "caption", "prompt")
"""Columns of captions, in the order in which they are looked for."""
OF_DOWNLOADS = dict.fromkeys(
    (
        *("key", "url", "status", "error_message", "exif", "sha256", "md5"),
        *("width", "height", "original_width", "original_height"),
    ),
    "img2dataset's record of the download",
)
"""Keys next to a caption that do not matter, and why."""


class Shards(Source):
    """Images in the files of a folder.

    Args:
        data: The keys of the source.
    """

    def __init__(self, data: ImageSourceConfig) -> None:
        self.data = data
        self.root = root_of(data)
        self.key, self.name = "data.images", str(self.root)
        self.notes, self.left_out = [], LeftOut()

    def found(self) -> list[Found]:
        """List all images with their captions, in the order of their names."""
        self.notes, self.left_out = [], LeftOut()
        prompt = self.data.instance_prompt
        found = [
            Found(one.file, prompt) if prompt is not None and one.reason is None else one
            for one in self._listed()
        ]
        if not found:
            raise PipelineError(f"{self.key}: {self.name}: no image in it", hint="name another")
        return sorted(found, key=lambda entry: entry.file)

    @abstractmethod
    def _listed(self) -> Iterator[Found]:
        """List the images."""

    def decode(self, data: bytes, background: str | None = None) -> Image:
        """Decode an image to upright RGB."""
        from zerotrain.data.decode import decode

        return decode(data, background or WHITE)


class HuggingFaceSource(Shards):
    """A dataset of the hub, or on disk: from save_to_disk, or Parquet files with images.

    Images are named by their row, as `00000012`.
    """

    def __init__(self, data: ImageSourceConfig) -> None:
        super().__init__(data)
        self._hub = data if isinstance(data, DataConfig) and data.is_on_hub else None
        if self._hub is not None:
            self.key, self.name = "data.path", str(self._hub.path)

    def _listed(self) -> Iterator[Found]:
        table = self._table
        if self.data.instance_prompt is not None:
            self._account()
            yield from (Found(f"{row:08d}") for row in range(len(table)))
            return
        column = self._caption_column
        if column is None or column not in table.features:
            raise PipelineError(
                f"data.caption_column: {self.name} has no column "
                f"{column or ' or '.join(CAPTIONS)}; it has {', '.join(table.features)}",
                hint="name the column that has captions, or set caption_strategy: instanceprompt",
            )
        self._account()
        for row, caption in enumerate(table.select_columns([column])[column]):
            yield _captioned(f"{row:08d}", caption, column)

    @property
    def _caption_column(self) -> str | None:
        named = (name for name in CAPTIONS if name in self._table.features)
        return self.data.caption_column or next(named, None)

    def _account(self) -> None:
        """Count the columns that are neither the image nor the caption."""
        names = Names(self._table.features)
        names.use(self._column)
        if self.data.instance_prompt is None:
            names.use(str(self._caption_column))
        names.ignore(IRRELEVANT)
        self.left_out.add("row", names.leftovers(), len(self._table))

    def read(self, file: str) -> bytes:
        """Read the bytes of the image in a row."""
        if not file.isdecimal() or int(file) >= len(self._table):
            raise FileNotFoundError(ENOENT, "no such row", file)
        found = self._images[int(file)][self._column]
        if isinstance(found, dict) and found.get("bytes") is not None:
            return bytes(found["bytes"])
        if self._hub is None or not isinstance(found, dict) or not found.get("path"):
            raise FileNotFoundError(ENOENT, "the dataset has the path of the image only", file)
        path = _downloaded(Path(found["path"]))
        return read_bytes(path, most=MOST_IMAGE_BYTES, follow_links=True)

    @cached_property
    def _images(self) -> Any:
        """The column of images alone: the library would open the files of others, also by URL."""
        return self._table.select_columns([self._column])

    @cached_property
    def _column(self) -> str:
        features: dict[str, Any] = self._table.features
        images = [name for name, kind in features.items() if _holds_images(kind)]
        if self.data.image_column:
            images = [name for name in images if name == self.data.image_column]
        if len(images) != 1:
            raise PipelineError(
                f"data.image_column: {self.name} has {len(images)} such columns of images; it has "
                f"{', '.join(features)}",
                hint="name the one column that is trained on",
            )
        return images[0]

    @cached_property
    def _table(self) -> Any:
        import datasets

        from zerotrain.data.hub_datasets import load_split

        found = load_split(self._hub) if self._hub is not None else self._on_disk()
        # Pillow would decode formats that are refused here, with its own errors.
        for name, kind in found.features.items():
            if isinstance(kind, datasets.Image):
                found = found.cast_column(name, datasets.Image(decode=False))
        return found

    def _on_disk(self) -> Any:
        import datasets

        files = sorted(self.root.rglob("*.parquet"))
        for file in files:
            check_parquet(file)
        try:
            if files:
                names = [str(file) for file in files]
                found = datasets.load_dataset("parquet", data_files=names, split="train")
            else:
                found = datasets.load_from_disk(str(self.root))
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise PipelineError(
                f"data.images: {self.root}: {' '.join(str(error).split())}",
                hint="name a folder that save_to_disk wrote, or one of .parquet files",
            ) from error
        if isinstance(found, datasets.DatasetDict):
            raise PipelineError(
                f"data.images: {self.root} has the splits {', '.join(found)}",
                hint=f"name the folder of one: {self.root / next(iter(found))}",
            )
        return found


def _downloaded(path: Path) -> Path:
    """Return the path of an image file of a dataset of the hub.

    Raises:
        FileNotFoundError: it is not below the caches of the libraries, which downloaded it. The
            rows of a dataset can name any file of this machine.
    """
    import datasets
    from huggingface_hub import constants

    config = datasets.config
    caches = (constants.HF_HUB_CACHE, config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH)
    file = path.resolve()
    if not any(file.is_relative_to(Path(cache).resolve()) for cache in caches):
        raise FileNotFoundError(ENOENT, "the dataset names a file outside the hub's cache")
    return file


def _holds_images(kind: Any) -> bool:
    import datasets

    return isinstance(kind, datasets.Image) or (isinstance(kind, dict) and "bytes" in kind)


class _Member(NamedTuple):
    """The place of a file in a shard."""

    shard: Path
    offset: int
    size: int


class WebDatasetSource(Shards):
    """Tar files whose members of one name are a sample: NAME.jpg with NAME.txt or NAME.json.

    Images are named `<shard>/<member>`, where the shard has no extension.
    """

    def _listed(self) -> Iterator[Found]:
        members, texts, bad, others = self._members
        yield from bad
        images, further = _choose_images(members)
        for file in (*others, *further):
            self.left_out.add("sample", [_key(file)])
        if further:
            self.notes.append(
                f"{len(further)} further images of samples in {self.root}, such as {further[0]}: "
                "conditioning images and masks are read of `source: folder`"
            )
        for file in texts:
            if _stem(file) not in images:
                yield Found(file, reason="a caption with no image of its name in its shard")
        for stem, chosen in images.items():
            if chosen is None:
                yield Found(stem, reason="several images of this name in its shard")
                continue
            file = chosen
            kinds = [one for one in (f"{stem}.txt", f"{stem}.json") if one in texts]
            if self.data.instance_prompt is not None:
                yield Found(file)
            elif not kinds:
                yield Found(file, reason=f"no caption: no {stem}.txt or .json in its shard")
            else:
                yield self._captioned(file, kinds[0], texts[kinds[0]])

    def read(self, file: str) -> bytes:
        """Read the bytes of an image from its shard."""
        if file not in self._members[0]:
            raise FileNotFoundError(ENOENT, "no such file in the shards", file)
        return _read(self._members[0][file])

    def _captioned(self, image: str, file: str, member: _Member) -> Found:
        if member.size > MOST_BYTES:
            size = f"{member.size:,} bytes; captions are read up to {MOST_BYTES:,}"
            return Found(image, reason=f"caption {file} has {size}")
        try:
            text = decode_caption(_read(member), self.data.caption_encoding)
            if file.endswith(".txt"):
                return _captioned(image, text.strip(), file)
            found = parse_json(text, file, cells=True)
        except BadCaptionError as error:
            return Found(image, reason=f"caption {file} {error}")
        except DocumentError as error:
            return Found(image, reason=f"caption {file}: {error.why}")
        named = found if isinstance(found, dict) else {}
        asked = (self.data.caption_column,) if self.data.caption_column else CAPTIONS
        column = next((name for name in asked if name in named), None)
        names = Names(named)
        names.use(str(column))
        names.ignore(IRRELEVANT | OF_DOWNLOADS)
        self.left_out.add("caption", names.leftovers())
        if column is None:
            return Found(image, reason=f"caption {file} has no {' or '.join(asked)}")
        return _captioned(image, named[column], f"{file}: {column}")

    @cached_property
    def _members(self) -> tuple[dict[str, _Member], dict[str, _Member], list[Found], list[str]]:
        """Find images, captions, bad and other members of all shards, reading only headers."""
        images: dict[str, _Member] = {}
        texts: dict[str, _Member] = {}
        bad: list[Found] = []
        others: list[str] = []
        for shard in sorted(self.root.rglob("*.tar")):
            start = shard.relative_to(self.root).with_suffix("").as_posix()
            try:
                with (
                    open_to_read(shard, follow_links=True) as stream,
                    tarfile.open(fileobj=stream, mode="r:") as opened,
                ):
                    members = opened.getmembers()
            except (OSError, tarfile.TarError) as error:
                raise PipelineError(
                    f"data.images: {shard}: {getattr(error, 'strerror', None) or error}",
                    hint="write an uncompressed .tar",
                ) from error
            for member in members:
                if member.isdir():
                    continue
                file = f"{start}/{printable(member.name)}"
                if reason := _refused(member):
                    bad.append(Found(file, reason=reason))
                elif file.lower().endswith(EXTENSIONS):
                    images[file] = _Member(shard, member.offset_data, member.size)
                elif file.endswith((".txt", ".json")):
                    texts[file] = _Member(shard, member.offset_data, member.size)
                else:
                    others.append(file)
        return images, texts, bad, others


def _refused(member: tarfile.TarInfo) -> str | None:
    if member.issym() or member.islnk():
        return f"a link, to {printable(member.linkname)}"
    if not member.isreg() or member.issparse():
        return "no plain file"
    if member.name.startswith("/") or ".." in member.name.split("/"):
        return "its name leaves the shard"
    return None if printable(member.name) == member.name else "its name is not UTF-8"


def _choose_images(files: Iterable[str]) -> tuple[dict[str, str | None], list[str]]:
    """Choose the image of each sample: where it has several, NAME.jpg and not NAME.other.jpg.

    Returns:
        The image by the sample's name, None if several may be it; and the further images.
    """
    samples: dict[str, list[str]] = {}
    for file in files:
        samples.setdefault(_stem(file), []).append(file)
    images: dict[str, str | None] = {}
    further = []
    for stem, own in samples.items():
        plain = (
            own if len(own) == 1 else [file for file in own if Path(file).stem == Path(stem).name]
        )
        images[stem] = plain[0] if len(plain) == 1 else None
        further += [file for file in own if file not in plain]
    return images, further


def _key(file: str) -> str:
    """Return the name of a member within its sample, as WebDataset does: `cond.png`, `cls`."""
    return file.rpartition("/")[2].partition(".")[2]


def _stem(file: str) -> str:
    """Return a sample's name: WebDataset takes the first dot of a file's name for its end."""
    folder, _, name = file.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def _read(member: _Member) -> bytes:
    with open_to_read(member.shard, follow_links=True) as stream:
        stream.seek(member.offset)
        found = stream.read(member.size)
    if len(found) < member.size:
        raise OSError(0, f"{member.shard} is shorter than its headers say")
    return found


def _captioned(file: str, caption: object, where: str) -> Found:
    try:
        first, *others = read_caption_cell(caption, where)
    except BadCaptionError as error:
        return Found(file, reason=str(error))
    return Found(file, first, other_captions=tuple(others))


def shard_files(data: ImageSourceConfig) -> list[str]:
    """List the files of the folder, sorted; see open.source_files.

    Raises:
        PipelineError: the folder is missing, or has none.
    """
    root = root_of(data)
    check_usable_path(root, "data.images")
    ends = (".tar",) if data.source == "webdataset" else (".arrow", ".json", ".parquet")
    found = sorted(
        os.path.join(folder, name)
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith(ends)
    )
    if not found:
        kinds = " or ".join(ends)
        raise PipelineError(
            f"data.images: {root}: no such folder, or no {kinds} in it",
            hint=f"source: {data.source} reads such files",
        )
    for path in found:
        check_usable_path(Path(path), "data.images")
    return found
