"""How much of a stage's work would be done: what a cache encodes, the steps that a phase trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact import read
from zerotrain.artifact.damage import find_damage
from zerotrain.artifact.manifest import is_published, read_manifest
from zerotrain.artifact.recipe import Difference
from zerotrain.config.models import Phase
from zerotrain.config.section import Role
from zerotrain.data.buckets import View, choose_source_views, other_views
from zerotrain.data.dataset import Sample
from zerotrain.errors import PipelineError
from zerotrain.graph.why.samples import count
from zerotrain.launch.resolved import keys_of
from zerotrain.run.phase import PhaseView
from zerotrain.training.checkpointing.preflight import LAUNCH_KEYS
from zerotrain.training.checkpointing.progress_folder import saved_steps, step_folder

if TYPE_CHECKING:
    from zerotrain.cache.layout import Entry
    from zerotrain.config.data import DataConfig
    from zerotrain.config.stage_settings import CacheSettings


EVERY_KEY = {"cache.dtype"}
"""Values of which every key depends."""
TEXT_KEYS = {"cache.max_sequence_length", "train.long_captions"}
"""Values of which the keys of captions depend."""
Item = tuple[object, ...]


@dataclass(frozen=True)
class Encodes:
    """The items that would be encoded, of all items of the dataset."""

    images: int
    of_images: int
    """Latents, those of mirrored images included."""
    captions: int
    of_captions: int
    """Different captions, without the empty one."""
    bytes: int | None
    """Of the encoded items on the disk; None if there is no cache to learn their size from."""
    at_most: tuple[str, ...] = ()
    """Of what some may be in the cache, `images` or `captions`: their encoder is built again."""

    def __str__(self) -> str:
        images = f"{self.images:,} of {count(self.of_images, 'image')}"
        captions = f"{self.captions:,} of {count(self.of_captions, 'caption')}"
        up_to = {kind: "up to " if kind in self.at_most else "" for kind in ("images", "captions")}
        return f"encodes {up_to['images']}{images} and {up_to['captions']}{captions}"


def count_encodes(
    cache: Path,
    size: int,
    samples: Sequence[Sample],
    settings: CacheSettings,
    base: Path,
    *,
    again: Collection[str] = (),
) -> Encodes:
    """Count what cache_latents would encode.

    Orphans and the shards of an interrupted encoding count as what the cache has.

    Args:
        cache: Folder of the cache; missing: everything is encoded.
        size: Side of its squares in pixels.
        samples: The samples as they will be in the dataset.
        settings: The settings of cache_latents.
        base: Folder of the base.
        again: The encoders that the base may have again: `images`, `captions`.
    """
    data = settings.data
    views = choose_source_views(samples, size, data.aspect_buckets, data.resolutions)
    images = {item for one in zip(samples, views, strict=True) for item in _items(*one, data)}
    captions = {caption for one in samples for caption in one.captions}
    lacking = len(images), len(captions)
    if stored := _stored(cache):
        found = _keys(cache, size, [*zip(samples, views, strict=True)], settings, base)
        missing = [len(keys - stored) for keys in found] if found else lacking
        lacking = (
            lacking[0] if "images" in again else missing[0],
            lacking[1] if "captions" in again else missing[1],
        )
    each = _bytes_each(cache)
    return Encodes(
        *(lacking[0], len(images), lacking[1], len(captions)),
        bytes=lacking[0] * each[0] + lacking[1] * each[1] if each else None,
        at_most=tuple(sorted(again)) if stored else (),
    )


def _items(sample: Sample, view: View, data: DataConfig) -> Iterator[Item]:
    """List what is encoded of an image: its parts, and their mirror images."""
    flips = data.part_of(sample.file).random_flip and sample.split == "train"
    for one in (view, *other_views(sample, view, data.aspect_buckets)):
        for flipped in (False, True)[: 1 + flips]:
            yield sample.image_sha256, sample.background, one.box, one.size, flipped


def _keys(
    cache: Path,
    size: int,
    samples: Sequence[tuple[Sample, View]],
    settings: CacheSettings,
    base: Path,
) -> tuple[set[str], set[str]] | None:
    """Return the keys of images and captions that the cache will have; None without a base."""
    from zerotrain.cache.sample_keys import SampleKeys  # these import torch
    from zerotrain.models.families import load_family

    try:
        model = read(base, "base", verify=False)
        family: Any = load_family(settings.family)  # of images: only their caches are compared
        reads = family.conditioning(base)
        device = _device(cache)
        keys = SampleKeys(settings, size, family, model, reads=reads, device=device)
        entries = [keys.entry(sample, view) for sample, view in samples]
    except (PipelineError, OSError, LookupError):
        return None
    images, captions = (
        {key for entry in entries for key in keys_of(entry)} for keys_of in (_latents_of, _texts_of)
    )
    return images, captions


def _device(cache: Path) -> str | None:
    """Return the kind of device that encoded a cache: another machine may plan."""
    try:
        return read_manifest(cache, "cache").made_by.get("device")
    except (PipelineError, OSError):
        return None


def _stored(cache: Path) -> set[str]:
    """List the keys in the shards of a cache that are whole, and in what it keeps besides."""
    from safetensors import SafetensorError, safe_open

    from zerotrain.cache.layout import key_of  # its package imports torch
    from zerotrain.cache.reuse import orphan_shards
    from zerotrain.cache.writer import PARTIAL

    shards = "*.safetensors"
    found: set[str] = set()
    for path in [*cache.glob(shards), *orphan_shards(cache), *cache.glob(f"{PARTIAL}/{shards}")]:
        with suppress(OSError, SafetensorError), safe_open(path, framework="numpy") as shard:
            found.update(map(key_of, shard.keys()))
    return found


def _latents_of(entry: Entry) -> list[str]:
    keys = (entry.latents, entry.flipped, *(entry.other_latents or ()))
    return [key for key in (*keys, *(entry.other_flipped or ())) if key]


def _texts_of(entry: Entry) -> list[str]:
    return [entry.text, *(entry.other_texts or ())]


def _bytes_each(cache: Path) -> tuple[int, int] | None:
    """Return the mean bytes of a cache's latents and captions; None without a cache."""
    try:
        manifest = read_manifest(cache, "cache")
        counts: Mapping[str, int] = manifest.content["count"]
        return (
            _mean_bytes(manifest.files.items(), "latents-", counts["latents"]),
            _mean_bytes(manifest.files.items(), "text-", counts["captions"]),
        )
    except (PipelineError, OSError, LookupError, TypeError):
        return None


