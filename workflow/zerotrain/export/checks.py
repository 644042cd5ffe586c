"""Checks of an export: each tensor when it is read, and the files after they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from zerotrain.artifact.tensor_file import open_tensors, same_bits
from zerotrain.errors import PipelineError
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
DISK = "look at the disk and its room; nothing was published"
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
    files = (folder / weights.family.trained_part).glob("*.safetensors")
    with _report_load_errors(weights):
        written = open_tensors(files)
        loaded = stored_tensors(weights.family.load_model(folder, weights.torch_dtype))

        def is_equal(name: str) -> bool:
            if name not in loaded or name not in written:
                return False
            stored = written[name].get_tensor(name)
            trained = name in source.shapes
            return same_bits(stored, loaded[name]) and (
                not trained or same_bits(stored, source.tensor(name, MASTER))
            )

        bad = next((n for n in sorted(written.keys() | loaded.keys()) if not is_equal(n)), None)
    if bad:
        raise _mismatch(weights, bad)


def check_lora(source: Source, weights: WeightsTarget, folder: Path) -> None:
    """Compare a written LoRA with the master weights and with what the library loads.

    File and library have slightly different names."""
    from zerotrain.models.families.lora import adapter_file

    file, prefix = adapter_file(weights.family.trained_part)
    expected = {_without_adapter_name(name): name for name in source.shapes}
    with _report_load_errors(weights):
        written = open_tensors([folder / file])
        model = _adapted_model(weights, folder).state_dict()
        # The library has it in float32; it has to be equal after rounding to the file's type.
        loaded = {
            _without_adapter_name(name): tensor
            for name, tensor in model.items()
            if ".lora_" in name
        }

        def is_equal(name: str) -> bool:
            in_file = prefix + name
            if name not in expected or name not in loaded or in_file not in written:
                return False
            stored = written[in_file].get_tensor(in_file)
            master = source.tensor(expected[name], MASTER)
            return same_bits(stored, loaded[name]) and same_bits(stored, master)

        bad = next((n for n in sorted(expected.keys() | loaded.keys()) if not is_equal(n)), None)
    if bad:
        raise _mismatch(weights, bad)


def check_peft(source: Source, weights: WeightsTarget, folder: Path) -> None:
    """Compare a written adapter of another method as `check_lora` does.

    For a trained prompt, the file has the resulting embeddings, not the parameters."""
    from zerotrain.models.families import adapters
    from zerotrain.models.families.lora import PEFT_ADAPTER, PEFT_PREFIX

    expected = {adapters.plain(name): name for name in source.shapes}
    with _report_load_errors(weights):
        files = open_tensors([folder / adapters.FOLDER / PEFT_ADAPTER])
        written = {n.removeprefix(PEFT_PREFIX): files[n].get_tensor(n) for n in files}
        loaded = adapters.tensors_of(_adapted_model(weights, folder))

        def is_equal(name: str) -> bool:
            if name not in loaded or name not in written:
                return False
            trained = expected.get(name)
            return same_bits(written[name], loaded[name]) and (
                trained is None or same_bits(written[name], source.tensor(trained, MASTER))
            )

        prompt = written.keys() == {adapters.PROMPT}
        names = written.keys() | loaded.keys() | (set() if prompt else expected.keys())
        bad = next((name for name in sorted(names) if not is_equal(name)), None)
    if bad:
        raise _mismatch(weights, bad)


@contextmanager
def _report_load_errors(weights: WeightsTarget) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise PipelineError(f"{weights.folder}: does not load again: {error}", hint=DISK) from error


def _adapted_model(weights: WeightsTarget, folder: Path) -> torch.nn.Module:
    """Return the trained part as built by its library, with the adapter, without base weights."""
    from zerotrain.config.families import ROOT
    from zerotrain.models.families import adapters

    model = without_memory(weights.family.empty_model(folder))
    if weights.lora and weights.family.trained_part == ROOT:
        return adapters.apply_peft(model, folder)
    return adapters.apply(model, folder)


def _without_adapter_name(name: str) -> str:
    """Return a tensor's name without the adapter's name, "default" or "default_0"."""
    plain = re.sub(r"(\.lora_\w+)\.[^.]+\.", r"\1.", name)
    return plain.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def _mismatch(weights: WeightsTarget, name: str) -> PipelineError:
    what = f"{weights.folder}: {name} reads back with other values than were written"
    return PipelineError(what, hint=DISK)
