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
    from zerotrain.data.folder import FolderSource

    return FolderSource(data)


def source_files(data: DataConfig) -> list[str]:
    """List every file that the dataset depends on (images, captions, tables, text), sorted.

    Editing or adding one reruns dependent jobs. Files are only listed, not opened.

    Raises:
        PipelineError: the folder or the metadata file is missing, or there is no image.
    """
    if data.source == "digits":
        return [str(DIGITS)] if DIGITS.is_file() else []
    if data.is_text:
        from zerotrain.data.text import text_files

        return text_files(data)
    from zerotrain.data.folder import folder_files

    return folder_files(data)


def source_roots(data: DataConfig) -> list[str]:
    """List the folders and files below which everything is that a dataset of images depends on.

    Raises:
        PipelineError: the metadata file is missing.
    """
    from zerotrain.data.folder import find_table
    from zerotrain.data.listing import root_of

    folders = [root_of(data), *(Path(one).expanduser() for one in data.other_folders)]
    table = find_table(data)
    return [str(path) for path in [*folders, *([table] if table else [])]]