def _mean_bytes(files: Iterable[tuple[str, Mapping[str, int]]], prefix: str, items: int) -> int:
    total = sum(entry["bytes"] for name, entry in files if name.startswith(prefix))
    return -(-total // max(1, items))


SWITCHED = {"preset", *LAUNCH_KEYS}
"""Keys of a phase that only a switch may change once it has steps."""


@dataclass(frozen=True)
class Training:
    """What a phase's job does.

    Args:
        what: In a sentence's words.
        steps: Steps that it trains; None if a value decides that cannot be known yet.
        restarts: Whether steps that exist are set aside.
        refused: Whether the job would end with an error.
        other_end: Whether an earlier step becomes its result.
    """

    what: str
    steps: int | None
    restarts: bool = False
    refused: bool = False
    other_end: bool = False


def foresee_training(
    phase: Phase,
    folder: Path,
    span: tuple[int, int] | None,
    changes: Iterable[Difference],
    other: bool,
) -> Training:
    """Foresee a phase's training: trained, continued, trained again, or kept.

    As zerotrain.training.process.start and published decide when it starts, foreseen from
    the plan: launch files that are not rendered yet cannot be compared.

    Args:
        phase: The phase, as configured.
        folder: Its folder, results/RUN/PHASE.
        span: Its first and last step; None if unknown.
        changes: Changed values that it trains with.
        other: Whether its data, its base or the state that it starts from is another.
    """
    published = _published_end(folder)
    saved = sorted({*saved_steps(folder / "progress"), *([published] if published else [])})
    if span is None:
        known = f"its {saved[-1]:,} steps" if saved else "nothing is trained yet"
        return Training(f"trains to {phase.until} ({known})", None)
    start, end = span
    whole = f"from step {start:,} to {end:,}"
    if not saved:
        return Training(f"trains {whole}", end - start)
    values = [change for change in changes if counts(change)]
    switched = [one.key for one in values if one.key.rpartition(".")[2] in SWITCHED]
    if switched:
        return Training(
            f"is refused: its {saved[-1]:,} steps have another {', '.join(switched)}; "
            "`zerotrain switch` continues them",
            0,
            refused=True,
        )
    newest = max((step for step in saved if step <= end), default=None)
    if (values or other) and phase.train.on_change == "stop":
        return Training("is refused: train.on_change: stop", 0, refused=True)
    if (values or other) and phase.train.on_change == "restart":
        aside = f"trains again {whole}; its steps up to {saved[-1]:,} are set aside"
        return Training(aside, end - start, restarts=True)
    if newest is None:
        return Training(f"trains again {whole}: its steps are all after {end:,}", end - start, True)
    if newest == end and published not in (None, end):
        return Training(f"publishes its step {end:,}, no step is trained", 0, other_end=True)
    if newest == end:
        return Training("is kept: what it trains is the same", 0)
    return Training(f"continues from step {newest:,} to {end:,}", end - newest)


def foresee_restoring(folder: Path, span: tuple[int, int] | None) -> Training:
    """Foresee the training of a phase whose checkpoint is removed or damaged.

    Args:
        folder: Its folder, results/RUN/PHASE.
        span: Its first and last step; None if unknown.
    """
    progress = folder / "progress"
    steps = [step for step in saved_steps(progress) if span is None or step <= span[1]]
    whole = [step for step in steps if _is_whole(step_folder(progress, step))]
    if not whole and (steps or is_published(folder / "checkpoint")):
        return Training(f"is refused: {progress} holds no whole checkpoint either", 0, refused=True)
    if not whole:
        return Training("trains again from its start", span and span[1] - span[0])
    if span is None or whole[-1] == span[1]:
        return Training(f"publishes its step {whole[-1]:,} again, no step is trained", 0)
    return Training(f"continues from step {whole[-1]:,} to {span[1]:,}", span[1] - whole[-1])


def _published_end(folder: Path) -> int | None:
    try:
        return PhaseView(folder).end
    except PipelineError:  # it is damaged
        return None


def _is_whole(checkpoint: Path) -> bool:
    """Return whether all files of a rolling checkpoint are there, with their sizes."""
    try:
        return not any(find_damage(checkpoint, read_manifest(checkpoint, None).files, None))
    except PipelineError:
        return False


def counts(change: Difference) -> bool:
    """Return whether a changed value of a phase, other than its end, is one that it trains with."""
    section, _, key = change.key.rpartition(".")
    if key in SWITCHED:
        return True
    if section.startswith("validation") or change.key in ("until", "name", "phase"):
        return False
    return key not in keys_of(Role.UNTRAINED) | keys_of(Role.ROUNDING)
