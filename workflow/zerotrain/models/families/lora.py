"""Low-rank adapters (LoRA) of a model: adding one to train, and writing it for its library.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021),
https://arxiv.org/abs/2106.09685. peft does the work; it is imported where it is used, since the
import takes seconds and training without an adapter does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.pytorch_utils import Conv1D

from zerotrain.artifact import file_sha256, write_json
from zerotrain.artifact.tensor_file import write_tensor_file
from zerotrain.config.adapters import ALL_LINEAR, ATTENTION, Targets, is_target, stack_of
from zerotrain.config.families import ROOT
from zerotrain.config.suggestions import nearest
from zerotrain.config.trained_part import matches
from zerotrain.errors import PipelineError
from zerotrain.models.adapter_config import ADAPTER_CONFIG, METADATA, PEFT_PREFIX

if TYPE_CHECKING:
    from zerotrain.models.families import Family

ADAPTER = "pytorch_lora_weights.safetensors"
"""The file that diffusers' load_lora_weights looks for in a folder."""
PEFT_ADAPTER, PEFT_CONFIG = "adapter_model.safetensors", ADAPTER_CONFIG
"""The files that peft and transformers look for."""
TASKS = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}
"""peft's names of the classes of language models."""
INITIAL: dict[str, bool | str] = {"default": True}
"""peft's values of init_lora_weights that have another name here."""
LINEAR: tuple[type, ...] = (torch.nn.Linear, Conv1D)
"""Conv1D is GPT-2's name for a linear layer."""
ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Of a product, relative to its factors' norms; with `orthogonal` it starts at 1e-7."""
LAYERS: tuple[type, ...] = (*LINEAR, torch.nn.Conv2d)
KINDS = {LAYERS: "linear or convolution layer", LINEAR: "linear layer"}
"""Their names in messages."""


def add_adapter(
    model: torch.nn.Module,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    target_modules: Targets,
    seed: int,
    use_rslora: bool = False,
    use_dora: bool = False,
    init_lora_weights: str = "default",
    fused_layers: bool = False,
) -> list[str]:
    """Add a LoRA adapter to a model of diffusers or transformers and freeze everything else.

    Only the adapter's parameters then require gradients: in float32, for a linear layer
    `<layer>.lora_A.default.weight` [rank, in] and `<layer>.lora_B.default.weight` [out, rank].
    Their values depend only on `seed`, and no global generator is changed; lora_B is zero, or with
    `orthogonal` its product with lora_A, so that the model's output is still the base's.

    Args:
        model: The model, on CPU or meta.
        rank: Rank of the two factors.
        alpha: The adapter's effect is scaled by alpha / rank.
        dropout: Probability of dropout before the first factor, in train mode only.
        target_modules: See zerotrain.config.adapters; ends of names at whole components.
        seed: Decides the initial values.
        use_rslora: Scaled by alpha / sqrt(rank): Kalajdzievski, "A Rank Stabilization Scaling
            Factor for Fine-Tuning with LoRA" (2023), https://arxiv.org/abs/2312.03732.
        use_dora: With `<layer>.lora_magnitude_vector.default.weight` [out]: Liu et al., "DoRA:
            Weight-Decomposed Low-Rank Adaptation" (2024), https://arxiv.org/abs/2402.09353.
        init_lora_weights: default, gaussian or orthogonal, as in peft.
        fused_layers: Whether layers of one stack (zerotrain.config.adapters) share lora_A, so
            that their adapter is that of the stack as one layer. The parameter has the name of the
            first layer, and occurs once in model.named_parameters().

    Returns:
        The names of the target modules, or the ends of their names.

    Raises:
        PipelineError: a target names no layer, or a module that is neither linear nor convolution.
    """
    from peft import LoraConfig

    targets = choose_targets(model, target_modules)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        use_rslora=use_rslora,
        use_dora=use_dora,
        init_lora_weights=INITIAL.get(init_lora_weights, init_lora_weights),
    )
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the generators of GPUs as well.
        torch.default_generator.manual_seed(seed)
        model.add_adapter(config)  # type: ignore[operator]
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft gives it the dtype of its layer
            parameter.data = parameter.data.float()
    if fused_layers:
        _share_first_factors(model)
    return targets


