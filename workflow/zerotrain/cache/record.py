"""Records of a cache: what encoded it, long captions, and the embeddings of validation prompts.

They are not part of the cache's identity. records/encoding.json describes the encoding of a
published cache (versions, switches, device), partial/encoding.json that of the unpublished shards.
After an upgrade the present conditions differ: `reuse` then decides whether the stored tensors are
kept. If they are kept and nothing else changed, the record stays as it is, and with it every byte
of the cache.

A training samples with the prompts' embeddings but does not learn from them: other prompts change
no training data, and a training continues. validation.json names them and their shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain import __version__, artifact
from zerotrain.artifact import RECORDS, Artifact, documents, link_or_copy, write_json
from zerotrain.artifact.documents import read_object
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.cache.layout import (
    COLUMNS,
    FORMAT,
    INDEX,
    KIND,
    Index,
    Series,
    TokenIndex,
    check_columns,
    parse_series,
    read_index,
    read_token_index,
    write_index,
    write_token_index,
)
from zerotrain.cache.reader import Shards
from zerotrain.config.section import ConditionedPrompt
from zerotrain.data.dataset import Sample
from zerotrain.errors import PipelineError
from zerotrain.machine.device import device_software, software

if TYPE_CHECKING:
    from zerotrain.models.families.prompt_tokens import TokenLimit

RECORD = "encoding.json"
ENCODING = f"{RECORDS}{RECORD}"
LONG_CAPTIONS = f"{RECORDS}long_captions.json"
"""The captions that are too long for the text encoders."""
PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "sentencepiece", "pillow", "jinja2")
"""Packages whose code decodes, encodes or tokenises."""
COMPARED = ("versions.", "env.")
"""Prefixes of software entries that may change more than the last bits. A device's name and driver
do not: the kind of device is in the keys."""
NOT_COMPARED = (
    *("versions.python", "versions.cuda", "versions.cudnn", "versions.nccl"),
    *("env.CUBLAS_WORKSPACE_CONFIG", "env.MKL_CBWR", "env.NCCL_ALGO", "env.NCCL_PROTO"),
)


@dataclass(frozen=True)
class Record:
    """The versions, switches and device that encoded tensors."""

    software: Mapping[str, str]
    """Versions, switches and device, as named by zerotrain.machine.device."""
    stage: int = VERSIONS["cache_latents"]
    """Version of the stage."""
    zerotrain: str = __version__

    def changes(self, now: Record) -> dict[str, tuple[str, str]]:
        """Return what a later record changes: values before and after, by name."""
        before, after = self._compared(), now._compared()
        return {
            name: (before.get(name, "none"), after.get(name, "none"))
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        }

    def _compared(self) -> dict[str, str]:
        found = {
            name: value
            for name, value in self.software.items()
            if name.startswith(COMPARED) and name not in NOT_COMPARED
        }
        return {**found, "cache_latents": f"version {self.stage}"}


def present(device: str | None = None) -> Record:
    """Return the record of this process.

    Args:
        device: Kind of the device that encodes; None for tokenising.
    """
    found = software(PACKAGES)
    if device is not None:
        found |= device_software(torch.device(device))
        found |= {"cudnn.allow_tf32": "False", "cudnn.deterministic": "True"}
    return Record(found)


def write_record(path: Path, record: Record) -> None:
    """Write a record; equal records give equal bytes."""
    write_json(path, asdict(record))


def read_record(path: Path) -> Record | None:
    """Read a record; None if it is unreadable, so that the encoding conditions are unknown."""
    with suppress(OSError, ValueError):
        return documents.read_record(path, Record)
    return None


def carry_record(folder: Path, draft: Path, now: Record, *, unchanged: bool) -> None:
    """Write the record of the encoding conditions to a draft of a cache folder.

    Args:
        folder: The cache folder; its record is kept if nothing else changed.
        draft: The folder that the cache is written to.
        now: The record of this process.
        unchanged: Whether the index is unchanged.
    """
    (draft / RECORDS).mkdir(exist_ok=True)
    before = read_record(folder / ENCODING) if unchanged else None
    write_record(draft / ENCODING, before or now)


def carry_made_by(folder: Path, values: Mapping[str, Any], *, unchanged: bool) -> dict[str, Any]:
    """Return the manifest's made_by: unchanged if nothing else changed, whatever version runs.

    Args:
        folder: The cache folder.
        values: The stage and the user's encoding settings.
        unchanged: Whether the index is unchanged.
    """
    if not unchanged:
        return dict(values)
    with suppress(PipelineError):
        return dict(artifact.read_manifest(folder, KIND).made_by)
    before = read_record(folder / ENCODING)  # Snakemake may have removed the manifest
    return {**values, **({"zerotrain": before.zerotrain} if before else {})}


def write_long_captions(
    folder: Path, limits: Sequence[TokenLimit], samples: Sequence[Sample]
) -> None:
    """Write each limit that captions exceed: its tokens, and file and tokens of each caption."""
    document = [
        {
            "limit": limit.limit,
            "tokenizers": limit.tokenizers,
            "captions": len(limit.counts),
            "exceeding": [
                {"file": samples[place].file, "tokens": limit.counts[place]}
                for place in limit.exceeding
            ],
        }
        for limit in limits
    ]
    write_json(folder / LONG_CAPTIONS, document)


def same_index(folder: Path, index: Index | TokenIndex) -> bool:
    """Return whether a cache folder already has this index, undamaged."""
    with suppress(OSError, ValueError):
        read = read_index if isinstance(index, Index) else read_token_index
        check_columns(folder)
        return read(folder) == index
    return False


def carry_index(folder: Path, draft: Path, index: Index | TokenIndex, *, unchanged: bool) -> None:
    """Write the index to a draft of a cache folder; link an unchanged one.

    Args:
        folder: The cache folder.
        draft: The folder that the cache is written to.
        index: The present index.
        unchanged: Whether `folder` has it already.
    """
    if unchanged:
        for name in (INDEX, COLUMNS):
            link_or_copy(folder / name, draft / name)
    elif isinstance(index, Index):
        write_index(draft, index)
    else:
        write_token_index(draft, index)


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
