"""import_checkpoint: another program's checkpoint becomes the state that a run begins with."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from zerotrain import artifact
from zerotrain.config import RunConfig
from zerotrain.export import export
from zerotrain.families import load_family
from zerotrain.foreign import ForeignCheckpoint
from zerotrain.foreign.fitting import fit
from zerotrain.model_place import PUBLISHED
from zerotrain.position import TrainingPosition
from zerotrain.state_source import open_source
from zerotrain.tensor_file import open_tensors
from zerotrain.trained import choose_trained, refuse_other_parameters, trained_parameters


def import_checkpoint(
    config: RunConfig, checkpoint: Path, base: Path, state: Path, *, trust_pickle: bool = False
) -> None:
    """Publish the state that a run goes on from.

    Args:
        config: The run's configuration: what is trained.
        checkpoint: A folder of DeepSpeed or accelerate, a safetensors file of weights, or a
            checkpoint or state of zerotrain.
        base: Folder of the base model.
        state: Folder to publish.
        trust_pickle: Let pickles name any class, and run its code.

    Raises:
        PipelineError: the checkpoint is damaged, of no known layout, or of another model.
    """
    path = checkpoint.expanduser()
    artifact.read_around(base, PUBLISHED)
    family = load_family(config.family)
    model = choose_trained(
        family.empty_model(base),
        config.adapter_values(),
        config.frozen_parameters,
        config.seed,
        config.trainable_parameters,
    )
    trained = {name: list(p.shape) for name, p in trained_parameters(model).items()}
    source = open_source(path, trust_pickle=trust_pickle)
    if isinstance(source, ForeignCheckpoint):
        held = open_tensors(sorted((base / family.trained_part).glob("*.safetensors")))

        def of_base(name: str) -> torch.Tensor | None:
            return held[name].get_tensor(name) if name in held else None

        source = fit(source, trained, of_base, trust_pickle=trust_pickle)
        for sentence in source.lost:
            print(f"left out: {sentence}", file=sys.stderr)
    refuse_other_parameters(source.shapes, trained, path)
    export(source, path, None, state, position=_begun(source.position, config))


def _begun(position: TrainingPosition, config: RunConfig) -> TrainingPosition:
    """Where the run begins: its own schedule, and a place in its own order of samples."""
    samples = position.samples
    if position.step and not samples:
        samples = position.step * config.phases[0].train.global_batch_size
        print(
            f"the checkpoint does not say how many samples it has seen; {samples} are assumed, "
            f"{position.step} steps of this run's global batch",
            file=sys.stderr,
        )
    if (seed := position.rng.get("seed")) not in (None, config.seed):
        print(
            f"the checkpoint's seed is {seed}, this run's {config.seed}: the samples that follow "
            "are this run's",
            file=sys.stderr,
        )
    return replace(position, samples=samples, lr_scheduler_steps=0)
