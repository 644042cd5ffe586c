"""The one door between phases and out of the pipeline: checked weights, and a checked state.

Of any training, whatever engine wrote it. Needs no GPU and no engine; memory is that of one tensor.
The rule export_weights and the command `zerotrain export` both lead here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.base import check_inside, choose_files, in_part, is_model_file
from zerotrain.checkpoint import Checkpoint
from zerotrain.config import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.export_check import CheckedSource, check_lora, check_peft, check_written
from zerotrain.families import ImageFamily, TextFamily, load_family
from zerotrain.parameter_patterns import is_frozen
from zerotrain.position import EMA, MASTER, TrainingPosition
from zerotrain.state import KIND as STATE
from zerotrain.state import State, write_state
from zerotrain.state_source import AveragedWeights, Source

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class WeightsTarget:
    """Where weights go, and what completes them."""

    folder: Path
    """Folder to publish them at, which the model's own library loads."""
    base: Path
    """The base model's folder, published or as diffusers saves one."""
    family: ImageFamily | TextFamily
    dtype: str
    """Their type, a key of DTYPES."""
    frozen_parameters: Sequence[str] = ()
    """Regular expressions: parameters that the training left as the base has them."""
    lora: Mapping[str, Any] | None = None
    """rank, alpha, dropout and target_modules of the LoRA that was trained, if it was one."""
    peft: Mapping[str, Any] | None = None
    """peft_type and values of the other adapter that was trained, if it was one."""
    trainable_parameters: Sequence[str] = ()
    """Regular expressions: if there are some, the others were left as the base has them."""
    max_sequence_length: int | None = None
    """Tokens of a prompt that it was trained with, if they are not the family's own number."""
    ema: bool = True
    """Whether the averaged weights are written where the training kept them."""

    @classmethod
    def of(
        cls, config: RunConfig, base: Path, folder: Path, dtype: str | None = None
    ) -> WeightsTarget:
        """What a run's configuration says of its weights."""
        return cls(
            folder=folder,
            base=base,
            family=load_family(config.family),
            dtype=dtype or config.export.dtype,
            frozen_parameters=config.frozen_parameters,
            lora=config.lora_values(),
            peft=config.peft,
            trainable_parameters=config.trainable_parameters,
            max_sequence_length=config.cache.max_sequence_length,
        )

    def content(self, step: int, averaged: bool) -> dict[str, Any]:
        """What the manifest says of them; users of the model look there for the length."""
        length = self.max_sequence_length
        return {
            "family": self.family.name,
            "step": step,
            "dtype": self.dtype,
            **({} if length is None else {"max_sequence_length": length}),
            **({"ema": True} if averaged else {}),
        }

    @property
    def torch_dtype(self) -> torch.dtype:
        """Their type as torch names it."""
        return DTYPES[self.dtype]

    def frozen(self, source: Source) -> Callable[[str], bool]:
        """Whether a training left a parameter alone, as the source or the configuration says."""
        known = getattr(source, "frozen", ())
        return lambda name: (
            name in known or is_frozen(name, self.frozen_parameters, self.trainable_parameters)
        )

    @property
    def adapter(self) -> bool:
        """Whether an adapter was trained, which lies beside its base."""
        return self.lora is not None or self.peft is not None


def export(
    source: Source,
    folder: Path,
    weights: WeightsTarget | None,
    state: Path | None,
    *,
    position: TrainingPosition | None = None,
) -> None:
    """Publish weights, a state, or both, of any training; only what is right is published.

    Both are prepared before either appears. Every tensor that is written is checked: it has
    elements, all finite, and no second moment is negative. Written weights are compared bit by bit
    with the master weights in their type, and loaded once with the real library.

    Args:
        source: The training: a checkpoint, a state, or another program's checkpoint.
        folder: Where the source lies.
        weights: Where to publish the weights, if at all.
        state: Folder to publish the state at, if at all; always float32.
        position: Where the state stands, if not where the source does.

    Raises:
        PipelineError: the folders lie in each other; or a tensor is missing, surplus, empty, of
            another shape, not finite, or reads back otherwise. The message names it, nothing is
            published, and what was there stays.
    """
    targets = [path for path in (weights.folder if weights else None, state) if path is not None]
    refuse_loss(folder, targets)
    origins = parents_of(source, folder)
    at = source.position
    made_by = {"engine": at.engine, "run": at.run, "phase": at.phase}
    with ExitStack() as drafts:
        # Weights are entered first, and appear last.
        if weights is not None:
            base = weights.base
            origins["base"] = artifact.read(base, "base") if artifact.is_described(base) else base
            parents, others = lineage(origins)
            averaged = weights.ema and EMA in source.slots
            shown = AveragedWeights(source) if averaged else source
            made = {**made_by, "dtype": weights.dtype, **others}
            draft = drafts.enter_context(
                artifact.publish(weights.folder, "weights", parents=parents, made_by=made)
            )
            draft.known.update(_link_other_parts(origins["base"], weights, draft.folder))
            said = _header(source.position, parents.get("base"), averaged)
            draft.known.update(_write_weights(shown, weights, draft.folder, said))
            if weights.family.modality == "text":
                draft.known.update(weights.family.name_ends(draft.folder))
            check = check_lora if weights.lora else check_peft if weights.peft else check_written
            check(shown, weights, draft.folder)
            draft.content = weights.content(source.position.step, averaged)
        if state is not None:
            parents, others = lineage(origins)
            draft = drafts.enter_context(
                artifact.publish(state, STATE, parents=parents, made_by={**made_by, **others})
            )
            checked = CheckedSource(source)
            draft.known.update(
                write_state(
                    draft.folder,
                    position or source.position,
                    source.shapes,
                    source.slots,
                    checked.tensor,
                )
            )
            if isinstance(source, Checkpoint | State):
                for name in source.artifact.files:
                    if name.startswith(artifact.RECORDS):
                        copy = draft.folder / name
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        artifact.copy_new(source.artifact.path(name), copy)


