"""Several folders of other programs as data.sources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from zerotrain.importers.imported_config import ImportedConfig

LARGEST = "the largest of the datasets; others have a resolution of their own"


def source_names(given: Sequence[str]) -> list[str]:
    """Return a valid and different name for each source: that of its dataset or folder."""
    names: list[str] = []
    for one in given:
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePath(one).name).strip("-_") or "images"
        count = sum(
            re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in names
        )
        names.append(f"{name}-{count + 1}" if count else name)
    return names


def source_prefixes(names: Sequence[str], *, several: bool, result: ImportedConfig) -> list[str]:
    """Return the prefix of each source's keys, and set the names of several sources."""
    if not several:
        return ["data."]
    prefixes = [f"data.sources.{number}." for number in range(len(names))]
    for prefix, name in zip(prefixes, names, strict=True):
        result.assume(f"{prefix}name", name, "after its dataset")
    return prefixes


def put_resolutions(
    key: str, sides: Sequence[int], prefixes: Sequence[str], result: ImportedConfig
) -> None:
    """Set train.resolution to the largest of all sides, and that of each smaller source.

    Args:
        key: The source's key of a resolution.
        sides: The side of each source's square in pixels.
        prefixes: The prefixes of the sources' keys.
        result: Receives the resolutions.
    """
    most = max(sides)
    result.keep(key, most, "train.resolution", reason=LARGEST if len({*sides}) > 1 else "")
    for side, prefix in zip(sides, prefixes, strict=True):
        if side < most:
            result.keep(key, side, f"{prefix}resolution")
