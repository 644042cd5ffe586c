"""The source of a configuration, and the files that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.data.source import DIGITS, Source

if TYPE_CHECKING:
    from zerotrain.config.data import DataConfig


def open_source(data: DataConfig) -> Source:
    """Open the source that the configuration names."""
    if data.source == "digits":
        from zerotrain.data.digits import DigitsSource

        return DigitsSource()
    if data.sources is not None:
        from zerotrain.data.source_list import SourceList

        return SourceList(data.sources)
    from zerotrain.data.source_list import open_part

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
        from zerotrain.data.source_list import files_of_sources

        return files_of_sources(data.sources)
    from zerotrain.data.source_list import files_of_part

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
