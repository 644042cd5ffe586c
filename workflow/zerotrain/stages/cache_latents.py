"""cache_latents: encode images and captions to latents and embeddings, or text to tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import RECORDS
from zerotrain.artifact.recipe import Recipe
from zerotrain.cache.encoding import Encoding
from zerotrain.cache.key_ranges import link_published, publish_range, take_ranges
from zerotrain.cache.layout import (
    CONDITIONING,
    KIND,
    LATENTS,
    MASKS,
    TEXT,
    WHOLE,
    Entry,
    Index,
    KeyRange,
    drawn_digest,
)
from zerotrain.cache.record import (
    LONG_CAPTIONS,
    PROMPT_IMAGES,
    PROMPTS,
    PromptKeys,
    carry_index,
    carry_made_by,
    carry_record,
    present,
    same_index,
    write_long_captions,
    write_prompts,
)
from zerotrain.cache.reuse import keep_equal, keep_orphans
from zerotrain.cache.tokenising import cache_text
from zerotrain.cache.writer import StoredShards, Tensors, Written, place, write_series
from zerotrain.config.section import ConditionedPrompt
from zerotrain.config.stage_settings import CacheSettings
from zerotrain.data.buckets import choose_source_views
from zerotrain.data.dataset import read_dataset
from zerotrain.models.families import load_family
from zerotrain.models.families.conditioning import check_conditioning, check_crops, check_sampling


def cache_latents(
    settings: CacheSettings,
    size: int,
    dataset: Path,
    base: Path,
    output: Path,
    *,
    shards: Sequence[Path] = (),
    only: KeyRange = WHOLE,
    cache: Path | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Encode what the cache in `output` does not have yet, and publish the cache again.

    The bytes of the result depend neither on what was reused nor on data.num_workers.

    Args:
        settings: What the stage reads of the configuration.
        size: Side of the square images in pixels, or longest row of text in tokens.
        dataset: Folder of the dataset.
        base: Folder of the base model.
        output: Folder of the cache. Its content is reused, even if it is unfinished.
        shards: Folders of what other jobs encoded; see zerotrain.cache.key_ranges.
        only: The range of keys that is encoded; `output` is then the folder of this range.
        cache: With `only`, the folder of the cache, whose content is reused.
        recipe: What the folder records of what it is made from.

    Raises:
        PipelineError: an image changed since prepare_dataset, a result is not finite, a shard
            cannot hold one, or the base takes another number of conditioning images.
    """
    _report_kept_base(dataset, base)
    family = load_family(settings.family)
    if family.modality == "text":
        cache_text(settings, family, size, dataset, base, output, recipe)
        return
    samples = read_dataset(dataset)
    model = artifact.read(base, "base")
    reads = family.conditioning(base)
    check_conditioning(reads, samples.conditioning_images, settings.base)
    check_crops(reads, samples.conditioning_images, settings.data, settings.base)
    in_prompt = reads is not None and reads.in_prompt
    encoding = Encoding(settings, size, family, model, reads=reads)
    data = settings.data
    views = choose_source_views(samples.samples, size, data.aspect_buckets, data.resolutions)
    entries = tuple(map(encoding.entry, samples.samples, views))
    empty_text = None if in_prompt else encoding.text_key("")
    for asked in settings.validation_prompts:
        if not isinstance(asked, str):
            check_sampling(base, len(asked[1]), "validation.conditioning_images")
    prompts = {asked: encoding.prompt_keys(asked) for asked in settings.validation_prompts}
    captioned = [replace(one, caption=text) for one in samples.samples for text in one.captions]
    captions = [sample.caption for sample in captioned]
    limits = family.caption_limits(base, captions, settings.cache.max_sequence_length)
    artifact.recover_interrupted_publish(output)
    now = present(encoding.device)
    if cache is not None:
        link_published(cache, only, output)
    stored = StoredShards(output, now)
    for path in stored.damaged:
        print(f"WARNING: {path} is damaged; what it held is encoded again", file=sys.stderr)

    def write(
        name: str,
        keys: Iterable[str],
        encode: Callable[[Sequence[str]], Iterator[Tensors]],
    ) -> Written:
        shard_size = settings.cache.shard_size
        return write_series(
            name, keys, encode, stored, folder=output, shard_size=shard_size, only=only
        )

    images, shown_images = _conditioning(entries), _shown_images(prompts)
    texts = {*_texts(entries, empty_text), *_shown_texts(prompts)}
    tokens = {
        caption: max(limit.counts[place] for limit in limits)
        for place, caption in enumerate(captions if limits else ())
    }
    groups = encoding.groups(_latents(entries), [*images, *shown_images], texts, tokens)
    wanted_masks = _masks(entries)
    if only == WHOLE:
        groups.append(encoding.masks.group(wanted_masks, stored))
    keep_equal(stored, output, groups, now)
    take_ranges(stored, output, shards, now)
    latents = write(LATENTS, _latents(entries), encoding.latents)
    text = write(TEXT, _texts(entries, empty_text), encoding.text)
    conditioning = write(CONDITIONING, images, encoding.conditioning) if images else None
    masks = (
        write(MASKS, wanted_masks, lambda keys: encoding.masks.scaled(keys, stored))
        if wanted_masks and only == WHOLE
        else None
    )
    parts = [(latents, "latents"), (text, "captions")]
    if conditioning is not None:
        parts.insert(1, (conditioning, "sets of conditioning images"))
    if masks is not None:
        parts.append((masks, "loss masks"))
    counts = ", ".join(f"{written.encoded} of {written.total} {what}" for written, what in parts)
    if only != WHOLE:
        parents = {"dataset": samples.artifact, "base": model}
        publish_range(output, [written for written, _ in parts], now, parents, recipe)
        print(f"encoded {counts} of this range of keys; the rest was in the cache")
        return
    shown = write(PROMPTS, _shown_texts(prompts), encoding.text) if prompts else None
    seen = write(PROMPT_IMAGES, shown_images, encoding.conditioning) if shown_images else None
    index = Index(
        resolution=size,
        dtype=settings.cache.dtype,
        repeats=samples.repeats,
        entries=entries,
        empty_text=empty_text,
        latents=latents.series,
        text=text.series,
        conditioning=conditioning.series if conditioning else None,
        masks=masks.series if masks else None,
        data_sha256=drawn_digest(entries, settings.cache.dtype, settings.cache.max_sequence_length),
    )
    unchanged = same_index(output, index)
    # The user's settings are here, not in the identity; the keys of texts depend on them.
    values = {
        "stage": "cache_latents",
        "max_sequence_length": settings.cache.max_sequence_length,
        "long_captions": settings.long_captions,
        "text_dtype": encoding.text_dtype,
        "device": encoding.device,
    }
    with artifact.publish(
        output,
        KIND,
        parents={"dataset": samples.artifact, "base": model},
        made_by=carry_made_by(output, values, unchanged=unchanged),
        recipe=recipe,
    ) as draft:
        carry_record(output, draft.folder, now, unchanged=unchanged)
        draft.known = place(latents, draft.folder) | place(text, draft.folder)
        for more in (conditioning, masks):
            if more is not None:
                draft.known |= place(more, draft.folder)
        if shown is not None or limits:
            (draft.folder / RECORDS).mkdir(exist_ok=True)
        if limits:
            write_long_captions(draft.folder, limits, captioned)
        if shown is not None:
            draft.known |= place(shown, draft.folder)
            if seen is not None:
                draft.known |= place(seen, draft.folder)
            write_prompts(draft.folder, prompts, shown.series, seen.series if seen else None)
        wanted = {*_latents(entries), *_texts(entries, empty_text), *images}
        wanted |= {*wanted_masks, *_shown_texts(prompts), *shown_images}
        keep_orphans(stored, wanted, output, draft, shard_size=settings.cache.shard_size)
        carry_index(output, draft.folder, index, unchanged=unchanged)
        draft.content = {
            "resolution": size,
            "dtype": settings.cache.dtype,
            "count": {
                "samples": len(entries),
                "latents": latents.total,
                "captions": text.total,
                **({"conditioning": conditioning.total} if conditioning else {}),
                **({"masks": masks.total} if masks else {}),
            },
        }
    for limit in limits:
        print(f"{limit.describe('captions', settings.long_captions)} ({output / LONG_CAPTIONS})")
    print(f"encoded {counts}; the rest was in the cache")


