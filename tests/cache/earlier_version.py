"""Caches as versions made them that had a digest of code in each key, and no record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import digest
from zerotrain.cache.layout import INDEX, KIND, LATENTS, TEXT, read_index, write_json_index
from zerotrain.cache.record import ENCODING
from zerotrain.cache.token_layout import TOKENS, read_token_index, write_json_token_index
from zerotrain.cache.writer import StoredShards, place, write_series


def earlier(key: str) -> str:
    """A key with a digest of code."""
    return digest([key, "code"])


def make_earlier(folder: Path, shard_size: int) -> None:
    """Give all that a published cache holds the keys of an earlier version, and take the record."""
    found = artifact.read(folder, KIND)
    text = found.content.get("modality") == "text"
    series = {TOKENS} if text else {LATENTS, TEXT}
    stored = StoredShards(folder)
    by_key = {key: earlier(key) for key in stored._names}
    stored.rename({name: key for key, name in by_key.items()})
    index = json.loads((folder / INDEX).read_text())
    written = {}
    for name in series:
        files = [shard["file"] for shard in index[name]["shards"]]
        keys = [key for key in by_key if stored._names[key][0].name in files]
        names = [by_key[key] for key in keys]
        written[name] = write_series(
            name, names, lambda keys: iter(()), stored, folder=folder, shard_size=shard_size
        )
    made_by = {"stage": "cache_latents", "zerotrain": "0.0.1"}
    if not text:
        made_by["max_sequence_length"] = found.made_by["max_sequence_length"]
    with artifact.publish(folder, KIND, made_by=made_by) as draft:
        draft.content = found.content
        for one in written.values():
            place(one, draft.folder)
        if text:
            tokens = read_token_index(folder)
            rows = tuple(
                replace(row, keys=tuple(by_key[key] for key in row.keys)) for row in tokens.rows
            )
            write_json_token_index(
                draft.folder, replace(tokens, rows=rows, tokens=written[TOKENS].series)
            )
        else:
            images = read_index(folder)
            entries = tuple(
                replace(entry, latents=by_key[entry.latents], text=by_key[entry.text])
                for entry in images.entries
            )
            assert images.empty_text is not None
            write_json_index(
                draft.folder,
                replace(
                    images,
                    entries=entries,
                    empty_text=by_key[images.empty_text],
                    latents=written[LATENTS].series,
                    text=written[TEXT].series,
                ),
            )
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parents"] = {name: dict(parent) for name, parent in found.parents.items()}
    artifact.write_json(folder / "manifest.json", manifest)
    assert ENCODING not in manifest["files"]
