"""import_checkpoint: another program's checkpoint becomes the state that a run begins with."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zerotrain import artifact
from zerotrain.checkpoint_path import find_checkpoint
from zerotrain.config import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.export import export
from zerotrain.families import Family, load_family
from zerotrain.foreign import ForeignCheckpoint, adapter_files
from zerotrain.foreign.fitting import fit
from zerotrain.foreign.order import MODULE, Members, ModelOrder, spared_names
from zerotrain.formats.original import PLACES, layers_by_place
from zerotrain.model_place import PUBLISHED
from zerotrain.optimizers import find, slots
from zerotrain.position import MASTER, TrainingPosition
from zerotrain.state_source import open_source
from zerotrain.tensor_file import open_tensors
from zerotrain.trained import choose_trained, refuse_other_parameters, trained_parameters
from zerotrain.training.param_groups import param_groups


def import_checkpoint(
    config: RunConfig, checkpoint: Path, base: Path, state: Path, *, trust_pickle: bool = False
) -> None:
    """Publish the state that a run goes on from.

    Args:
        config: The run's configuration: what is trained.
        checkpoint: A folder of another program (zerotrain.foreign) or a file of one, a safetensors
            file of weights, or a checkpoint or state of zerotrain.
        base: Folder of the base model.
        state: Folder to publish.
        trust_pickle: Let pickles name any class, and run its code.

    Raises:
        PipelineError: the checkpoint is damaged, of no known layout, or of another model.
    """
    path = find_checkpoint(checkpoint.expanduser())
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

        if source.adapter is not None:
            own = adapter_files.run_settings(config.adapter_values(), config.peft is not None)
            adapter_files.check_settings(source.adapter, own, path)
        if adapter_files.is_kohya(source.names):
            source = _read_kohya(source, trained, list(held), family, base)
        source = fit(source, trained, of_base, order=_order(config, model))
        _check_moments(source, config)
        for sentence in source.lost:
            print(f"left out: {sentence}", file=sys.stderr)
    refuse_other_parameters(source.shapes, trained, path)
    export(source, path, None, state, position=_begun(source.position, config))


def _read_kohya(
    source: ForeignCheckpoint,
    trained: dict[str, list[int]],
    names: list[str],
    family: Family,
    base: Path,
) -> ForeignCheckpoint:
    """A LoRA under our names, whose layers kohya names as the original model does."""
    if family.name not in PLACES:
        raise PipelineError(
            f"{source.folder}: kohya's names of {family.name} are not known here",
            hint=f"they are those of {', '.join(PLACES)}; peft's and diffusers' files are for all",
        )
    config = json.loads((base / family.trained_part / "config.json").read_text())
    places = layers_by_place(names, PLACES[family.name](config))
    return adapter_files.from_kohya(source, trained, places)


@dataclass(frozen=True)
class _GroupValues:
    """The first phase's values by which it sorts parameters into groups."""

    param_groups: list[dict[str, Any]]
    learning_rate: float
    adam_weight_decay: float
    no_decay_norm_bias: bool


def _order(config: RunConfig, model: torch.nn.Module) -> ModelOrder:
    """What the run says of the order of an optimizer's parameters."""
    train = config.phases[0].train
    decay = None if train.no_decay_norm_bias else train.adam_weight_decay
    own = [
        {
            "parameters": group.parameters,
            "learning_rate": group.learning_rate or train.learning_rate,
            "adam_weight_decay": given if (given := group.adam_weight_decay) is not None else decay,
        }
        for group in train.param_groups
    ]
    values = _GroupValues(
        own, train.learning_rate, train.adam_weight_decay, train.no_decay_norm_bias
    )
    module = {name: list(p.shape) for name, p in model.named_parameters()}

    def split(names: list[str]) -> list[Members]:
        groups = param_groups(values, {name: module[name] for name in names})
        return [
            Members(group.names, {"lr": group.learning_rate, "weight_decay": group.weight_decay})
            for group in groups
        ]

    resume = config.resume_from_checkpoint
    names = resume.names if resume else None
    return ModelOrder(
        module=module,
        split=split if own or train.no_decay_norm_bias else None,
        names=None if names is None else _read_names(names),
        no_decay=spared_names(model),
    )


def _read_names(names: str) -> list[str]:
    if names == MODULE:
        return [MODULE]
    path = Path(names).expanduser()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(
            f"resume_from_checkpoint.names: {path}: {error}",
            hint="name a text file with a parameter's name a line, or write `module`",
        ) from error
    return [line.strip() for line in lines if line.strip()]


def _check_moments(source: ForeignCheckpoint, config: RunConfig) -> None:
    """Refuse a folder without usable moments before a state is made of it.

    A file of weights alone says by itself that it has none; there the first phase asks.
    """
    first = config.phases[0]
    own = slots(find(first.train.optimizer)[0].name, first.train.optimizer_args)
    if source.folder.is_dir() and source.slots == [MASTER] and own and "moments" not in first.allow:
        raise PipelineError(
            f"{source.folder}: weights alone would be kept: {'; '.join(source.lost)}",
            hint=f"to start without moments, write `allow: [moments]` into the phase {first.name}",
        )


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
