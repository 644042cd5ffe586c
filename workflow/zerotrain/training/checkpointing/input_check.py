"""The check of a phase's inputs before its processes start, while devices wait for them.

Files with hashes that this machine remembers are not read again. Weights of the base that no
process opens in training are not read at all: their sizes are compared.
"""

from __future__ import annotations

from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import Artifact, file_sha256
from zerotrain.artifact.manifest import read_manifest
from zerotrain.artifact.verdicts import remembering
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import TRAINED

WEIGHTS = (".safetensors", ".bin")
DECODER = "vae/"
"""Folder of the decoder, which turns a validation's samples into images."""


def read_input(folder: Path, kind: str) -> Artifact:
    """Read a folder and check all its files.

    Raises:
        PipelineError: it is missing, of another kind, or incomplete.
    """
    return artifact.read(folder, kind, sha256=remembering(file_sha256))


def read_base(folder: Path, phase: ResolvedPhase) -> Artifact:
    """Read a base and check the files that training the phase opens; of others only the sizes.

    Raises:
        PipelineError: it is missing or not a base, or one of these files is missing or differs.
    """
    base = read_manifest(folder, "base")
    base.verify(sha256=None)
    opened = [name for name in base.files if _opens(name, phase)]
    base.verify(remembering(file_sha256), opened)
    return base


def _opens(name: str, phase: ResolvedPhase) -> bool:
    if not name.endswith(WEIGHTS) or TRAINED.fullmatch(name):
        return True
    return phase.derived.validation is not None and name.startswith(DECODER)
