"""Files of adapters: peft's and diffusers' folders, and kohya's files, under our parameters' names.

peft writes `<prefix><layer>.lora_A.weight`, where a model in training has
`<layer>.lora_A.default.weight`; older diffusers have `lora.down` and `lora.up`. kohya names layers
of the original model, with underscores, and keeps alpha beside them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.foreign.checkpoint import ForeignCheckpoint
from zerotrain.foreign.consistency import read_number
from zerotrain.position import MASTER

STEMS = ("adapter_model", "pytorch_lora_weights")
KOHYA = "lora_unet_"
FACTORS = {"lora_A": "lora_down", "lora_B": "lora_up"}
OLDER = {"lora.down": "lora_A", "lora.up": "lora_B", "lora_down": "lora_A", "lora_up": "lora_B"}
TEXT_ENCODER = re.compile(r"text_encoder\w*\.|lora_te\w*_")
OF_ADAPTER = re.compile(
    r"\.(lora|hada|lokr|ia3|oft|boft|vera|shira|hra|gralora)_|\.lora\.|\.alpha$"
)
OTHER_LAYERS = "lora.target_modules has to name the layers of the file"
SETTINGS = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")
"""What changes an adapter's effect while its tensors stay."""
PATTERNS = ("rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication")
"""What gives single layers values of their own, which no section of ours can."""