def _share_first_factors(model: torch.nn.Module) -> None:
    """Make the layers of each stack share one lora_A.

    The parameter is shared, not its module: ZeRO-3 would add its hooks to a module once for each
    place where it is used.
    """
    first: dict[str, torch.nn.Parameter] = {}
    for name, module in model.named_modules():
        if isinstance(factors := getattr(module, "lora_A", None), torch.nn.ModuleDict) and factors:
            own: Any = next(iter(factors.values()))
            own.weight = first.setdefault(stack_of(name), own.weight)


def adapter_file(part: str) -> tuple[str, str]:
    """Return the file of an adapter to this part, and the prefix of tensor names in it."""
    return (PEFT_ADAPTER, PEFT_PREFIX) if part == ROOT else (ADAPTER, f"{part}.")


def save_adapter(
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
    """Write a trained LoRA into `out` in the format of its library; see adapters.save.

    For a denoiser, this is pytorch_lora_weights.safetensors for a pipeline's load_lora_weights; the
    header has rank and alpha, which would otherwise default to the rank. It has no dropout:
    diffusers adds the adapter in train mode, and dropout would be active while images are sampled.
    For a language model, it is peft's two files, which transformers and peft load. Equal arguments
    give equal bytes.

    Returns:
        sha256 of each written file, by its name relative to `out`.

    Raises:
        PipelineError: there is no tensor, nothing was trained (each lora_B @ lora_A is zero), or a
            name or shape is not one of this adapter's; the message names the tensor.
    """
    from peft import LoraConfig, get_peft_model_state_dict

    if not shapes:
        raise PipelineError(
            "the adapter is empty: the training has no tensors",
            hint="export a checkpoint of a run whose configuration has the section `lora`",
        )
    part = family.trained_part
    model = family.empty_model(base)
    targets = add_adapter(model, seed=0, **adapter)
    expected = {n: list(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    check_shapes(expected, shapes)
    trained = {name: read(name).detach().cpu() for name in expected}
    check_shapes(expected, {name: list(tensor.shape) for name, tensor in trained.items()})
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in trained.items()}
    seconds = [name for name in expected if ".lora_B." in name]
    # Rounded, the factors of `orthogonal` have a product before any training.
    if not any(bool(tensors[name].any()) and _has_product(trained, name) for name in seconds):
        raise PipelineError(
            f"the adapter does nothing: the product of {seconds[0]} and its first factor, and all "
            f"others, are zero in {dtype}",
            hint="train it for a step at least, with a learning rate above 0; "
            "tiny values need export.dtype fp32 or bf16",
        )
    # These are peft's names: convert_state_dict_to_diffusers renames only those of attention, and
    # load_lora_weights silently skips layers of such a mixture.
    plain = get_peft_model_state_dict(model, state_dict=tensors)
    out.mkdir(parents=True, exist_ok=True)
    settings = {"r": adapter["rank"], "lora_alpha": adapter["alpha"]}
    settings["target_modules"] = sorted(targets)
    # Only if they differ from peft's defaults: older versions of diffusers know neither.
    settings |= {key: True for key in ("use_rslora", "use_dora") if adapter.get(key)}
    file, prefix = adapter_file(part)
    known, header = {}, dict(metadata or {})
    if part == ROOT:
        task = TASKS[family.spec.classes[ROOT]]
        own = LoraConfig(
            **settings, lora_dropout=adapter["dropout"], task_type=task, inference_mode=True
        )
        write_json(out / PEFT_CONFIG, {**own.to_dict(), **settings})
        known = {PEFT_CONFIG: file_sha256(out / PEFT_CONFIG)}
    else:
        named = {f"{part}.{key}": value for key, value in settings.items()}
        header |= {METADATA: json.dumps(named, sort_keys=True)}
    layout = {prefix + name: (dtype, plain[name].shape) for name in sorted(plain)}
    sha256 = write_tensor_file(
        out / file, layout, lambda name: plain[name.removeprefix(prefix)], header
    )
    return known | {file: sha256}


def choose_targets(
    model: torch.nn.Module,
    asked: Targets,
    kinds: tuple[type, ...] = LAYERS,
    section: str = "lora",
) -> list[str]:
    """Choose the layers that get an adapter, by name or by the ends of their names.

    Args:
        model: The model.
        asked: See zerotrain.config.adapters; other text is a regular expression of names.
        kinds: Classes of the layers that the method can adapt.
        section: Section of the configuration, for messages.

    Raises:
        PipelineError: a target names no such layer.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
    if asked == ALL_LINEAR:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        linear = (n for n, m in layers.items() if isinstance(m, LINEAR) and m is not head)
        return sorted(linear)
    if asked is None:
        asked = [end for end in ATTENTION if any(is_target(name, [end]) for name in layers)]
        if not asked:
            raise PipelineError(
                f"{section}: no layer of {type(model).__name__} is named like an attention's "
                "projection",
                hint=f"name layers in {section}.target_modules, or set it to all-linear",
            )
    if isinstance(asked, str):
        found = [name for name in layers if matches(asked, name, whole=True)]
        if not found:
            raise PipelineError(
                f"{section}.target_modules: {asked!r} is the whole name of no layer of "
                f"{type(model).__name__}",
                hint=f"names look like {', '.join(list(layers)[:3])}; or give a list of their ends",
            )
        return found
    for target in asked:
        _check_target(model, target, kinds, section)
    return list(asked)


def _check_target(
    model: torch.nn.Module, target: str, kinds: tuple[type, ...], section: str
) -> None:
    modules = dict(model.named_modules())
    named = [module for name, module in modules.items() if is_target(name, [target])]
    if named and all(isinstance(module, kinds) for module in named):
        return
    ends = sorted({_end(name) for name, module in modules.items() if isinstance(module, kinds)})
    others = [type(module).__name__ for module in named if not isinstance(module, kinds)]
    kind, what = type(model).__name__, KINDS.get(kinds, "layer that this method can adapt")
    raise PipelineError(
        f"{section}.target_modules: {target!r} names {others[0]} in {kind}, no {what}"
        if others
        else f"{section}.target_modules: no layer of {kind} has a name that ends in {target!r}",
        hint="near names: " + ", ".join(nearest(target, ends, most=4, cutoff=0.4) or ends),
    )


def _end(name: str) -> str:
    """Return the last component of a name that is a word, with the numbers after it: `to_out.0`."""
    components = name.split(".")
    start = len(components) - 1
    while start and components[start].isdigit():
        start -= 1
    return ".".join(components[start:])


def check_shapes(
    expected: Mapping[str, list[int]], found: Mapping[str, list[int]], section: str = "lora"
) -> None:
    """Check a trained adapter's shapes against those from the section of the configuration.

    Raises:
        PipelineError: a tensor is missing, surplus or of another shape; the first is named.
    """
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            values = "lora.rank and lora.target_modules" if section == "lora" else "values"
            raise PipelineError(
                f"{name}: {found.get(name, 'absent')} in the trained adapter, "
                f"{expected.get(name, 'absent')} by the base model and the section `{section}`",
                hint=f"export with the base and the {values} of the training",
            )


def _has_product(tensors: Mapping[str, torch.Tensor], second: str) -> bool:
    """Return whether the product of a layer's two float32 factors is more than rounding."""
    b = tensors[second].flatten(1).double()
    a = tensors[second.replace(".lora_B.", ".lora_A.")].flatten(1).double()
    # Squared norms. B @ A is as large as the layer; this only needs matrices of rank x rank.
    product = ((a @ a.T) * (b.T @ b)).sum()
    return bool(product > ROUNDING**2 * a.square().sum() * b.square().sum())
