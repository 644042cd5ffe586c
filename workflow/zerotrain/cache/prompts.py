"""Validation prompts in a cache: embeddings that a training samples with but does not learn from.

They are records and thus not part of the cache's identity: other prompts change no training data,
and a training continues. validation.json names them and their shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zerotrain.artifact import RECORDS, Artifact, write_json
from zerotrain.artifact.documents import read_object
from zerotrain.cache.layout import FORMAT, Series, parse_series
from zerotrain.cache.reader import Shards
from zerotrain.config.section import ConditionedPrompt
from zerotrain.errors import PipelineError

PROMPTS, PROMPT_IMAGES = f"{RECORDS}validation", f"{RECORDS}validation_images"
"""The series of shards of prompts and of their conditioning images."""
PROMPTS_INDEX = f"{PROMPTS}.json"


@dataclass(frozen=True)
class PromptKeys:
    """The keys of an encoded prompt."""

    text: str
    empty: str
    """Key of the empty prompt, with the same conditioning images if the text encoder sees them."""
    conditioning: str | None = None


@dataclass(frozen=True)
class PromptTensors:
    """The tensors of a prompt, float32, without a leading dimension."""

    text: dict[str, torch.Tensor]
    empty: dict[str, torch.Tensor]
    conditioning: dict[str, torch.Tensor] | None


def write_prompts(
    folder: Path,
    keys: Mapping[str | ConditionedPrompt, PromptKeys],
    text: Series,
    conditioning: Series | None,
) -> None:
    """Write validation.json: the keys of each prompt, including the empty one."""
    plain = {asked: found for asked, found in keys.items() if isinstance(asked, str)}
    prompts = {asked: found.text for asked, found in plain.items()}
    if plain:
        prompts[""] = next(iter(plain.values())).empty
    document: dict[str, Any] = {"format": FORMAT, "prompts": prompts, "text": asdict(text)}
    if len(plain) < len(keys):
        document["conditioned"] = [
            {"prompt": asked[0], "images": asked[1], **asdict(found)}
            for asked, found in keys.items()
            if not isinstance(asked, str)
        ]
    if conditioning is not None:
        document["conditioning"] = asdict(conditioning)
    write_json(folder / PROMPTS_INDEX, document)


class Prompts:
    """The prompts of a published cache."""

    def __init__(self, found: Artifact) -> None:
        self._artifact = found
        self._keys: dict[str | ConditionedPrompt, PromptKeys] = {}
        self._shards = Shards(found)
        if PROMPTS_INDEX not in found.files:
            return
        document = read_object(found.path(PROMPTS_INDEX))
        self._text = parse_series(document["text"])
        prompts = document["prompts"]
        self._keys |= {asked: PromptKeys(text, prompts[""]) for asked, text in prompts.items()}
        if "conditioning" in document:
            self._conditioning = parse_series(document["conditioning"])
        for one in document.get("conditioned", ()):
            asked = (one["prompt"], tuple(one["images"]))
            self._keys[asked] = PromptKeys(one["text"], one["empty"], one["conditioning"])

    def tensors(self, asked: str | ConditionedPrompt) -> PromptTensors:
        """Read the tensors of a prompt, given alone or with the files of its conditioning images.

        Raises:
            PipelineError: the cache does not have them.
        """
        if asked not in self._keys:
            named = asked if isinstance(asked, str) else asked[0]
            images = "" if isinstance(asked, str) else f" with {', '.join(asked[1])}"
            raise PipelineError(
                f"{self._artifact.folder}: has no embeddings of the validation prompt "
                f"{named!r}{images}",
                hint="run cache_latents again, which encodes what is missing alone",
            )
        keys = self._keys[asked]
        return PromptTensors(
            self._read(PROMPTS, self._text, keys.text),
            self._read(PROMPTS, self._text, keys.empty),
            self._read(PROMPT_IMAGES, self._conditioning, keys.conditioning)
            if keys.conditioning is not None
            else None,
        )

    def _read(self, name: str, series: Series, key: str) -> dict[str, torch.Tensor]:
        return {
            tensor: value.float()
            for tensor, value in self._shards.tensors(name, series, key).items()
        }
