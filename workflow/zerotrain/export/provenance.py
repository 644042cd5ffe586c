"""The origin of exported weights: their base model, and the phase that trained them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError
from zerotrain.models.hub import HUB_ID


@dataclass(frozen=True)
class Origin:
    """The origin of weights, from the folders that they came from, as far as these still exist."""

    base: str | None = None
    """Hub id or folder of the base model, as in the configuration."""
    commit: str | None = None
    """The base's commit on the hub."""
    base_folder: Path | None = None
    """Folder of the base."""
    phase: Path | None = None
    """The phase's folder, with metrics.json, evaluation/ and launch/."""

    @property
    def hub_id(self) -> str | None:
        """The base's id, if it is a model of the hub."""
        on_hub = self.base and HUB_ID.fullmatch(self.base) and not Path(self.base).exists()
        return self.base if on_hub else None


def find_origin(weights: Artifact) -> Origin:
    """Follow an exported folder to the phase and the base that it came from."""
    while "weights" in weights.parents:
        above = find_parent(weights, "weights")
        if above is None:
            return Origin()
        weights = above
    base, checkpoint = find_parent(weights, "base"), weights.parents.get("checkpoint")
    phase = Path(checkpoint["path"]).parent if checkpoint else None
    return Origin(
        base=str(base.content["base"]) if base and "base" in base.content else None,
        commit=base.content.get("commit") if base else None,
        base_folder=base.folder if base else None,
        phase=phase if phase and (phase / "metrics.json").is_file() else None,
    )


def find_parent(made: Artifact, name: str) -> Artifact | None:
    """Return a parent if it is still in its place and unchanged; otherwise None."""
    recorded = made.parents.get(name)
    if recorded is None:
        return None
    try:
        parent = artifact.read_manifest(Path(recorded["path"]), name)
    except PipelineError:
        return None
    return parent if parent.identity == recorded["identity"] else None
