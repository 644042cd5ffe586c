"""cache_latents: images and captions to latents and embeddings, or text to tokens, at one size."""

from __future__ import annotations

import sys
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import RECORDS
from zerotrain.cache.encoding import Encoding
from zerotrain.cache.layout import KIND, LATENTS, TEXT, Index, write_index
from zerotrain.cache.prompts import PROMPTS, write_prompts
from zerotrain.cache.tokenising import cache_text
from zerotrain.cache.writer import Stored, place, write_series
from zerotrain.config import RunConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.families import load_family


def cache_latents(config: RunConfig, size: int, dataset: Path, base: Path, output: Path) -> None:
    """Encode what the cache in `output` does not hold yet, and publish the cache anew.

    The bytes of the result do not depend on what was reused, nor on data.num_workers.

    Args:
        config: The run's configuration.
        size: Side of the square images in pixels, or longest row of text in tokens.
        dataset: Folder of the dataset.
        base: Folder of the base model.
        output: Folder of the cache. What it holds is reused, whether or not it was finished.

    Raises:
        PipelineError: an image changed since prepare_dataset, a result is no finite number, or
            a shard cannot hold one.
    """
    family = load_family(config.family)
    if family.modality == "text":
        cache_text(config, family, size, dataset, base, output)
        return
    samples = read_dataset(dataset)
    model = artifact.read(base, "base")
    encoding = Encoding(config, size, family, model)
    entries = tuple(encoding.entry(sample) for sample in samples.samples)
    empty_text = encoding.text_key("")
    prompts = {prompt: encoding.text_key(prompt) for prompt in config.validation_prompts}
    prompts |= {"": empty_text} if prompts else {}
    artifact.mend(output)
    stored = Stored(output)
    for path in stored.damaged:
        print(f"WARNING: {path} is damaged; what it held is encoded again", file=sys.stderr)
    latents, text = (
        write_series(name, keys, encode, stored, folder=output, shard_size=config.cache.shard_size)
        for name, keys, encode in (
            (LATENTS, [entry.latents for entry in entries], encoding.latents),
            (TEXT, [empty_text, *(entry.text for entry in entries)], encoding.text),
        )
    )
    shown = (
        write_series(
            PROMPTS,
            prompts.values(),
            encoding.text,
            stored,
            folder=output,
            shard_size=config.cache.shard_size,
        )
        if prompts
        else None
    )
    with artifact.publish(
        output,
        KIND,
        parents={"dataset": samples.artifact, "base": model},
        made_by={"stage": "cache_latents"},
    ) as draft:
        draft.known = place(latents, draft.folder) | place(text, draft.folder)
        if shown is not None:
            (draft.folder / RECORDS).mkdir()
            draft.known |= place(shown, draft.folder)
            write_prompts(draft.folder, prompts, shown.series)
        write_index(
            draft.folder,
            Index(
                resolution=size,
                dtype=config.cache.dtype,
                repeats=samples.repeats,
                entries=entries,
                empty_text=empty_text,
                latents=latents.series,
                text=text.series,
            ),
        )
        draft.content = {
            "resolution": size,
            "dtype": config.cache.dtype,
            "count": {"samples": len(entries), "latents": latents.total, "captions": text.total},
        }
    print(
        f"encoded {latents.encoded} of {latents.total} latents, "
        f"{text.encoded} of {text.total} captions; the rest was in the cache"
    )
