"""A summary of a cache: samples, bytes on disk, what encoded it, and the runs that train on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import is_published
from zerotrain.cache.layout import KIND, read_index
from zerotrain.cache.orphans import orphan_shards
from zerotrain.cache.record import ENCODING, read_record
from zerotrain.cache.writer import PARTIAL
from zerotrain.errors import PipelineError
from zerotrain.machine.disk import size
from zerotrain.pipeline.caches.places import users_of
from zerotrain.pipeline.caches.verify import SHARD

VERSIONS = ("versions.torch", "versions.diffusers", "versions.transformers")
"""The versions that are shown; records/encoding.json has all."""
SIZES_SHOWN = 12


def show(folder: Path) -> Iterator[str]:
    """Yield the lines about a cache; nothing is hashed.

    Raises:
        PipelineError: its manifest is wrong.
    """
    yield str(folder)
    facts: list[tuple[str, str]] = []
    if is_published(folder):
        facts += _published(artifact.read_manifest(folder, KIND))
    else:
        facts.append(("unfinished", "no manifest.json: `snakemake --cores all cache` continues"))
    facts.append(("orphans", _shards(orphan_shards(folder))))
    facts.append(("waiting", _shards(sorted(folder.glob(f"{PARTIAL}/*.safetensors")))))
    facts.append(("made by", _maker(folder)))
    facts += [("used by", user) for user in users_of(folder)] or [("used by", "no run of config/")]
    for name, value in facts:
        yield f"  {name:<11} {value}"


def _published(found: artifact.Artifact) -> Iterator[tuple[str, str]]:
    content = found.content
    count = content.get("count", {})
    if content.get("modality") == "text":
        packed = ", packed" if content["packing"] else ""
        yield "samples", f"{count['rows']} rows of {count['conversations']} conversations"
        yield "rows", f"{content['max_length']} tokens at most{packed}"
    else:
        yield from _images(found.folder, content)
    for name, (shards, total) in _series(found.files).items():
        yield name, f"{shards} {'shard' if shards == 1 else 'shards'}, {size(total)}"
    base = found.parents.get("base")
    if base is not None:
        yield (
            "base",
            f"{base['path']}{_model(Path(base['path']))}, identity {base['identity'][:12]}",
        )


def _images(folder: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    count = content["count"]
    try:
        entries = read_index(folder).entries
    except (OSError, ValueError) as error:
        yield "samples", f"the index cannot be read ({error}); `zerotrain cache verify {folder}`"
        return
    held_out = sum(entry.split == "holdout" for entry in entries)
    yield (
        "samples",
        f"{len(entries)} ({held_out} held out), {count['latents']} latents, "
        f"{count['captions']} captions",
    )
    sizes = Counter(entry.target_size for entry in entries)
    named = [f"{w}x{h}: {n}" for (h, w), n in sizes.most_common(SIZES_SHOWN)]
    more = f"; and {len(sizes) - SIZES_SHOWN} more" if len(sizes) > SIZES_SHOWN else ""
    yield "sizes", "; ".join(named) + more
    yield "stored as", f"{content['dtype']}, resolution {content['resolution']}"


def _series(files: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the number and bytes of the shards of each series; the rest is `index`."""
    found: dict[str, tuple[int, int]] = {}
    for name, entry in files.items():
        shard = SHARD.fullmatch(name)
        series = shard["series"].rpartition("/")[2] if shard else "index"
        shards, total = found.get(series, (0, 0))
        found[series] = (shards + 1, total + entry["bytes"])
    rest = found.pop("index", (0, 0))
    return {**found, "total": (sum(n for n, _ in found.values()),
                               sum(total for _, total in found.values()) + rest[1])}  # fmt: skip


def _shards(paths: list[Path]) -> str:
    total = sum(path.stat().st_size for path in paths)
    shards = "shard" if len(paths) == 1 else "shards"
    return f"{len(paths)} {shards}, {size(total)}" if paths else "none"


def _model(base: Path) -> str:
    """Return what the base was made from, if it is here."""
    try:
        content = artifact.read_manifest(base, "base").content
    except PipelineError:
        return " (not here)"
    return f" ({content['base']})" if "base" in content else ""


def _maker(folder: Path) -> str:
    record = read_record(folder / ENCODING)
    if record is None:
        return "not recorded"
    versions = [f"{name.partition('.')[2]} {record.software[name]}" for name in VERSIONS
                if name in record.software]  # fmt: skip
    device = record.software.get("device")
    return ", ".join([f"zerotrain {record.zerotrain}", *versions, *([device] if device else [])])
