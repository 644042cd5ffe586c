"""Where exported weights came from: their base model, and the phase that trained them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError
from zerotrain.model_place import HUB_ID


@dataclass(frozen=True)
class Origin:
    """What the folders that weights came from say of them, as far as they are still there."""

    base: str | None = None
    """Hub id or folder of the base model, as the configuration named it."""
    commit: str | None = None
    """The base's commit on the hub."""
    base_folder: Path | None = None
    """Where the base lies."""
    phase: Path | None = None
    """The phase's folder, with metrics.json, evaluation/ and launch/."""

    @property
    def hub_id(self) -> str | None:
        """The base's id, where it is a model of the hub."""
        on_hub = self.base and HUB_ID.fullmatch(self.base) and not Path(self.base).exists()
        return self.base if on_hub else None


def origin_of(weights: Artifact) -> Origin:
    """Follow an exported folder to the phase and the base that it came from."""
    while "weights" in weights.parents:
        above = parent(weights, "weights")
        if above is None:
            return Origin()
        weights = above
    base, checkpoint = parent(weights, "base"), weights.parents.get("checkpoint")
    phase = Path(checkpoint["path"]).parent if checkpoint else None
    return Origin(
        base=str(base.content["base"]) if base and "base" in base.content else None,
        commit=base.content.get("commit") if base else None,
        base_folder=base.folder if base else None,
        phase=phase if phase and (phase / "metrics.json").is_file() else None,
    )


def parent(made: Artifact, name: str) -> Artifact | None:
    """A parent that still lies where it lay, and is the same."""
    said = made.parents.get(name)
    if said is None:
        return None
    try:
        found = artifact.read_manifest(Path(said["path"]), name)
    except PipelineError:
        return None
    return found if found.identity == said["identity"] else None
