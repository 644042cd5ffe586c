"""Tokenising: the cache of a dataset of conversations with one tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.recipe import Recipe
from zerotrain.cache.layout import (
    KIND,
    TOKENS,
    Row,
    TokenIndex,
    pack,
)
from zerotrain.cache.record import carry_index, carry_made_by, carry_record, present, same_index
from zerotrain.cache.reuse import Group, keep_equal, keep_orphans
from zerotrain.cache.sample_keys import tokens_key
from zerotrain.cache.writer import StoredShards, Tensors, place, write_series
from zerotrain.config.families import ROOT
from zerotrain.config.stage_settings import CacheSettings
from zerotrain.data.conversation import Conversation, count_keys, read_conversations
from zerotrain.errors import PipelineError
from zerotrain.machine.progress_bar import progress
from zerotrain.models.base import in_part
from zerotrain.models.families import Tokens

if TYPE_CHECKING:
    from zerotrain.models.families.language import LanguageFamily

CONFIGURATION = ("config.json", "generation_config.json")
"""Files next to a tokenizer's that do not belong to it."""
MOST_SAID = 5


class Tokenising:
    """The keys and tokens of a dataset at one length with one base."""

    def __init__(self, family: LanguageFamily, base: Artifact, max_length: int) -> None:
        self.family = family
        self.max_length = max_length
        self.left_out = 0
        """Number of tokenised answers that the chat template does not mark as generated."""
        self._base = base
        self._parts = {
            name: found
            for name, found in base.content["parts"].items()
            if not in_part(name, ROOT) and name not in CONFIGURATION
        }

    @cached_property
    def tokenizer(self) -> Any:
        """Load the base's tokenizer."""
        return self.family.load_tokenizer(self._base.folder)

    def unused(self, samples: Iterable[Conversation]) -> dict[str, int]:
        """Return keys of turns that the tokenizer does not show, and how many turns have each."""
        counts = count_keys(samples)
        unused = self.family.unused_keys(self.tokenizer) if counts else ()
        return {key: counts[key] for key in unused if key in counts}

    def key(self, sample: Conversation) -> str:
        """Compute the key of a conversation."""
        return tokens_key(
            sample.sha256,
            self.max_length,
            family=self.family.name,
            parts=self._parts,
        )

    def tensors(self, sample: Conversation) -> Tensors:
        """Tokenise a conversation, to int32; return empty tensors if no part of an answer is left.

        Raises:
            PipelineError: the tokenizer's chat template does not accept it.
        """
        try:
            found = self.family.tokenise(self.tokenizer, sample.messages, self.max_length)
        except PipelineError as error:
            raise PipelineError(f"{sample.file}: {error.what}", hint=error.hint) from error
        found = found or Tokens([], [])
        self.left_out += found.left_out
        return {
            "input_ids": torch.tensor(found.input_ids, dtype=torch.int32),
            "labels": torch.tensor(found.labels, dtype=torch.int32),
        }


