"""import_checkpoint: convert another program's checkpoint to the state that a run starts with."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from zerotrain import artifact
from zerotrain.artifact.documents import read_object, read_text
from zerotrain.artifact.recipe import Recipe
from zerotrain.artifact.tensor_file import open_tensors
from zerotrain.config.optimizers import find, slots
from zerotrain.config.stage_settings import ImportSettings
from zerotrain.errors import PipelineError
from zerotrain.export.export import export
from zerotrain.export.formats.original import SLOTS, layers_by_slot
from zerotrain.models.families import Family, load_family
from zerotrain.models.hub import PUBLISHED
from zerotrain.models.trainable import check_same_parameters, choose_trained, trained_parameters
from zerotrain.state.checkpoint_path import find_checkpoint
from zerotrain.state.external import ExternalCheckpoint, adapter_files, layer_scales
from zerotrain.state.external.fitting import MODULE, Members, ModelOrder, fit, undecayed_names
from zerotrain.state.open import open_checkpoint
from zerotrain.state.position import MASTER, TrainerState
from zerotrain.training.optim.optimizer import param_groups


def import_checkpoint(
    settings: ImportSettings,
    checkpoint: Path,
    base: Path,
    state: Path,
    *,
    trust_pickle: bool = False,
    recipe: Recipe | None = None,
) -> None:
    """Publish the state that a run continues from.

    Args:
        settings: What the stage reads of the configuration, which decides what is trained.
        checkpoint: A folder of another program (zerotrain.state.external) or a file of one, a
            safetensors file of weights, or a checkpoint or state of zerotrain.
        base: Folder of the base model.
        state: Folder to publish.
        trust_pickle: Whether pickles may name any class and run its code.
        recipe: What the folder records of what it is made from.

    Raises:
        PipelineError: the checkpoint is damaged, of no known layout, or of another model.
    """
    path = find_checkpoint(checkpoint.expanduser())
    artifact.read_around(base, PUBLISHED)
    family = load_family(settings.family)
    model = choose_trained(
        family.empty_model(base),
        settings.adapter_values(),
        settings.frozen_parameters,
        settings.seed,
        settings.trainable_parameters,
    )
    trained = {name: list(p.shape) for name, p in trained_parameters(model).items()}
    source = open_checkpoint(path, trust_pickle=trust_pickle)
    if isinstance(source, ExternalCheckpoint):
        held = open_tensors(sorted((base / family.trained_part).glob("*.safetensors")))

        def of_base(name: str) -> torch.Tensor | None:
            return held[name].get_tensor(name) if name in held else None

        if source.adapter is not None:
            own = adapter_files.run_settings(settings.adapter_values(), settings.peft is not None)
            adapter_files.check_settings(source.adapter, own, path)
            if layer_scales.SCALES in source.adapter and settings.lora is not None:
                source, done = layer_scales.to_one_rank(source, own, settings.seed)
                print(done, file=sys.stderr)
        if adapter_files.is_kohya(source.names):
            source = _read_kohya(source, trained, list(held), family, base)
        elif settings.lora is not None and settings.lora.fused_layers:
            source = adapter_files.share_first_factors(source, trained)
        if source.adapter is not None and settings.lora is not None:
            adapter_files.check_all_used(source, trained)
        if source.progress:
            print(f"recorded: {source.progress}", file=sys.stderr)
        source = fit(source, trained, of_base, order=_order(settings, model))
        _check_moments(source, settings)
        for sentence in source.lost:
            print(f"left out: {sentence}", file=sys.stderr)
    check_same_parameters(source.shapes, trained, path)
    position = _begun(source.position, settings)
    export(source, path, None, state, position=position, recipe=recipe)


def _read_kohya(
    source: ExternalCheckpoint,
    trained: dict[str, list[int]],
    names: list[str],
    family: Family,
    base: Path,
) -> ExternalCheckpoint:
    """Rename a LoRA with kohya's names, which are those of the original model's layers, to ours."""
    if family.name not in SLOTS:
        raise PipelineError(
            f"{source.folder}: kohya's names of {family.name} are not known here",
            hint=f"they are those of {', '.join(SLOTS)}; peft's and diffusers' files are for all",
        )
    config = read_object(base / family.trained_part / "config.json", follow_links=True)
    places = layers_by_slot(names, SLOTS[family.name](config))
    return adapter_files.from_kohya(source, trained, places)


def _order(settings: ImportSettings, model: torch.nn.Module) -> ModelOrder:
    """Return what the run's configuration defines on the order of an optimizer's parameters."""
    module = {name: list(p.shape) for name, p in model.named_parameters()}

    def split(names: list[str]) -> list[Members]:
        groups = param_groups(settings.train, {name: module[name] for name in names})
        return [
            Members(group.names, {"lr": group.learning_rate, "weight_decay": group.weight_decay})
            for group in groups
        ]

    resume = settings.resume_from_checkpoint
    names = resume.names if resume else None
    return ModelOrder(
        module=module,
        split=split if settings.param_groups or settings.no_decay_norm_bias else None,
        names=None if names is None else _read_names(names),
        no_decay=undecayed_names(model),
    )


def _read_names(names: str) -> list[str]:
    if names == MODULE:
        return [MODULE]
    path = Path(names).expanduser()
    try:
        lines = read_text(path, follow_links=True).splitlines()
    except PipelineError as error:
        raise PipelineError(
            f"resume_from_checkpoint.names: {error.what}",
            hint="name a text file with a parameter's name a line, or write `module`",
        ) from error
    return [line.strip() for line in lines if line.strip()]


def _check_moments(source: ExternalCheckpoint, settings: ImportSettings) -> None:
    """Reject a folder without usable moments, unless the first phase allows that.

    A file of weights obviously has none; for it, the first phase checks this when it starts.
    """
    train, allow = settings.train, settings.allow
    own = slots(find(train.optimizer)[0].name, train.optimizer_args)
    if source.folder.is_dir() and source.slots == [MASTER] and own and "moments" not in allow:
        raise PipelineError(
            f"{source.folder}: weights alone would be kept: {'; '.join(source.lost)}",
            hint="to start without moments, write `allow: [moments]` into the phase "
            f"{settings.phase}",
        )


def _begun(position: TrainerState, settings: ImportSettings) -> TrainerState:
    """Return the run's start: its own schedule, and a position in its own order of samples."""
    samples = position.samples
    if position.step and not samples:
        samples = position.step * settings.batch
        print(
            f"the checkpoint does not say how many samples it has seen; {samples} are assumed, "
            f"{position.step} steps of this run's global batch",
            file=sys.stderr,
        )
    if (seed := position.rng.get("seed")) not in (None, settings.seed):
        print(
            f"the checkpoint's seed is {seed}, this run's {settings.seed}: the samples that follow "
            "are this run's",
            file=sys.stderr,
        )
    return replace(position, samples=samples, lr_scheduler_steps=0)
