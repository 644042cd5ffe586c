"""Text to tokens: the cache of a dataset of conversations under one tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.base import in_part
from zerotrain.cache.layout import KIND
from zerotrain.cache.token_layout import (
    TOKENS,
    Row,
    TokenIndex,
    pack,
    tokens_key,
    write_token_index,
)
from zerotrain.cache.writer import Stored, Tensors, place, write_series
from zerotrain.config import RunConfig
from zerotrain.data.conversation import Conversation, read_conversations
from zerotrain.errors import PipelineError
from zerotrain.families import ROOT, TextFamily, Tokens
from zerotrain.progress import progress
from zerotrain.sources import code_digest

CONFIGURATION = ("config.json", "generation_config.json")
"""Files beside a tokenizer's that are none of it."""
MOST_SAID = 5


class Tokenising:
    """The keys and tokens of a dataset at one length under one base model."""

    def __init__(self, family: TextFamily, base: Artifact, max_length: int) -> None:
        self.family = family
        self.max_length = max_length
        self.left_out = 0
        """Answers of what was tokenised that the chat template does not show as generated."""
        self._base = base
        self._tokenizer: Any = None
        self._parts = {
            name: found
            for name, found in base.content["parts"].items()
            if not in_part(name, ROOT) and name not in CONFIGURATION
        }
        self._code = code_digest(*family.encoding_code)

    def key(self, sample: Conversation) -> str:
        """The key of a conversation."""
        return tokens_key(
            sample.sha256,
            self.max_length,
            family=self.family.name,
            parts=self._parts,
            code=self._code,
        )

    def tensors(self, sample: Conversation) -> Tensors:
        """A conversation's tokens, int32; of no length if nothing of an answer is left of it.

        Raises:
            PipelineError: the tokenizer's chat template does not take it.
        """
        if self._tokenizer is None:
            self._tokenizer = self.family.load_tokenizer(self._base.folder)
        try:
            found = self.family.tokenise(self._tokenizer, sample.messages, self.max_length)
        except PipelineError as error:
            raise PipelineError(f"{sample.file}: {error.what}", hint=error.hint) from error
        found = found or Tokens([], [])
        self.left_out += found.left_out
        return {
            "input_ids": torch.tensor(found.input_ids, dtype=torch.int32),
            "labels": torch.tensor(found.labels, dtype=torch.int32),
        }


def cache_text(
    config: RunConfig, family: TextFamily, max_length: int, dataset: Path, base: Path, output: Path
) -> None:
    """Tokenise what the cache in `output` does not hold yet, and publish the cache anew.

    Args:
        config: The run's configuration.
        family: Its family.
        max_length: Longest row, in tokens.
        dataset: Folder of the dataset.
        base: Folder of the base model, whose tokenizer is used.
        output: Folder of the cache. What it holds is reused, whether or not it was finished.

    Raises:
        PipelineError: no example is left to train on, a shard cannot hold one, the model has no
            positions for such rows or would not keep packed examples apart, or the chat template
            does not take an example.
    """
    samples = read_conversations(dataset)
    model = artifact.read(base, "base")
    from zerotrain.families.positions import refuse_too_long

    refuse_too_long(base, max_length, (config.peft or {}).get("num_virtual_tokens", 0))
    packing = config.phases[0].train.packing
    if packing:
        from zerotrain.families.packing import refuse_unpackable

        refuse_unpackable(base)
    tokenising = Tokenising(family, model, max_length)
    artifact.mend(output)
    stored = Stored(output)
    for path in stored.damaged:
        print(f"WARNING: {path} is damaged; what it held is tokenised again", file=sys.stderr)
    keyed = [(tokenising.key(sample), sample) for sample in samples.samples]
    by_key = dict(keyed)

    def encode(keys: Sequence[str]) -> Iterator[Tensors]:
        for key in progress(keys, len(keys), "tokenising", "example"):
            yield tokenising.tensors(by_key[key])

    written = write_series(
        TOKENS, by_key, encode, stored, folder=output, shard_size=config.cache.shard_size
    )
    lengths = {key: found for key in by_key if any(found := _lengths(stored.tensors(key)))}
    if left_out := [sample.file for key, sample in by_key.items() if key not in lengths]:
        named = ", ".join(left_out[:MOST_SAID]) + ", ..." * (len(left_out) > MOST_SAID)
        print(
            f"WARNING: {len(left_out)} of {len(by_key)} examples are left out: their questions "
            f"alone fill max_length {max_length} ({named})",
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
    with artifact.publish(
        output,
        KIND,
        parents={"dataset": samples.artifact, "base": model},
        made_by={"stage": "cache_latents"},
    ) as draft:
        draft.known = place(written, draft.folder)
        write_token_index(
            draft.folder, TokenIndex(max_length, packing, samples.repeats, rows, written.series)
        )
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


def _lengths(tensors: Tensors) -> tuple[int, int]:
    return len(tensors["input_ids"]), len(tensors["labels"])


def _rows(
    kept: Sequence[tuple[str, Conversation]],
    lengths: Mapping[str, tuple[int, int]],
    packed_to: int | None,
) -> tuple[Row, ...]:
    """The samples of the cache: what is held out is never packed."""
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
