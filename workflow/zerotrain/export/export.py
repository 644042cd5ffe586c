"""Export of any training: checked weights, and a checked state for the next phase.

It works for checkpoints of every engine, and needs no GPU, no engine, and memory for one tensor.
Each tensor is checked when it is read, and the files after they are written. The rule
export_weights and the command `zerotrain export` both use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.recipe import Recipe
from zerotrain.artifact.tensor_file import open_tensors, same_bits
from zerotrain.errors import PipelineError
from zerotrain.export.formats.loading_code import text_of_readme
from zerotrain.export.formats.tensors import mismatch, report_load_errors
from zerotrain.export.formats.weights import plain_name
from zerotrain.export.target import WeightsTarget
from zerotrain.machine.regular_file import write_text
from zerotrain.models.adapter_config import PEFT_PREFIX
from zerotrain.models.base import README, check_inside, choose_files, in_part, is_model_file
from zerotrain.models.families.model_tensors import stored_tensors, without_memory
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.open import AveragedWeights, PerLayerView
from zerotrain.state.position import EMA_SLOT, MASTER, Source, TrainerState
from zerotrain.state.ran_on import RanOn
from zerotrain.state.state import KIND as STATE
from zerotrain.state.state import State, write_state
from zerotrain.training.checkpointing import conditions

if TYPE_CHECKING:
    from zerotrain.export.target import WeightsTarget

FUSED = "fused_layers"


def export(
    source: Source,
    folder: Path,
    weights: WeightsTarget | None,
    state: Path | None,
    *,
    position: TrainerState | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Publish weights, a state, or both, of any training, if all checks pass.

    Both are prepared before either appears. Every written tensor is checked: it has elements, all
    finite, and no second moment is negative. Written weights are compared bit by bit with the
    master weights in their type, and loaded once with the real library.

    Args:
        source: The training: a checkpoint, a state, or another program's checkpoint.
        folder: Folder of the source.
        weights: Where to publish the weights, if at all.
        state: Folder to publish the state at, if at all; always float32.
        position: Position of the state, if not that of the source.
        recipe: What the folders record of what a rule's stage makes them from.

    Raises:
        PipelineError: one folder is in another; or a tensor is missing, surplus, empty, of
            another shape, not finite, or reads back with other values. Nothing is published, and
            what was there stays.
    """
    targets = [path for path in (weights.folder if weights else None, state) if path is not None]
    check_no_loss(folder, targets)
    origins = find_parents(source, folder)
    at = source.position
    made_by = {"engine": at.engine, "run": at.run, "phase": at.phase, **RanOn.of(at).made_by()}
    with ExitStack() as drafts:
        # Weights are entered first, and appear last.
        if weights is not None:
            base = weights.base
            origins["base"] = artifact.read(base, "base") if artifact.is_described(base) else base
            parents, others = lineage(origins)
            averaged = weights.ema and EMA_SLOT in source.slots
            shown = AveragedWeights(source) if averaged else source
            if weights.lora and weights.lora.get(FUSED):
                shown = PerLayerView(shown)  # as all libraries read it
            made = {**made_by, "dtype": weights.dtype, **others}
            draft = drafts.enter_context(
                artifact.publish(
                    weights.folder, "weights", parents=parents, made_by=made, recipe=recipe
                )
            )
            draft.known.update(_link_other_parts(origins["base"], weights, draft.folder))
            header = _header(source.position, parents.get("base"), averaged)
            draft.known.update(_write_weights(shown, weights, draft.folder, header))
            if weights.family.modality == "text":
                draft.known.update(weights.family.name_ends(draft.folder))
            check = check_lora if weights.lora else check_peft if weights.peft else check_written
            check(shown, weights, draft.folder)
            trains = conditions.read_conditions(folder) if isinstance(source, Checkpoint) else None
            resolution = trains.trains.get("resolution") if trains else None
            draft.content = weights.content(at.step, averaged, resolution)
            text = text_of_readme(draft.folder, draft.content, made)
            write_text(draft.folder / README, text)
        if state is not None:
            parents, others = lineage(origins)
            draft = drafts.enter_context(
                artifact.publish(
                    state, STATE, parents=parents, made_by={**made_by, **others}, recipe=recipe
                )
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


def check_no_loss(source: Path, targets: list[Path]) -> None:
    """Check that no folder that is needed is inside a target, which publishing replaces whole.

    Raises:
        PipelineError: one is; the target and the folder are named.
    """
    for place, target in enumerate(targets):
        for needed in (source, *targets[:place], *targets[place + 1 :]):
            if needed.resolve().is_relative_to(target.resolve()):
                raise PipelineError(
                    f"{target} would be replaced whole, and {needed} is inside it",
                    hint="choose folders outside of each other",
                )


def export_universal(source: Source, folder: Path, output: Path) -> None:
    """Publish a training as DeepSpeed's universal checkpoint, which needs no base model.

    Raises:
        PipelineError: a tensor is empty or not finite, or there are no moments.
    """
    from zerotrain.state.external import write_universal

    parents, others = lineage(find_parents(source, folder))
    ran_on = RanOn.of(source.position).made_by()
    made_by = {"engine": source.position.engine, **ran_on, **others}
    with artifact.publish(output, "universal", parents=parents, made_by=made_by) as draft:
        write_universal(draft.folder, CheckedSource(source))
        draft.content = {"step": source.position.step}


def _header(position: TrainerState, base: Artifact | None, averaged: bool) -> dict[str, str]:
    """Return the known entries on the origin for headers of weights files."""
    header = {
        "zerotrain.run": position.run,
        "zerotrain.phase": position.phase,
        "zerotrain.step": str(position.step),
        "zerotrain.base": base.identity if base else "",
        "zerotrain.ema": "true" if averaged else "",
    }
    return {key: value for key, value in header.items() if value}


def _write_weights(
    source: Source, weights: WeightsTarget, folder: Path, metadata: Mapping[str, str]
) -> dict[str, str]:
    checked, dtype = CheckedSource(source), weights.torch_dtype

    def read(name: str) -> torch.Tensor:
        return checked.tensor(name, MASTER, dtype)

    if weights.adapter:
        from zerotrain.models.families import adapters

        adapter = {k: v for k, v in (weights.lora or weights.peft or {}).items() if k != FUSED}
        return adapters.save(
            weights.family,
            weights.base,
            source.shapes,
            read,
            adapter,
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
    """Put the base's untrained parts into the folder, so that it is a complete model.

    If an adapter was trained, they include the part that it belongs to. Files of this project are
    linked; of the user's files, the weights of a run share one copy.

    Returns:
        Their sha256 by name, if the base is published and lists it.
    """
    if isinstance(base, Artifact):
        known = {name: entry["sha256"] for name, entry in base.files.items()}
        files = {name: base.path(name) for name in known if is_model_file(name)}
    else:
        names = [path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()]
        chosen = choose_files(names, weights.family.spec, str(base))
        check_inside(base, chosen.values(), str(base))
        known, files = {}, {name: base / file for name, file in chosen.items()}
    part = weights.family.trained_part
    linked = [
        name
        for name in files
        if (weights.adapter or not in_part(name, part)) and not name.startswith(artifact.RECORDS)
    ]
    in_results = artifact.place_in_results(folder.with_name("weights")) is not None
    phases = sorted(folder.parent.parent.iterdir()) if in_results else []
    for name in linked:
        made_here = isinstance(base, Artifact) and not (base.folder / name).is_symlink()
        if made_here or artifact.is_own(files[name]):
            artifact.link_or_copy(files[name], folder / name)
        else:
            copies = [phase / "weights" / name for phase in phases]
            artifact.take_in(files[name], folder / name, known.get(name), copies)
    return {name: known[name] for name in linked if name in known}


def find_parents(source: Source, folder: Path) -> dict[str, Artifact | Path]:
    """Return a source's artifact by its kind, or the path of another program's folder."""
    if isinstance(source, Checkpoint | State):
        return {source.artifact.kind: source.artifact}
    return {"checkpoint": folder}


def lineage(
    origins: Mapping[str, Artifact | Path],
) -> tuple[dict[str, Artifact], dict[str, Any]]:
    """Return parents, and for folders without a manifest their path and digest of file sizes."""
    parents = {name: origin for name, origin in origins.items() if isinstance(origin, Artifact)}
    others = {
        name: {"path": str(origin), "files": artifact.sizes_digest(origin)}
        for name, origin in origins.items()
        if isinstance(origin, Path)
    }
    return parents, others


NEVER_NEGATIVE = (
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "sum",
    "exp_inf",
    "variance",
    "row_var",
    "col_var",
    "acc_delta",
)
DAMAGED = "the checkpoint is damaged; take an older one, or train on from it"
TOO_LARGE = "choose export.dtype fp32 or bf16: the weights exceed the range of fp16"


class CheckedSource:
    """A source that checks its tensors: they have elements, and are finite when they are read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.position, self.shapes = source.position, source.shapes
        self.names, self.slots = source.names, source.slots
        for name, shape in source.shapes.items():
            if torch.Size(shape).numel() == 0:
                raise PipelineError(f"{name}: empty tensor of shape {list(shape)}", hint=DAMAGED)

    def tensor(self, name: str, slot: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the tensor in float32, after checking that its values are finite in `dtype`."""
        tensor = self._source.tensor(name, slot)
        called = name if slot == MASTER else f"{name} ({slot})"
        ends = torch.stack(tensor.aminmax())  # both are NaN if any value is
        # Rounding keeps the order, so that all values are finite if the ends are.
        if not bool(ends.to(dtype).isfinite().all()):
            count = int((~tensor.to(dtype).isfinite()).sum())
            fits = bool(ends.isfinite().all())
            raise PipelineError(
                f"{called}: {count} values are not finite in {dtype}",
                hint=TOO_LARGE if fits else DAMAGED,
            )
        if slot in NEVER_NEGATIVE and ends[0] < 0:
            raise PipelineError(
                f"{called}: {int((tensor < 0).sum())} values are negative, a mean of squares",
                hint=DAMAGED,
            )
        return tensor


def check_written(source: Source, weights: WeightsTarget, folder: Path) -> None:
    """Compare the written files with the master weights, and with what the library loads.

    The library maps files that have the requested type, which needs no further memory.
    """
    with report_load_errors(weights.folder):
        written = open_tensors((folder / weights.family.trained_part).glob("*.safetensors"))
        loaded = stored_tensors(weights.family.load_model(folder, weights.torch_dtype))
        own = {name: name for name in source.shapes}
        _check_equal(source, weights, written, loaded, own, written.keys() | loaded.keys())


def check_lora(source: Source, weights: WeightsTarget, folder: Path) -> None:
    """Compare a written LoRA with the master weights and with what the library loads.

    File and library have slightly different names. The library has it in float32; it has to be
    equal after rounding to the file's type.
    """
    from zerotrain.models.families.lora import adapter_file

    file, prefix = adapter_file(weights.family.trained_part)
    expected = {plain_name(name): name for name in source.shapes}
    with report_load_errors(weights.folder):
        written = open_tensors([folder / file])
        model = _adapted_model(weights, folder).state_dict()
        loaded = {plain_name(n): tensor for n, tensor in model.items() if ".lora_" in n}
        if surplus := sorted(loaded.keys() - expected.keys()):
            raise _mismatch(weights, surplus[0])
        _check_equal(source, weights, written, loaded, expected, expected, prefix)


def check_peft(source: Source, weights: WeightsTarget, folder: Path) -> None:
    """Compare a written adapter of another method as `check_lora` does."""
    from zerotrain.models.families import adapters
    from zerotrain.models.families.lora import PEFT_ADAPTER

    expected = {adapters.plain(name): name for name in source.shapes}
    with report_load_errors(weights.folder):
        written = open_tensors([folder / adapters.FOLDER / PEFT_ADAPTER])
        loaded = adapters.tensors_of(_adapted_model(weights, folder))
        names = {name.removeprefix(PEFT_PREFIX) for name in written}
        names |= loaded.keys() | expected.keys()
        _check_equal(source, weights, written, loaded, expected, names, PEFT_PREFIX)


def _check_equal(
    source: Source,
    weights: WeightsTarget,
    written: Mapping[str, Any],
    loaded: Mapping[str, torch.Tensor],
    trained: Mapping[str, str],
    names: Iterable[str],
    prefix: str = "",
) -> None:
    """Compare the tensors of these names: in files, as loaded, and the trained ones' masters."""
    for name in sorted(names):
        if name in loaded and (in_file := prefix + name) in written:
            stored = written[in_file].get_tensor(in_file)
            if same_bits(stored, loaded[name]) and (
                name not in trained or same_bits(stored, source.tensor(trained[name], MASTER))
            ):
                continue
        raise _mismatch(weights, name)


def _adapted_model(weights: WeightsTarget, folder: Path) -> torch.nn.Module:
    """Return the trained part as built by its library, with the adapter, without base weights."""
    from zerotrain.config.families import ROOT
    from zerotrain.models.families import adapters

    model = without_memory(weights.family.empty_model(folder))
    if weights.lora and weights.family.trained_part == ROOT:
        return adapters.apply_peft(model, folder)
    return adapters.apply(model, folder)


def _mismatch(weights: WeightsTarget, name: str) -> PipelineError:
    return mismatch(f"{name} reads back with other values than were written", weights.folder)
