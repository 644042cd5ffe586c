"""Checks of an export: each tensor when it is read, and the files after they are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.artifact.tensor_file import open_tensors, same_bits
from zerotrain.errors import PipelineError
from zerotrain.export.formats.tensors import mismatch, report_load_errors
from zerotrain.export.formats.weights import plain_name
from zerotrain.models.adapter_config import PEFT_PREFIX
from zerotrain.models.families.model_tensors import stored_tensors, without_memory
from zerotrain.state.position import MASTER, Source

if TYPE_CHECKING:
    from zerotrain.export.target import WeightsTarget

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
