"""Adapters of any peft method: adding, writing and applying one. LoRA's own code is in lora.py.

They are written as a folder of peft, `adapter/`, next to the base: the root belongs to the base,
whose libraries would read another method's tensors as a LoRA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from zerotrain.artifact import file_sha256, write_json
from zerotrain.config.adapters import METHODS, PEFT_TYPE, Method, method_of
from zerotrain.errors import PipelineError
from zerotrain.models.adapter_config import PEFT_PREFIX
from zerotrain.models.families import load_family
from zerotrain.models.families.lora import (
    ADAPTER,
    LAYERS,
    LINEAR,
    PEFT_ADAPTER,
    PEFT_CONFIG,
    add_adapter,
    check_shapes,
    choose_targets,
    save_adapter,
)
from zerotrain.models.families.model_tensors import without_memory
from zerotrain.models.pretrained import check_adapter, check_lora_file, loading

if TYPE_CHECKING:
    from zerotrain.models.families import Family

FOLDER = "adapter"
"""Folder of an adapter other than a LoRA, in a weights folder."""
DENOISERS = ("unet", "transformer")
"""Parts that can carry an adapter."""
NAME = re.compile(r"\.default(?=\.|$)")
"""peft's default name of an adapter, in the names of its parameters."""


def add(model: torch.nn.Module, adapter: Mapping[str, Any], seed: int) -> torch.nn.Module:
    """Add an adapter and freeze everything else: only its float32 parameters require gradients.

    Their values depend only on the seed, and no global generator is changed.

    Args:
        model: A model of diffusers or transformers, on CPU or meta.
        adapter: The section `lora` or `peft`, from RunConfig.adapter_values.
        seed: Decides the initial values.

    Raises:
        PipelineError: a target names no layer, or peft cannot adapt it like this.
    """
    method = method_of(adapter)
    if method is None:
        add_adapter(model, seed=seed, **adapter)
        return model
    with _of_peft(adapter), torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the generators of GPUs as well.
        torch.default_generator.manual_seed(seed)
        _add_method(model, method, adapter)
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft gives it the dtype of its layer
            parameter.data = parameter.data.float()
    return model


def _add_method(model: torch.nn.Module, method: Method, adapter: Mapping[str, Any]) -> None:
    from peft import get_peft_config

    settings = {**method.settings, **adapter}
    kinds = LAYERS if method.changes == "any" else LINEAR
    settings["target_modules"] = choose_targets(model, adapter.get("target_modules"), kinds, "peft")
    model.add_adapter(get_peft_config(settings))  # type: ignore[operator]


def count(family: str, base: Path, adapter: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of elements of each parameter of a base's adapter."""
    model = add(load_family(family).empty_model(base), adapter, seed=0)
    return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}