def cache_text(
    settings: CacheSettings,
    family: LanguageFamily,
    max_length: int,
    dataset: Path,
    base: Path,
    output: Path,
    recipe: Recipe | None = None,
) -> None:
    """Tokenise examples that the cache in `output` does not have yet, and publish the cache again.

    Args:
        settings: The settings of cache_latents.
        family: The base's family.
        max_length: Maximum row length, in tokens.
        dataset: Folder of the dataset.
        base: Folder of the base, whose tokenizer is used.
        output: Folder of the cache. Its content is reused, whether or not it was finished.
        recipe: What the folder records of what it is made from.

    Raises:
        PipelineError: no example is left to train on, a shard cannot hold one, the model has no
            positions for such rows or would not separate packed examples, or the chat template does
            not accept an example.
    """
    samples = read_conversations(dataset)
    model = artifact.read(base, "base")
    from zerotrain.models.families.positions import check_row_length

    check_row_length(base, max_length)
    packing = settings.packing
    if packing:
        from zerotrain.models.families.positions import check_packable

        check_packable(base)
    tokenising = Tokenising(family, model, max_length)
    artifact.recover_interrupted_publish(output)
    now = present()
    stored = StoredShards(output, now)
    for path in stored.damaged:
        print(f"WARNING: {path} is damaged; what it held is tokenised again", file=sys.stderr)
    keyed = [(tokenising.key(sample), sample) for sample in samples.samples]
    by_key = dict(keyed)

    def encode(keys: Sequence[str]) -> Iterator[Tensors]:
        return (tokenising.tensors(by_key[key]) for key in keys)

    def encode_all(keys: Sequence[str]) -> Iterator[Tensors]:
        return progress(encode(keys), len(keys), "tokenising", "example")

    by_length = sorted(by_key, key=lambda key: (_characters(by_key[key]), key))
    group = Group("examples", by_length, encode, "fp32", lambda key: by_key[key].file)
    keep_equal(stored, output, [group], now)
    tokenising.left_out = 0
    written = write_series(
        TOKENS, by_key, encode_all, stored, folder=output, shard_size=settings.cache.shard_size
    )
    lengths = {key: found for key in by_key if any(found := _lengths(stored.tensors(key)))}
    if left_out := [sample.file for key, sample in by_key.items() if key not in lengths]:
        named = ", ".join(left_out[:MOST_SAID]) + ", ..." * (len(left_out) > MOST_SAID)
        print(
            f"WARNING: {len(left_out)} of {len(by_key)} examples are left out: no answer that is "
            f"learned begins within max_length {max_length} ({named})",
            file=sys.stderr,
        )
    for name, count in tokenising.unused(samples.samples).items():
        turns = f"{count:,} turn{'s' * (count != 1)}"
        print(
            f"WARNING: left out: {name} of {turns}: the chat template does not take it",
            file=sys.stderr,
        )
    if tokenising.left_out:
        print(
            f"WARNING: {tokenising.left_out} answers of the {written.encoded} examples tokenised "
            "now are not learned: the chat template shows them otherwise once more turns follow",
            file=sys.stderr,
        )
    kept = [(key, sample) for key, sample in keyed if key in lengths]
    if not any(sample.split == "train" for _, sample in kept):
        raise PipelineError(
            f"train.max_length: {max_length} tokens leave no answer of any example to learn",
            hint="raise train.max_length",
        )
    rows = _rows(kept, lengths, max_length if packing else None)
    index = TokenIndex(max_length, packing, samples.repeats, rows, written.series)
    unchanged = same_index(output, index)
    with artifact.publish(
        output,
        KIND,
        parents={"dataset": samples.artifact, "base": model},
        made_by=carry_made_by(output, {"stage": "cache_latents"}, unchanged=unchanged),
        recipe=recipe,
    ) as draft:
        carry_record(output, draft.folder, now, unchanged=unchanged)
        draft.known = place(written, draft.folder)
        shard_size = settings.cache.shard_size
        keep_orphans(stored, by_key, output, draft, shard_size=shard_size)
        carry_index(output, draft.folder, index, unchanged=unchanged)
        train = sum(row.split == "train" for row in rows)
        draft.content = {
            "modality": "text",
            "max_length": max_length,
            "packing": packing,
            "epoch_size": train * samples.repeats,
            "count": {"rows": len(rows), "train": train, "conversations": len(lengths)},
        }
    filled = sum(max_length in one for one in lengths.values())
    print(
        f"tokenised {written.encoded} of {written.total} examples; the rest was in the cache; "
        f"{len(rows)} rows" + (f", packed to {max_length} tokens" if packing else "")
    )
    if filled:
        print(f"{filled} examples fill max_length {max_length}: what is longer is cut at its end")


def _characters(sample: Conversation) -> int:
    return sum(len(message.content) for message in sample.messages)


def _lengths(tensors: Tensors) -> tuple[int, int]:
    return len(tensors["input_ids"]), len(tensors["labels"])


def _rows(
    kept: Sequence[tuple[str, Conversation]],
    lengths: Mapping[str, tuple[int, int]],
    packed_to: int | None,
) -> tuple[Row, ...]:
    """Build the samples of the cache; held-out conversations are never packed."""
    if packed_to is None:
        return tuple(_row(key, sample) for key, sample in kept)
    train = [key for key, sample in kept if sample.split == "train"]
    packed = pack([lengths[key][0] for key in train], packed_to)
    return (
        *(Row(tuple(train[i] for i in row), "train") for row in packed),
        *(_row(key, sample) for key, sample in kept if sample.split == "holdout"),
    )


def _row(key: str, sample: Conversation) -> Row:
    return Row((key,), sample.split, sample.sha256 if sample.split == "holdout" else "")
