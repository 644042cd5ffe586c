"""LoRAs whose layers have ranks and alphas of their own, as one of a single rank and alpha.

A run trains one rank, and scales all layers by one alpha. Each layer of a file keeps its effect,
scale * B @ A: its second factor is multiplied by the quotient of the file's scale and the run's,
and a layer of a smaller rank gets initial values in its first factor and zeros in its second one,
which add nothing until they are trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.models.adapter_config import PEFT_PREFIX, check_patterns
from zerotrain.state.external.checkpoint import ExternalCheckpoint
from zerotrain.state.position import MASTER

SCALES = "scales"
"""Key of the layers' scales in the settings of an adapter."""
FIRST, SECOND = (".lora_A.", ".lora_down."), (".lora_B.", ".lora_up.")
"""The factors in names of a model in training, and of kohya's files."""


def layer_of(name: str) -> str:
    """Return the layer of a tensor of a LoRA."""
    return name.partition(".lora_")[0]


def read_layers(
    ranks: Mapping[str, int], alphas: Mapping[str, float], settings: dict[str, Any], where: Path
) -> dict[str, Any]:
    """Return a LoRA's settings, with a scale for each layer if one rank and alpha are not of all.

    Args:
        ranks: The rank of each layer, by its name in the file.
        alphas: The alphas in tensors of the file.
        settings: Its settings by peft's names, if it has any.
        where: Their file, for messages.

    Raises:
        PipelineError: a pattern of the settings is no regular expression.
    """
    patterns = {key: settings.pop(key, None) or {} for key in ("rank_pattern", "alpha_pattern")}
    check_patterns(patterns, where, map(_inner, ranks))
    alpha_of = {
        layer: alphas.get(layer, _match(patterns["alpha_pattern"], layer, settings))
        for layer in ranks
    }
    if len({*ranks.values()}) <= 1 and len({*alpha_of.values()}) <= 1:
        alpha = next(iter(alpha_of.values()), settings.get("lora_alpha"))
        if any(patterns.values()):
            settings["r"] = next(iter(ranks.values()))
        return settings if alpha is None else settings | {"lora_alpha": alpha}
    # Without an alpha the factors are applied as they are.
    roots = {layer: math.sqrt(rank) for layer, rank in ranks.items()}
    divisors = roots if settings.pop("use_rslora", False) else ranks
    scales = {
        layer: 1.0 if (alpha := alpha_of[layer]) is None else alpha / divisors[layer]
        for layer in ranks
    }
    kept = {key: value for key, value in settings.items() if key not in ("r", "lora_alpha")}
    return kept | {SCALES: scales}


def to_one_rank(
    source: ExternalCheckpoint, run: Mapping[str, Any], seed: int
) -> tuple[ExternalCheckpoint, str]:
    """Bring the layers of a LoRA to the rank and the scale of a run.

    Args:
        source: The file's tensors, whose adapter has SCALES.
        run: The run's values, by peft's names.
        seed: Decides the initial values of additional ranks.

    Returns:
        The tensors, and a sentence on what was done.

    Raises:
        PipelineError: a layer has a larger rank than the run.
    """
    assert source.adapter is not None
    scales, rank = source.adapter[SCALES], int(run["r"])
    own = {layer_of(name): shape[0] for name, shape in source.shapes.items() if _is(name, FIRST)}
    ranks = _describe(own)
    if max(own.values()) > rank:
        raise PipelineError(
            f"{source.folder}: its layers have the ranks {ranks}; this run trains rank {rank}",
            hint=f"set lora.rank: {max(own.values())}; each layer keeps its own scale, whatever "
            "lora.alpha is",
        )
    scale = run["lora_alpha"] / (math.sqrt(rank) if run.get("use_rslora") else rank)

    def pieces(name: str, slot: str) -> Iterable[torch.Tensor]:
        whole = source.tensor(name, MASTER)
        missing = rank - own[layer_of(name)]
        if _is(name, FIRST) and missing:
            return (torch.cat([whole, _initial(missing, whole.shape[1:], seed)]),)
        if _is(name, SECOND):
            zeros = torch.zeros(len(whole), missing, *whole.shape[2:])
            return (torch.cat([whole * (scales[layer_of(name)] / scale), zeros], dim=1),)
        return (whole,)

    def shape(name: str) -> list[int]:
        found = list(source.shapes[name])
        if _is(name, FIRST):
            found[0] = rank
        elif _is(name, SECOND):
            found[1] = rank
        return found

    optimizer = source.numbered.optimizer.state if source.numbered else {}
    lost = list(source.lost)
    if source.slots != [MASTER] or optimizer:
        lost.append("the optimizer's moments: they are of the factors before they were rescaled")
    made = replace(
        source,
        position=replace(source.position, optimizer="", optimizer_step=0, param_groups=[]),
        shapes={name: shape(name) for name in source.shapes},
        slots=[MASTER],
        pieces=pieces,
        lost=lost,
        numbered=None,
    )
    return made, (
        f"its layers have the ranks {ranks} and scales {min(scales.values()):g} to "
        f"{max(scales.values()):g}: each keeps its effect at rank {rank} and scale {scale:g}"
    )


def _is(name: str, factors: tuple[str, ...]) -> bool:
    return any(factor in name for factor in factors)


def _inner(layer: str) -> str:
    """Return a layer's name in the model that peft adapts."""
    return layer.removeprefix(PEFT_PREFIX)


def _match(pattern: Mapping[str, float], layer: str, settings: Mapping[str, Any]) -> Any:
    """Return the alpha of a layer as peft does: that of the first key that ends its name."""
    inner = _inner(layer)
    names = (inner, inner.partition(".")[2])  # diffusers' names begin with the part
    for key, value in pattern.items():
        if any(re.match(rf"(.*\.)?({key})$", name) for name in names):
            return value
    return settings.get("lora_alpha")


def _describe(ranks: Mapping[str, int]) -> str:
    """Describe ranks with a layer of each, as `4 (a and 2 more) and 8 (b)`."""
    parts = []
    for rank in sorted({*ranks.values()}):
        first, *more = [layer for layer, one in ranks.items() if one == rank]
        parts.append(f"{rank} ({first}{f' and {len(more)} more' if more else ''})")
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _initial(rows: int, width: torch.Size, seed: int) -> torch.Tensor:
    """Draw rows of a first factor as peft does; equal for layers of one width, which may share."""
    source = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(math.prod(width))
    return torch.empty(rows, *width).uniform_(-bound, bound, generator=source)