def save(
    family: Family,
    base: Path,
    shapes: Mapping[str, list[int]],
    read: Callable[[str], torch.Tensor],
    adapter: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    out: Path,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write a trained adapter: a LoRA as `save_adapter` does, another into `out`/adapter for peft.

    Args:
        family: The model's family.
        base: Folder of the base model.
        shapes: Shape of each trained parameter, under the names that `add` gives.
        read: Returns the values of a parameter.
        adapter: As given to `add`.
        dtype: Type of the written tensors.
        out: The weights folder.
        metadata: Further entries of the file's header.

    Returns:
        sha256 of each written file, by its name relative to `out`.

    Raises:
        PipelineError: there is no tensor, nothing was trained, or a name or shape is not one of
            this adapter's.
    """
    if method_of(adapter) is None:
        return save_adapter(
            family, base, shapes, read, adapter, dtype=dtype, out=out, metadata=metadata
        )
    from peft import get_peft_model_state_dict

    title = METHODS[adapter[PEFT_TYPE]].title
    if not shapes:
        raise PipelineError(
            f"the adapter ({title}) is empty: the training has no tensors",
            hint="export a checkpoint of a run whose configuration has the section `peft`",
        )
    model = add(without_memory(family.empty_model(base)), adapter, seed=0)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    check_shapes({name: list(p.shape) for name, p in parameters.items()}, shapes, "peft")
    other = add(without_memory(family.empty_model(base)), adapter, seed=1)
    drawn = dict(other.named_parameters())
    # Parameters that are equal for every seed are why a method starts without an effect.
    still = {n for n, p in parameters.items() if torch.equal(p, drawn[n])}
    values = {name: read(name).detach().to("cpu") for name in parameters}
    if still and all(torch.equal(values[n].float(), parameters[n]) for n in still):
        raise PipelineError(
            f"the adapter ({title}) does nothing: {min(still)} and the like are as they began",
            hint="train it for a step at least, with a learning rate above 0",
        )
    for name, parameter in parameters.items():
        parameter.data = values[name].float()
    model.eval()
    found = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in get_peft_model_state_dict(model).items()
    }
    if not all(bool(tensor.isfinite().all()) for tensor in found.values()) or not any(
        bool(tensor.any()) for tensor in found.values()
    ):
        raise PipelineError(
            f"the adapter ({title}) has no value left in {dtype}, or some that are not finite",
            hint="choose export.dtype fp32 or bf16",
        )
    known: Any = model.peft_config
    config = known["default"].to_dict()
    # The order of a set is random, and the base's path is one of this machine.
    config |= {key: sorted(v) for key, v in config.items() if isinstance(v, set)}
    config |= {"inference_mode": True, "base_model_name_or_path": None}
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PEFT_CONFIG, config)
    named = {PEFT_PREFIX + name: tensor for name, tensor in found.items()}
    save_file(named, folder / PEFT_ADAPTER, metadata={"format": "pt", **(metadata or {})})
    names = (f"{FOLDER}/{PEFT_CONFIG}", f"{FOLDER}/{PEFT_ADAPTER}")
    return {name: file_sha256(out / name) for name in names}


def apply(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Apply a weights folder's adapter to its model, if it has one.

    A denoiser's LoRA is applied as well; transformers has already applied that of a language model.
    Any other adapter puts the model into eval mode.
    """
    with loading(str(folder)):
        if (folder / ADAPTER).is_file():
            check_lora_file(model, folder / ADAPTER)
            # The pipeline's load_lora_weights warns about text encoders without an adapter.
            model.load_lora_adapter(  # type: ignore[operator]
                str(folder), prefix=_trained_part(folder), weight_name=ADAPTER
            )
        if (folder / FOLDER / PEFT_CONFIG).is_file():
            return apply_peft(model, folder / FOLDER)
    return model


def apply_peft(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Apply the adapter of a peft folder, in place; set eval mode."""
    from peft import (
        PeftConfig,
        inject_adapter_in_model,
        load_peft_weights,
        set_peft_model_state_dict,
    )

    check_adapter(model, folder)
    with loading(str(folder)):
        config = PeftConfig.from_pretrained(str(folder))
    inject_adapter_in_model(config, model)
    state = load_peft_weights(str(folder), device="cpu")
    set_peft_model_state_dict(model, {n.removeprefix(PEFT_PREFIX): t for n, t in state.items()})
    return model.eval()


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's adapter by their names in its file, without the prefix."""
    from peft import get_peft_model_state_dict

    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model)
    return found


def plain(name: str) -> str:
    """Return a trained parameter's name in the adapter's file."""
    return NAME.sub("", name)


@contextmanager
def _of_peft(adapter: Mapping[str, Any]) -> Iterator[None]:
    """Turn peft's errors into PipelineError: it checks values when it adapts layers."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, AssertionError, AttributeError) as error:
        raise PipelineError(
            f"peft: {METHODS[adapter[PEFT_TYPE]].title} cannot adapt this model so: "
            f"{' '.join(str(error).split())}",
            hint="change the value that it names, or the layers in peft.target_modules",
        ) from error


def _trained_part(folder: Path) -> str:
    return next(part for part in DENOISERS if (folder / part / "config.json").is_file())