class Renamed(Mapping[str, torch.Tensor]):
    """Tensors under other names, each read or made when it is asked for."""

    def __init__(self, read: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def is_adapter(names: Sequence[str]) -> bool:
    """Whether a file's tensors are an adapter's alone, without its base."""
    return bool(names) and all(OF_ADAPTER.search(name) or name.startswith(KOHYA) for name in names)


def open_adapter(
    weights: Mapping[str, torch.Tensor], path: Path, header: Mapping[str, str]
) -> tuple[Mapping[str, torch.Tensor], dict[str, Any], list[str]]:
    """The tensors of an adapter with the names of a model in training.

    Args:
        weights: The tensors of its file; those of kohya keep their names.
        path: The file.
        header: The file's metadata.

    Returns:
        The tensors, the adapter's settings, and sentences on what is left out.

    Raises:
        PipelineError: as read_settings; or an alpha is no number.
    """
    alphas: dict[str, float] = {}
    read: dict[str, Callable[[], torch.Tensor]] = {}
    left: set[str] = set()
    for name in weights:
        if TEXT_ENCODER.match(name):
            left.add("an adapter of a text encoder: the denoiser's is read")
        elif name.endswith(".alpha"):
            alphas[name] = read_number(weights[name], path, name)
        else:
            own = name if name.startswith(KOHYA) else _in_training(name)
            read[own] = partial(weights.__getitem__, name)
    settings = read_settings(path, header, alphas)
    if "lora_alpha" not in settings and settings.get("peft_type", "LORA") == "LORA":
        left.add(f"the adapter's alpha: {path.name} does not say it, and this run's is taken")
    return Renamed(read), settings, sorted(left)


def _in_training(name: str) -> str:
    for older, newer in OLDER.items():
        name = re.sub(rf"\.{re.escape(older)}\.", f".{newer}.", name)
    if name.endswith(".lora_magnitude_vector"):  # DoRA's, of which peft cuts the end off
        name += ".weight"
    if ".default" in name:
        return name
    return re.sub(r"(\.[a-z]+\d?_\w+?)(\.weight)?$", r"\1.default\2", name)


def read_settings(
    file: Path, header: Mapping[str, str], alphas: Mapping[str, float]
) -> dict[str, Any]:
    """What a folder or a file says of its adapter: peft's names and values.

    Args:
        file: The file of tensors, next to adapter_config.json, if it is peft's.
        header: The metadata of the file of tensors.
        alphas: The `.alpha` of each layer in a file of kohya's.

    Raises:
        PipelineError: adapter_config.json is no JSON, or layers have alphas of their own.
    """
    from zerotrain.families.lora import METADATA, PEFT_CONFIG  # takes seconds

    path = file.with_name(PEFT_CONFIG)
    where = path if path.is_file() and file.stem == STEMS[0] else file
    found: dict[str, Any] = {}
    try:
        if where == path:
            found = json.loads(path.read_bytes())
        elif METADATA in header:
            found = json.loads(header[METADATA])
        if not isinstance(found, dict):
            raise ValueError("it holds no keys")
    except (ValueError, RecursionError) as error:
        raise PipelineError(
            f"{where}: no configuration of an adapter ({error})",
            hint="copy the checkpoint again, or use an older one",
        ) from error
    # A header has keys of several models, as unet.r and text_encoder.r.
    found = {k.rpartition(".")[2]: v for k, v in found.items() if not TEXT_ENCODER.match(k)}
    if own := [key for key in PATTERNS if found.get(key)]:
        raise PipelineError(
            f"{where}: {own[0]} {found[own[0]]!r} gives single layers values of their own",
            hint="such an adapter is not read; merge it into its base, and train from that",
        )
    if len(set(alphas.values())) > 1:
        raise PipelineError(
            f"{file}: its layers have several alphas, {min(alphas.values()):g} to "
            f"{max(alphas.values()):g}, and lora.alpha is one for all",
            hint="such an adapter is not read; merge it into its base, and train from that",
        )
    if alphas:
        found["lora_alpha"] = next(iter(alphas.values()))
    return {key: found[key] for key in SETTINGS if key in found}


def check_settings(found: Mapping[str, Any], run: Mapping[str, Any], where: Path) -> None:
    """Refuse an adapter that would have another effect under the run's section.

    Args:
        found: As read_settings gives it.
        run: The run's values, by peft's names.
        where: For messages.

    Raises:
        PipelineError: naming the first value that differs.
    """
    for key, value in found.items():
        if key in run and run[key] != value:
            raise PipelineError(
                f"{where}: its adapter has {key} {value}, this run {run[key]}: the same tensors "
                "would have another effect",
                hint="write its value into the section `lora` (r is rank, lora_alpha is alpha), or "
                "into `peft`",
            )


def run_settings(adapter: Mapping[str, Any] | None, is_peft: bool) -> dict[str, Any]:
    """The values of RunConfig.adapter_values by peft's names."""
    if is_peft or not adapter:
        return dict(adapter or {})
    named = {"r": adapter["rank"], "lora_alpha": adapter["alpha"], "peft_type": "LORA"}
    return named | {key: bool(adapter.get(key)) for key in ("use_rslora", "use_dora")}


def is_kohya(names: Sequence[str]) -> bool:
    """Whether the names are kohya's."""
    return any(name.startswith(KOHYA) for name in names)


def from_kohya(
    source: ForeignCheckpoint,
    trained: Mapping[str, list[int]],
    places: Mapping[str, tuple[str, ...]],
) -> ForeignCheckpoint:
    """A file of kohya's under our parameters' names.

    Args:
        source: The file's tensors, under their own names.
        trained: Shapes of our adapter's parameters.
        places: Our layers by the original's name of each, as layers_by_place gives them; of one
            that is several here, lora_up has the rows of all.

    Raises:
        PipelineError: a layer of ours is not in it, or one of its layers is none of ours.
    """
    rows: dict[str, tuple[str, slice]] = {}
    for place, layers in places.items():
        start = 0
        for layer in layers:
            height = trained.get(f"{layer}.lora_B.default.weight", [0])[0]
            rows[layer] = place, slice(start, start + height) if len(layers) > 1 else slice(None)
            start += height
    file_of: dict[str, tuple[str, slice]] = {}
    for name in trained:
        layer, _, rest = name.partition(".lora_")
        place, part = rows.get(layer, (layer, slice(None)))
        end = FACTORS.get(f"lora_{rest.partition('.')[0]}", rest)
        files = [f"{KOHYA}{one.replace('.', '_')}.{end}.weight" for one in (place, layer)]
        file = next((file for file in files if file in source.shapes), None)
        if file is None:
            raise PipelineError(
                f"{source.folder}: has no {files[0]}, which this run trains", hint=OTHER_LAYERS
            )
        file_of[name] = file, part if end == FACTORS["lora_B"] else slice(None)
    used = {file for file, _ in file_of.values()}
    if surplus := [name for name in source.shapes if name not in used]:
        raise PipelineError(
            f"{source.folder}: {surplus[0]} and {len(surplus) - 1} more tensors are of layers that "
            "this run does not train",
            hint=OTHER_LAYERS,
        )

    def pieces(name: str, slot: str) -> Iterable[torch.Tensor]:
        file, part = file_of[name]
        whole = source.tensor(file, slot)
        return (whole[part] if whole.dim() else whole,)

    def shape(name: str) -> list[int]:
        found = list(next(iter(pieces(name, MASTER))).shape)
        same = math.prod(found) == math.prod(trained[name]) and found[:1] == trained[name][:1]
        return trained[name] if same else found  # a 1 x 1 convolution may be a matrix there

    shapes = {name: shape(name) for name in trained}
    return replace(source, shapes=shapes, pieces=pieces, numbered=None)
