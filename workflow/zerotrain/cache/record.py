"""Records of a cache: what encoded it (versions, switches, device), and long captions.

They are not part of the cache's identity. records/encoding.json describes the encoding of a
published cache, partial/encoding.json that of the unpublished shards. After an upgrade the present
conditions differ: `comparison` then decides whether the stored tensors are kept. If they are kept
and nothing else changed, the record stays as it is, and with it every byte of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain import __version__, artifact
from zerotrain.artifact import RECORDS, documents, write_json
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.cache.layout import KIND
from zerotrain.data.dataset import Sample
from zerotrain.errors import PipelineError
from zerotrain.machine.software import device_software, software

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
    """Versions, switches and device, as named by zerotrain.machine.software."""
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
