"""The source of a configuration, and the files that it reads.

The files of several sources are named `<name of the source>/<file>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact.documents import LeftOut
from zerotrain.config.image_source import SHARDS, WHITE, SourceConfig
from zerotrain.data.folder import FolderSource, folder_files
from zerotrain.data.source import DIGITS, Found, Source, exact_share
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.config.data import DataConfig
    from zerotrain.config.image_source import ImageSourceConfig


def open_source(data: DataConfig) -> Source:
    """Open the source that the configuration names."""
    if data.source == "digits":
        from zerotrain.data.digits import DigitsSource

        return DigitsSource()
    if data.sources is not None:
        return SourceList(data.sources)
    return open_part(data)


def source_files(data: DataConfig) -> list[str]:
    """List every file that the dataset depends on (images, captions, tables, text), sorted.

    Editing or adding one reruns dependent jobs. Files are only listed, not opened.

    Raises:
        PipelineError: the folder or the metadata file is missing, or there is no image.
    """
    if data.source == "digits":
        return [str(DIGITS)] if DIGITS.is_file() else []
    if data.is_on_hub:
        return []
    if data.is_text:
        from zerotrain.data.text import text_files

        return text_files(data)
    if data.sources is not None:
        return files_of_sources(data.sources)
    return files_of_part(data)


def source_roots(data: DataConfig) -> list[str]:
    """List the folders and files below which everything is that a dataset of images depends on.

    Raises:
        PipelineError: the metadata file is missing.
    """
    from zerotrain.data.folder import configured_table
    from zerotrain.data.listing import root_of

    if data.is_on_hub:
        return []
    roots = [root_of(part) for part in data.parts]
    roots += [Path(one).expanduser() for part in data.parts for one in part.other_folders]
    # A table in the folder is below it.
    tables = [configured_table(part.metadata) for part in data.parts if part.metadata]
    return [*dict.fromkeys(map(str, [*roots, *tables]))]


class SourceList(Source):
    """The images of data.sources, identified by the bytes of their files.

    Args:
        sources: The entries of data.sources.
    """

    name = "data.sources"

    def __init__(self, sources: Sequence[SourceConfig]) -> None:
        self.parts: dict[str, Source] = {one.name: open_part(one) for one in sources}
        self.notes, self.left_out = [], LeftOut()

    def found(self) -> list[Found]:
        """List the entries of all sources, sorted by file."""
        return self._entries(lambda part: part.found())

    def listed(self) -> list[Found]:
        """List the same without reading caption files next to images."""
        return self._entries(lambda part: part.listed())

    def _entries(self, list_part: Callable[[Source], list[Found]]) -> list[Found]:
        entries = []
        self.notes, self.left_out = [], LeftOut()
        for name, part in self.parts.items():
            with naming(name):
                entries += [replace(one, file=f"{name}/{one.file}") for one in list_part(part)]
            self.notes += [f"source {name}: {note}" for note in part.notes]
            self.left_out.update(part.left_out)
        return sorted(entries, key=lambda entry: (entry.file, entry.reason or ""))

    def read(self, file: str) -> bytes:
        """Read the bytes of an image."""
        name, _, inner = file.partition("/")
        return self.parts[name].read(inner)

    def path_of(self, file: str) -> str:
        """Return the path of an image."""
        name, _, inner = file.partition("/")
        return self.parts[name].path_of(inner)

    def mask_source(self, file: str) -> Source:
        """Return the source of the mask of an image."""
        name, _, inner = file.partition("/")
        return self.parts[name].mask_source(inner)

    def decode(self, data: bytes, background: str | None = None) -> Image:
        """Decode an image to upright RGB, as every source does."""
        from zerotrain.data.decode import decode

        return decode(data, background or WHITE)


def open_part(source: ImageSourceConfig) -> Source:
    """Open a single source of images."""
    if source.source not in SHARDS:
        return FolderSource(source)
    from zerotrain.data.shards import HuggingFaceSource, WebDatasetSource

    kinds = {"huggingface": HuggingFaceSource, "webdataset": WebDatasetSource}
    return kinds[source.source](source)


def files_of_part(source: ImageSourceConfig) -> list[str]:
    """List the files of a single source of images; see open.source_files."""
    if source.source not in SHARDS:
        return folder_files(source)
    from zerotrain.data.shards import shard_files

    return shard_files(source)


def files_of_sources(sources: Sequence[SourceConfig]) -> list[str]:
    """List the files of all sources, sorted and each once; see open.source_files."""
    files: set[str] = set()
    for source in sources:
        with naming(source.name):
            files |= {*files_of_part(source)}
    return sorted(files)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Name the source in an error about one of its keys: `data.sources.NAME.KEY`."""
    try:
        yield
    except PipelineError as error:
        what = error.what.removeprefix("data.")
        joint = "." if what != error.what else ": "
        raise PipelineError(f"data.sources.{name}{joint}{what}", hint=error.hint) from error


def source_values(part: ImageSourceConfig, repeats: int) -> dict[str, Any]:
    """Return what one of several sources says of an image that it has `repeats` times."""
    if not isinstance(part, SourceConfig):
        return {"repeats": repeats}  # data.repeats is that of the whole dataset
    rate = repeats * exact_share(part.repeats)
    whole = rate.denominator == 1
    return {
        "source": part.name,
        "repeats": int(rate) if whole else 1,
        "share": 1.0 if whole else float(rate),
        "is_regularisation_data": part.is_regularisation_data,
    }
