"""Prompts of validations in a cache: embeddings that a training samples by and never learns from.

They are records, which are no part of the cache's identity: other prompts change nothing that a
training learns from, and it goes on. validation.json names them and their shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from zerotrain.artifact import RECORDS, Artifact, write_json
from zerotrain.cache.layout import FORMAT, Series, parse_series
from zerotrain.cache.reader import Shards
from zerotrain.errors import PipelineError

PROMPTS = f"{RECORDS}validation"
"""The series of shards, and the beginning of every file's name."""
PROMPTS_INDEX = f"{PROMPTS}.json"


def write_prompts(folder: Path, keys: Mapping[str, str], series: Series) -> None:
    """Write validation.json: the key of each prompt, the empty one among them."""
    write_json(
        folder / PROMPTS_INDEX, {"format": FORMAT, "prompts": dict(keys), "text": asdict(series)}
    )


class Prompts:
    """The prompts of a published cache."""

    def __init__(self, found: Artifact) -> None:
        self._artifact = found
        self._keys: dict[str, str] = {}
        if PROMPTS_INDEX in found.files:
            document = json.loads(found.path(PROMPTS_INDEX).read_text())
            self._keys, self._series = document["prompts"], parse_series(document["text"])
        self._shards = Shards(found)

    def tensors(self, prompt: str) -> dict[str, torch.Tensor]:
        """A prompt's embeddings, float32, without a leading dimension.

        Raises:
            PipelineError: the cache does not have it.
        """
        if prompt not in self._keys:
            raise PipelineError(
                f"{self._artifact.folder}: has no embeddings of the validation prompt {prompt!r}",
                hint="run cache_latents again, which encodes what is missing alone",
            )
        found = self._shards.tensors(PROMPTS, self._series, self._keys[prompt])
        return {name: value.float() for name, value in found.items()}
