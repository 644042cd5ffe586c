"""export_weights: convert a phase's checkpoint to weights for use and the next phase's state."""

from __future__ import annotations

from pathlib import Path

from zerotrain.artifact.recipe import Recipe
from zerotrain.config.stage_settings import ExportSettings
from zerotrain.export.export import export
from zerotrain.export.target import WeightsTarget
from zerotrain.state.checkpoint import Checkpoint


def export_weights(
    settings: ExportSettings,
    checkpoint: Path,
    base: Path,
    weights: Path,
    state: Path,
    recipe: Recipe | None = None,
) -> None:
    """Publish a phase's weights and state, after checking them.

    Args:
        settings: What the stage reads of the configuration.
        checkpoint: Folder of the phase's checkpoint.
        base: Folder of the base model, whose other parts complete the weights.
        weights: Folder to publish the weights at, for the model's own library.
        state: Folder to publish the training state at.
        recipe: What the folders record of what they are made from.

    Raises:
        PipelineError: see zerotrain.export.export.export.
    """
    target = WeightsTarget.of(settings, base, weights)
    export(Checkpoint(checkpoint), checkpoint, target, state, recipe=recipe)
