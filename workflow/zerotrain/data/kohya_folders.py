"""Names of folders as captions, and kohya's folders: the images in `10_sks dog` come 10 times.

Source: train_util.py of kohya's sd-scripts. Only the folder that holds an image counts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from zerotrain.data.source import Found

REPEATED = re.compile(r"(\d+)_(.*)", re.DOTALL)


def folder_caption(root: Path, file: str, *, repeats: bool) -> str:
    """Return the name of an image's folder as its caption.

    Args:
        root: The folder of images.
        file: Name of the image in it.
        repeats: Whether `10_` at the beginning is a number of repeats, and no part of the caption.
    """
    name = (root.absolute() / file).parent.name
    named = REPEATED.fullmatch(name) if repeats else None
    return (named[2] if named else name).strip()


def repeat_as_named(entry: Found, root: Path) -> Found:
    """Return an entry with the repeats that its folder's name gives, or with a reason against it.

    An image in another folder is an error, as kohya's scripts leave such folders out.
    """
    name = (root.absolute() / entry.file).parent.name
    named = REPEATED.fullmatch(name)
    if named and int(named[1]):
        return replace(entry, repeats=int(named[1]))
    why = f"its folder {name!r} is not named REPEATS_NAME, as 10_cat (data.folder_repeats)"
    return replace(entry, reason=entry.reason or why)
