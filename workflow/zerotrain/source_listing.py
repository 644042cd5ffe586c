"""The sources of a stage as one file, which Snakemake takes as an input in place of a hundred.

Each line is a digest and a path, as `sha256sum --check` reads them. A listing is written when the
workflow is read, and only if a source has another content, so that its time is that of an edit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from zerotrain.artifact import file_sha256, replacing

LISTINGS = Path(".snakemake/sources")


def write_listing(name: str, sources: Sequence[str]) -> str:
    """Let a listing say what the sources are now.

    Args:
        name: The listing's own name.
        sources: Paths of files.

    Returns:
        The listing's path. A new listing is as old as the newest source: whoever removes .snakemake
        has not edited anything.
    """
    listing = LISTINGS / f"{name}.sha256"
    text = "".join(f"{file_sha256(Path(source))}  {source}\n" for source in sources)
    try:
        if listing.read_text() == text:
            return str(listing)
        newest = None
    except FileNotFoundError:
        newest = max(os.stat(source).st_mtime_ns for source in sources)
    with replacing(listing) as new:
        new.write_text(text)
        if newest is not None:
            os.utime(new, ns=(newest, newest))
    return str(listing)


def listed(paths: Iterable[str]) -> list[str]:
    """The same paths, with the sources in place of listings."""
    found: list[str] = []
    for path in paths:
        if Path(path).parent == LISTINGS:
            found += [line.partition("  ")[2] for line in Path(path).read_text().splitlines()]
        else:
            found.append(path)
    return found
