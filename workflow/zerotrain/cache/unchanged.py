"""An unchanged index keeps its bytes: another version of a library may write others."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from zerotrain.artifact import link_or_copy
from zerotrain.cache.layout import COLUMNS, INDEX, Index, check_columns, read_index, write_index
from zerotrain.cache.token_layout import TokenIndex, read_token_index, write_token_index


def same_index(folder: Path, index: Index | TokenIndex) -> bool:
    """Return whether a cache folder already has this index, undamaged."""
    with suppress(OSError, ValueError):
        read = read_index if isinstance(index, Index) else read_token_index
        check_columns(folder)
        return read(folder) == index
    return False


def carry_index(folder: Path, draft: Path, index: Index | TokenIndex, *, unchanged: bool) -> None:
    """Write the index to a draft of a cache folder; link an unchanged one.

    Args:
        folder: The cache folder.
        draft: The folder that the cache is written to.
        index: The present index.
        unchanged: Whether `folder` has it already.
    """
    if unchanged:
        for name in (INDEX, COLUMNS):
            link_or_copy(folder / name, draft / name)
    elif isinstance(index, Index):
        write_index(draft, index)
    else:
        write_token_index(draft, index)