def refuse_loss(source: Path, targets: list[Path]) -> None:
    """Publishing replaces a folder whole: what is still needed must not lie in it.

    Raises:
        PipelineError: naming the folder, and what would be lost.
    """
    for place, target in enumerate(targets):
        for needed in (source, *targets[:place], *targets[place + 1 :]):
            if needed.resolve().is_relative_to(target.resolve()):
                raise PipelineError(
                    f"{target} would be replaced whole, and {needed} lies there",
                    hint="name folders beside each other",
                )


def export_universal(source: Source, folder: Path, output: Path) -> None:
    """Publish a training as DeepSpeed's universal checkpoint, which needs no base model.

    Raises:
        PipelineError: a tensor is empty or not finite, or there are no moments.
    """
    from zerotrain.foreign import write_universal

    parents, others = lineage(parents_of(source, folder))
    made_by = {"engine": source.position.engine, **others}
    with artifact.publish(output, "universal", parents=parents, made_by=made_by) as draft:
        write_universal(draft.folder, CheckedSource(source))
        draft.content = {"step": source.position.step}


def _header(position: TrainingPosition, base: Artifact | None, averaged: bool) -> dict[str, str]:
    """What the headers of weights files say of their origin; what is not known is left out."""
    said = {
        "zerotrain.run": position.run,
        "zerotrain.phase": position.phase,
        "zerotrain.step": str(position.step),
        "zerotrain.base": base.identity if base else "",
        "zerotrain.ema": "true" if averaged else "",
    }
    return {key: value for key, value in said.items() if value}


def _write_weights(
    source: Source, weights: WeightsTarget, folder: Path, metadata: Mapping[str, str]
) -> dict[str, str]:
    checked, dtype = CheckedSource(source), weights.torch_dtype

    def read(name: str) -> torch.Tensor:
        return checked.tensor(name, MASTER, dtype)

    if weights.lora:
        from zerotrain.families.lora import save_adapter

        return save_adapter(
            weights.family,
            weights.base,
            source.shapes,
            read,
            dtype=dtype,
            out=folder,
            metadata=metadata,
            **weights.lora,
        )
    if weights.peft:
        from zerotrain.families import adapters

        return adapters.save(
            weights.family,
            weights.base,
            source.shapes,
            read,
            weights.peft,
            dtype=dtype,
            out=folder,
            metadata=metadata,
        )
    return weights.family.save_model(
        weights.base,
        source.shapes,
        read,
        dtype,
        folder,
        frozen=weights.frozen(source),
        metadata=metadata,
    )


def _link_other_parts(
    base: Artifact | Path, weights: WeightsTarget, folder: Path
) -> dict[str, str]:
    """Give the base's untrained parts a second name, so that the folder is a whole model.

    The trained part is one of them where an adapter was trained.

    Returns:
        Their sha256 by name, where the base is published and says it.
    """
    if isinstance(base, Artifact):
        known = {name: entry["sha256"] for name, entry in base.files.items()}
        files = {name: base.path(name) for name in known if is_model_file(name)}
    else:
        names = [path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()]
        chosen = choose_files(names, weights.family, str(base))
        check_inside(base, chosen.values(), str(base))
        known, files = {}, {name: base / file for name, file in chosen.items()}
    part = weights.family.trained_part
    linked = [
        name
        for name in files
        if (weights.adapter or not in_part(name, part)) and not name.startswith(artifact.RECORDS)
    ]
    for name in linked:
        artifact.link_or_copy(files[name], folder / name)
    return {name: known[name] for name in linked if name in known}


def parents_of(source: Source, folder: Path) -> dict[str, Artifact | Path]:
    """A source by its kind; a folder of elsewhere by its path."""
    if isinstance(source, Checkpoint | State):
        return {source.artifact.kind: source.artifact}
    return {"checkpoint": folder}


def lineage(
    origins: Mapping[str, Artifact | Path],
) -> tuple[dict[str, Artifact], dict[str, Any]]:
    """Parents, and for folders that no manifest lists, path and digest of their files' sizes."""
    parents = {name: found for name, found in origins.items() if isinstance(found, Artifact)}
    others = {
        name: {"path": str(found), "files": artifact.sizes_digest(found)}
        for name, found in origins.items()
        if isinstance(found, Path)
    }
    return parents, others