def _report_kept_base(dataset: Path, base: Path) -> None:
    """Report a preset that was built for the dataset before an edit; it stays."""
    built_for = artifact.read_manifest(base, "base").parents.get("dataset", {}).get("identity")
    if built_for not in (None, artifact.read_manifest(dataset, "dataset").identity):
        print(
            f"{base}: kept as it is, built for the dataset before the edit; `snakemake --forcerun "
            "build_base` builds it again, and then all is encoded and trained again",
            file=sys.stderr,
        )


def _latents(entries: Sequence[Entry]) -> list[str]:
    """Return the keys of all latents, including those of mirrored images and of other crops."""
    flipped = [entry.flipped for entry in entries if entry.flipped is not None]
    others = [
        key
        for entry in entries
        for keys in (entry.other_latents, entry.other_flipped)
        for key in keys or ()
    ]
    return [*(entry.latents for entry in entries), *flipped, *others]


def _conditioning(entries: Sequence[Entry]) -> list[str]:
    found = ((entry.conditioning, *(entry.other_conditioning or ())) for entry in entries)
    return [key for keys in found for key in keys if key is not None]


def _masks(entries: Sequence[Entry]) -> list[str]:
    found = ((entry.mask, *(entry.other_masks or ())) for entry in entries)
    return [key for keys in found for key in keys if key is not None]


def _shown_images(prompts: Mapping[str | ConditionedPrompt, PromptKeys]) -> list[str]:
    return [found.conditioning for found in prompts.values() if found.conditioning is not None]


def _shown_texts(prompts: Mapping[str | ConditionedPrompt, PromptKeys]) -> list[str]:
    return [key for found in prompts.values() for key in (found.text, found.empty)]


def _texts(entries: Sequence[Entry], empty_text: str | None) -> list[str]:
    """Return the keys of all captions, and of the empty caption: one, or one for each sample."""
    empty = [entry.empty_text for entry in entries if entry.empty_text is not None]
    others = [key for entry in entries for key in entry.other_texts or ()]
    texts = [*(entry.text for entry in entries), *others]
    return [*texts, *([empty_text] if empty_text else empty)]
