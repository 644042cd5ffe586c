"""export_weights: a phase's checkpoint becomes weights for use and the state of the next phase."""

from __future__ import annotations

from pathlib import Path

from zerotrain.checkpoint import Checkpoint
from zerotrain.config import RunConfig
from zerotrain.export import WeightsTarget, export


def export_weights(
    config: RunConfig, checkpoint: Path, base: Path, weights: Path, state: Path
) -> None:
    """Publish a phase's weights and state, after checking them.

    Args:
        config: The run's configuration (family, export, lora, peft, frozen_parameters,
            trainable_parameters).
        checkpoint: Folder of the phase's checkpoint.
        base: Folder of the base model, whose other parts complete the weights.
        weights: Folder to publish the weights at, which the model's own library loads.
        state: Folder to publish the training state at.

    Raises:
        PipelineError: see zerotrain.export.export.
    """
    target = WeightsTarget.of(config, base, weights)
    export(Checkpoint(checkpoint), checkpoint, target, state)
