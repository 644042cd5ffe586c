"""`zerotrain cache`: what caches take and who uses them, what may go, are they whole."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import file_sha256, is_published
from zerotrain.artifact.damage import Damage, compare_hash, compare_size
from zerotrain.artifact.layout import DATA, RESULTS, DataFolder, rebuild_hint, runs_here
from zerotrain.artifact.leftovers import is_held, without_writers
from zerotrain.cache.layout import (
    CONDITIONING,
    INDEX,
    KIND,
    LATENTS,
    MASKS,
    TEXT,
    TOKENS,
    read_index,
    read_token_index,
    shard_number,
)
from zerotrain.cache.record import ENCODING, RECORD, read_record
from zerotrain.cache.reuse import orphan_shards
from zerotrain.cache.writer import ORPHANS, PARTIAL
from zerotrain.config.command_options import folder_of
from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import find_config, is_file_name, read_runs
from zerotrain.errors import PipelineError
from zerotrain.machine.disk import size


def find_caches(name: str | None) -> list[Path]:
    """List the cache folders to look at.

    Args:
        name: A cache, or a run by its name or its configuration; None: all of the project.

    Raises:
        PipelineError: the folder is no cache, no file has the run, or nothing is found.
    """
    if name is None:
        found = sorted(filter(is_cache, (RESULTS / DATA).glob("*/cache/*")))
        where = str(RESULTS / DATA / "*" / "cache")
    elif is_cache(folder := folder_of(name)):
        return [folder]
    elif is_file_name(name) and folder.is_dir():
        raise PipelineError(
            f"{name}: no cache", hint="name a folder such as results/data/NAME/cache/SIZE, or a run"
        )
    else:
        runs = read_runs(find_config(name)).values()
        wanted = dict.fromkeys(place for run in runs for place in places_of(run))
        found = [place for place in wanted if is_cache(place)]
        where = ", ".join(map(str, wanted))
    if not found:
        raise PipelineError(
            f"no cache at {where}", hint="`snakemake --cores all cache` makes the caches of a run"
        )
    return found


def is_cache(folder: Path) -> bool:
    """Return whether a folder is a cache, or the start of one."""
    if folder.name.startswith("."):
        return False
    if is_published(folder) or (folder / INDEX).is_file():
        return (folder / INDEX).is_file()
    return any((folder / name).is_dir() for name in (PARTIAL, ORPHANS))


def places_of(run: RunConfig) -> dict[Path, list[str]]:
    """Return the cache folders of a run, with the phases that train on each."""
    found: dict[Path, list[str]] = {}
    for phase in run.phases:
        place = DataFolder(run.data_name).cache(run.cache_size(phase))
        found.setdefault(place, []).append(phase.name)
    return found


def users_of(folder: Path) -> Iterator[str]:
    """Yield the runs of config/ that train on a cache, with their phases; and unreadable files."""
    here = Path(os.path.relpath(folder))
    for file, name in runs_here().items():
        if name is None:
            continue
        try:
            run = read_config(file)
        except PipelineError:
            yield f"{file}: cannot be read (`zerotrain check {file}` says why)"
            continue
        if phases := places_of(run).get(here):
            yield f"{run.run} ({', '.join(phases)})"


def prune(folder: Path, *, unfinished: bool = False, dry_run: bool = False) -> list[str]:
    """Remove orphans, and what a killed process was writing; return what was done.

    Args:
        folder: A cache folder.
        unfinished: Whether to remove the finished shards of an interrupted encoding, too, from
            which the next one would continue.
        dry_run: Whether to only say what would be removed.
    """
    with without_writers(folder) as alone:
        if not alone:
            return [f"{folder}: a running job writes here or next to it; nothing is removed"]
        if is_held(folder):
            return [f"{folder}: a training reads it; nothing is removed"]
        waiting = sorted(folder.glob(f"{PARTIAL}/*.safetensors"))
        found = {
            "orphan": orphan_shards(folder),
            "torn": [path for path in _files(folder / PARTIAL) if path not in waiting],
            "unfinished": waiting if unfinished else [],
        }
        did = "would remove" if dry_run else "removed"
        lines = [
            f"{folder}: {did} {_counted(paths, f'{name} shard')}"
            for name, paths in found.items()
            if paths
        ]
        if waiting and not unfinished:
            kept = _counted(waiting, "unfinished shard")
            lines.append(f"{folder}: keeps {kept}, from which the next encoding continues")
        if not dry_run:
            for path in (path for paths in found.values() for path in paths):
                path.unlink()
            _remove_emptied(folder)
    return lines or [f"{folder}: nothing to remove"]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.name != RECORD)


def _counted(paths: list[Path], name: str = "shard") -> str:
    return _amount(len(paths), sum(path.stat().st_size for path in paths), name)


def _amount(count: int, total: int, name: str = "shard") -> str:
    return f"{count} {name}{'' if count == 1 else 's'}, {size(total)}"


def _remove_emptied(folder: Path) -> None:
    """Remove folders that have nothing but a record."""
    for place in (*folder.glob(f"{ORPHANS}/*/"), folder / PARTIAL):
        if place.is_dir() and not _files(place):
            (place / RECORD).unlink(missing_ok=True)
            place.rmdir()
    with contextlib.suppress(OSError):
        (folder / ORPHANS).rmdir()


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
    waiting = sorted(folder.glob(f"{PARTIAL}/*.safetensors"))
    for name, paths in (("orphans", orphan_shards(folder)), ("waiting", waiting)):
        facts.append((name, _counted(paths) if paths else "none"))
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
        yield name, _amount(shards, total)
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


SHARD = re.compile(r"(?P<series>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True)
class Verdict:
    """Whether a cache is whole."""

    whole: bool
    lines: list[str]


def verify(folder: Path) -> Verdict:
    """Hash every file of a cache that its manifest lists, and every orphan.

    The last line has the command that makes what is damaged again.

    Raises:
        PipelineError: the cache has no manifest, or a wrong one.
    """
    found = artifact.read_manifest(folder, KIND)
    files = found.files

    def compare(name: str) -> Damage | None:
        path = found.folder / name
        return compare_size(path, files[name])[1] or compare_hash(path, files[name], file_sha256)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        damage = dict(zip(files, pool.map(compare, files), strict=True))
    damaged = {name: one for name, one in damage.items() if one}
    lines = []
    for name, one in damaged.items():
        lines += [str(one), *(f"  {sample}" for sample in _samples(folder, name))]
    for path in orphan_shards(folder):
        if file_sha256(path) != path.stem:
            lines.append(f"{path}: damaged; nothing is taken from it, and nothing needs it")
    count = sum(entry["bytes"] for entry in files.values())
    if damaged:
        lines.append(f"{folder}: {len(damaged)} of {len(files)} files are damaged or missing; "
                     f"{rebuild_hint(folder, KIND, found.parents)}")  # fmt: skip
    else:
        lines.append(f"{folder}: whole, {len(files)} files, {size(count)}")
    return Verdict(not damaged, lines)


def _samples(folder: Path, name: str) -> Iterator[str]:
    """Yield the samples with tensors in a shard, or say that all or none are concerned."""
    shard = SHARD.fullmatch(name)
    if shard is None:
        yield "no sample's tensors are in this file"
        return
    number, count = int(shard["number"]), int(shard["count"])
    try:
        keys = list(_keys(folder, shard["series"]))
    except (OSError, ValueError):
        yield "the index is damaged too, so it is not known which samples are in it"
        return
    for sample in dict.fromkeys(one for one, key in keys if shard_number(key, count) == number):
        yield f"{sample}: its {shard['series']}"


def _keys(folder: Path, series: str) -> Iterator[tuple[str, str]]:
    """Yield each sample with its keys in a series."""
    if series == TOKENS:
        for position, row in enumerate(read_token_index(folder).rows):
            yield from ((f"row {position}", key) for key in row.keys)
        return
    for entry in read_index(folder).entries:
        keys = {
            LATENTS: (
                (entry.latents, entry.flipped),
                entry.other_latents,
                entry.other_flipped,
            ),
            TEXT: ((entry.text, entry.empty_text), entry.other_texts),
            CONDITIONING: ((entry.conditioning,), entry.other_conditioning),
            MASKS: ((entry.mask,), entry.other_masks),
        }.get(series, ())
        found = chain.from_iterable(variants or () for variants in keys)
        yield from ((entry.file, key) for key in found if key is not None)
