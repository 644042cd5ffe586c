"""Reuse of caches of earlier versions, whose keys had a digest of code, through their indexes.

An index records which image, crop and caption each sample's keys represent. Anything else (parts,
lengths) is compared: no tensors of such a cache are used before some of them were encoded again
(`reuse`). If all are reused, their keys and every byte stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zerotrain import artifact
from zerotrain.artifact import Artifact, link_or_copy
from zerotrain.artifact.documents import read_object
from zerotrain.cache.layout import (
    COLUMNS,
    INDEX,
    KIND,
    Entry,
    Index,
    is_columnar,
    read_index,
    write_index,
    write_json_index,
)
from zerotrain.cache.prompts import PROMPTS_INDEX, PromptKeys
from zerotrain.cache.record import ENCODING
from zerotrain.cache.token_layout import (
    TokenIndex,
    read_token_index,
    write_json_token_index,
    write_token_index,
)
from zerotrain.cache.writer import StoredShards
from zerotrain.config.models import CacheConfig
from zerotrain.config.section import ConditionedPrompt
from zerotrain.errors import PipelineError

Asked = str | ConditionedPrompt

UNKNOWN = object()
OF_TEXT = ("text", "empty", "prompt")
"""Facts that identify captions and prompts."""


def earlier_keys(
    folder: Path,
    entries: Sequence[Entry],
    empty_text: str | None,
    prompts: Mapping[Asked, PromptKeys],
    *,
    base: Artifact,
    cache: CacheConfig,
) -> dict[str, str]:
    """Map the present keys to the keys under which an earlier version stored the same data.

    Args:
        folder: The cache folder.
        entries: The samples with their present keys.
        empty_text: Present key of the empty caption.
        prompts: Present keys of validation prompts.
        base: The base; a cache of another base has nothing to reuse.
        cache: The section `cache` of the configuration.
    """
    if (folder / ENCODING).exists():
        return {}
    try:
        index = read_index(folder)
    except (OSError, ValueError):
        return {}
    parent, length = _made_of(folder)
    if index.dtype != cache.dtype or parent not in (None, base.identity):
        return {}
    before = _by_facts(index.entries, index.empty_text)
    now = _by_facts(entries, empty_text)
    before |= _prompts_before(folder)
    for asked, keys in prompts.items():
        if isinstance(asked, str):
            now[("prompt", asked)] = keys.text
            now[("prompt", "")] = keys.empty
    facts = now.keys() & before.keys()
    if length not in (UNKNOWN, cache.max_sequence_length):
        facts = {fact for fact in facts if fact[0] not in OF_TEXT}
    return {now[fact]: before[fact] for fact in facts}


def with_keys(entries: Sequence[Entry], names: Mapping[str, str]) -> tuple[Entry, ...]:
    """Replace the entries' keys by their keys in a cache of an earlier version."""
    return tuple(
        replace(
            entry,
            latents=names[entry.latents],
            text=names[entry.text],
            flipped=names[entry.flipped] if entry.flipped else None,
            conditioning=names[entry.conditioning] if entry.conditioning else None,
            empty_text=names[entry.empty_text] if entry.empty_text else None,
            other_texts=_named(entry.other_texts, names),
            other_latents=_named(entry.other_latents, names),
            other_flipped=_named(entry.other_flipped, names),
            other_conditioning=_named(entry.other_conditioning, names),
        )
        for entry in entries
    )


def _named(keys: tuple[str, ...] | None, names: Mapping[str, str]) -> tuple[str, ...] | None:
    return keys and tuple(names[key] for key in keys)


def same_index(folder: Path, index: Index | TokenIndex) -> bool:
    """Return whether a cache folder already has this index, undamaged."""
    with suppress(OSError, ValueError):
        read = read_index if isinstance(index, Index) else read_token_index
        is_columnar(folder)
        return read(folder) == index
    return False


def carry_index(folder: Path, draft: Path, index: Index | TokenIndex, *, unchanged: bool) -> None:
    """Write the index to a draft of a cache folder.

    Args:
        folder: The cache folder; an unchanged index keeps its format and its bytes.
        draft: The folder that the cache is written to.
        index: The present index.
        unchanged: Whether `folder` has it already.
    """
    if unchanged and is_columnar(folder):
        for name in (INDEX, COLUMNS):  # another version of the library may write other bytes
            link_or_copy(folder / name, draft / name)
    elif isinstance(index, Index):
        (write_json_index if unchanged else write_index)(draft, index)
    else:
        (write_json_token_index if unchanged else write_token_index)(draft, index)


def earlier_tokens(folder: Path, index: TokenIndex, stored: StoredShards) -> TokenIndex | None:
    """Return an earlier version's index if all its rows have the same tokens.

    Args:
        folder: The cache folder.
        index: The present rows under their present keys.
        stored: The folder's content, including the present rows.
    """
    if (folder / ENCODING).exists():
        return None
    try:
        earlier = read_token_index(folder)
    except (OSError, ValueError):
        return None
    rows = [(row.split, row.sha256, len(row.keys)) for row in index.rows]
    if [(row.split, row.sha256, len(row.keys)) for row in earlier.rows] != rows:
        return None
    if replace(earlier, rows=index.rows, tokens=index.tokens) != index:
        return None
    if any(stored.damaged):
        return None
    pairs = {
        pair
        for before, now in zip(earlier.rows, index.rows, strict=True)
        for pair in zip(before.keys, now.keys, strict=True)
    }
    same = all(before in stored and _equal(stored, before, now) for before, now in pairs)
    return earlier if same else None


def _equal(stored: StoredShards, before: str, now: str) -> bool:
    old, new = stored.tensors(before), stored.tensors(now)
    return old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


def _made_of(folder: Path) -> tuple[str | None, Any]:
    """Read the base's identity and max_sequence_length from the cache's manifest, if present."""
    with suppress(PipelineError):
        found = artifact.read_manifest(folder, KIND)
        length = found.made_by.get("max_sequence_length", UNKNOWN)
        return found.parents["base"]["identity"], length
    return None, UNKNOWN


def _by_facts(entries: Sequence[Entry], empty_text: str | None) -> dict[tuple[Any, ...], str]:
    """Map the facts that keys represent to the keys."""
    found: dict[tuple[Any, ...], str | None] = {("empty", None): empty_text}
    for entry in entries:
        sizes = (entry.original_size, entry.crop_top_left, entry.target_size)
        # If the text encoder sees conditioning images, each sample has its own empty caption.
        images = entry.conditioning_sha256 and (entry.conditioning_sha256, *sizes)
        seen = images if entry.empty_text is not None else None
        found |= {
            ("latents", entry.image_sha256, *sizes): entry.latents,
            ("flipped", entry.image_sha256, *sizes): entry.flipped,
            ("conditioning", images): entry.conditioning,
            ("text", entry.caption_sha256, seen): entry.text,
            ("empty", seen): entry.empty_text if seen is not None else empty_text,
        }
    return {fact: key for fact, key in found.items() if key is not None}


def _prompts_before(folder: Path) -> dict[tuple[Any, ...], str]:
    """Read the keys of prompts without images: image files may have changed under their names."""
    with suppress(OSError, ValueError, KeyError, AttributeError):
        found = read_object(folder / PROMPTS_INDEX)["prompts"]
        return {("prompt", asked): key for asked, key in found.items()}
    return {}
