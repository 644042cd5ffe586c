"""Files of adapters: peft's and diffusers' folders, and kohya's files, under our parameter names.

peft writes `<prefix><layer>.lora_A.weight`; a model in training has
`<layer>.lora_A.default.weight`. Older diffusers versions write `lora.down` and `lora.up`. kohya
names layers of the original model, with underscores, and stores alpha next to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerotrain.config.adapters import PEFT_TYPE, keys, stack_of
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.models.adapter_config import ADAPTER_CONFIG, parse_settings, read_adapter_config
from zerotrain.state.external import layer_scales
from zerotrain.state.external.checkpoint import ExternalCheckpoint
from zerotrain.state.external.consistency import read_number
from zerotrain.state.external.fitting import find_prefix
from zerotrain.state.external.other_files import has_effect, list_settings
from zerotrain.state.position import MASTER

STEMS = ("adapter_model", "pytorch_lora_weights")
KOHYA = "lora_unet_"
FACTORS = {"lora_A": "lora_down", "lora_B": "lora_up"}
OLDER = {"lora.down": "lora_A", "lora.up": "lora_B", "lora_down": "lora_A", "lora_up": "lora_B"}
TEXT_ENCODER = re.compile(r"text_encoder\w*\.|lora_te\w*_")
PROCESSOR = re.compile(r"\.processor\.(\w+)_lora\.(down|up)\.")
"""An attention's LoRA of diffusers before its layers had it."""
OWN_NAME = re.compile(r"\.(lora_[AB]|lora_magnitude_vector)(?:\.[\w-]+)+\.(weight|bias)$")
"""A tensor of an adapter that its training gave a name, which peft's files leave out."""
COMPILED = re.compile(r"(?<=\.)_orig_mod\.")
"""What compiling a part of a model puts into its names."""
EMBEDDING = "bundle_emb."
OF_ADAPTER = re.compile(
    r"\.(lora|hada|lokr|ia3|oft|boft|vera|shira|hra|gralora)_|\.lora\.|\.(alpha|dora_scale)$"
)
LYCORIS = re.compile(r"^(?:lora_unet|lycoris)_\w+\.(hada|lokr)_")
METHODS = {"hada": "a LoHa", "lokr": "a LoKr"}
OTHER_LAYERS = "lora.target_modules has to name the layers of the file"
SETTINGS = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")
"""Settings that change an adapter's effect without changing its tensors."""
PATTERNS = ("rank_pattern", "alpha_pattern")
"""Settings for single layers, which are read of a LoRA alone."""
NOT_READ = ("modules_to_save", "layer_replication")


class RenamedTensors(Mapping[str, torch.Tensor]):
    """Tensors under other names, each read or computed on access."""

    def __init__(self, read: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def is_adapter(names: Sequence[str]) -> bool:
    """Return whether a file holds only an adapter's tensors, without its base."""
    return bool(names) and all(
        OF_ADAPTER.search(name) or name.startswith((KOHYA, EMBEDDING)) for name in names
    )


def open_adapter(
    weights: Mapping[str, torch.Tensor], path: Path, header: Mapping[str, str]
) -> tuple[Mapping[str, torch.Tensor], dict[str, Any], list[str]]:
    """Open the tensors of an adapter under the names of a model in training.

    Args:
        weights: The tensors of its file; kohya's keep their names.
        path: The file.
        header: The file's metadata.

    Returns:
        The tensors, the adapter's settings, and sentences on omitted contents.

    Raises:
        PipelineError: as read_settings; or an alpha is not a number.
    """
    for name in weights:
        found = LYCORIS.match(name)
        what = METHODS[found[1]] if found else "a DoRA" if name.endswith(".dora_scale") else None
        if what is not None:
            raise PipelineError(
                f"{path}: {name}: {what} in the names of kohya's scripts or LyCORIS, not read",
                hint="merge it into its base, and train from that",
            )
    alphas: dict[str, float] = {}
    ranks: dict[str, int] = {}
    read: dict[str, Callable[[], torch.Tensor]] = {}
    left: set[str] = set()
    for name in weights:
        if TEXT_ENCODER.match(name):
            left.add("an adapter of a text encoder: the denoiser's is read")
        elif name.endswith(".alpha"):
            layer = re.sub(COMPILED, "", name).removesuffix(".alpha")
            alphas[layer] = read_number(weights[name], path, name)
        elif name.startswith(EMBEDDING):
            left.add("an embedding of OneTrainer")
        else:
            own = name if name.startswith(KOHYA) else _in_training(name)
            read[own] = partial(weights.__getitem__, name)
            if any(factor in own for factor in layer_scales.FIRST) and weights[name].dim() > 1:
                ranks[layer_scales.layer_of(own)] = len(weights[name])
    for layer in alphas.keys() - ranks.keys():
        left.add(f"the alpha of {layer}, of which the file has no factors")
    settings, unread = read_settings(path, header, ranks, alphas)
    if (
        not {"lora_alpha", layer_scales.SCALES} & settings.keys()
        and settings.get("peft_type", "LORA") == "LORA"
    ):
        left.add(f"the adapter's alpha: {path.name} does not say it, and this run's is taken")
    return RenamedTensors(read), settings, [*sorted(left), *unread]


def _in_training(name: str) -> str:
    name = re.sub(COMPILED, "", name)
    if found := PROCESSOR.search(name):
        layer = "to_out.0" if found[1] == "to_out" else found[1]
        name = name.replace(found[0], f".{layer}.lora.{found[2]}.")
    for older, newer in OLDER.items():
        name = re.sub(rf"\.{re.escape(older)}\.", f".{newer}.", name)
    name = OWN_NAME.sub(r".\1.default.\2", name)
    if name.endswith(".lora_magnitude_vector"):  # DoRA's, which peft truncates
        name += ".weight"
    if ".default" in name:
        return name
    return re.sub(r"(\.[a-z]+\d?_\w+?)(\.weight)?$", r"\1.default\2", name)


def read_settings(
    file: Path, header: Mapping[str, str], ranks: Mapping[str, int], alphas: Mapping[str, float]
) -> tuple[dict[str, Any], list[str]]:
    """Read the settings of an adapter from its folder or file: peft's names and values.

    Args:
        file: The file of tensors, next to adapter_config.json for peft.
        header: The metadata of the file of tensors.
        ranks: The rank of each layer of a LoRA.
        alphas: The `.alpha` of each layer in the file.

    Returns:
        Those that change an adapter's effect, with the scale of each layer of a LoRA that has
        several ranks or alphas; and sentences on others that are not read.

    Raises:
        PipelineError: adapter_config.json is not JSON, or has settings that are not read.
    """
    where, settings = file, parse_settings(header, file)
    if (path := file.with_name(ADAPTER_CONFIG)).is_file() and file.stem == STEMS[0]:
        where, settings = path, read_adapter_config(file.parent)
    # A header has the keys of several models, such as unet.r and text_encoder.r.
    settings = {k.rpartition(".")[2]: v for k, v in settings.items() if not TEXT_ENCODER.match(k)}
    is_lora = settings.get("peft_type", "LORA") == "LORA" and bool(ranks)
    if own := [key for key in NOT_READ + PATTERNS * (not is_lora) if settings.get(key)]:
        raise PipelineError(
            f"{where}: {own[0]} {settings[own[0]]!r} gives single layers values of their own",
            hint="such an adapter is not read; merge it into its base, and train from that",
        )
    of_method = set(keys().get(str(settings.get(PEFT_TYPE)), {})) - {"feedforward_modules"}
    own_keys = {key for key in settings if key in of_method and has_effect(key)}
    read = [key for key in settings if key in (*SETTINGS, *PATTERNS) or key in own_keys]
    unread = list_settings(settings, where, read)
    known = {key: settings[key] for key in read if is_lora or key not in PATTERNS}
    return (layer_scales.read_layers(ranks, alphas, known, where) if is_lora else known), unread


def check_settings(settings: Mapping[str, Any], run: Mapping[str, Any], where: Path) -> None:
    """Check that an adapter has the same effect under the run's section.

    Args:
        settings: The result of read_settings.
        run: The run's values, by peft's names.
        where: For messages.

    Raises:
        PipelineError: a value differs; the message names the first.
    """
    for key, value in settings.items():
        if key in run and run[key] != value:
            raise PipelineError(
                f"{where}: its adapter has {key} {value}, this run {run[key]}: the same tensors "
                "would have another effect",
                hint="write its value into the section `lora` (r is rank, lora_alpha is alpha), or "
                "into `peft`",
            )


def run_settings(adapter: Mapping[str, Any] | None, is_peft: bool) -> dict[str, Any]:
    """Return the values of RunConfig.adapter_values under peft's names."""
    if is_peft or not adapter:
        return {**keys().get((adapter or {}).get(PEFT_TYPE, ""), {}), **(adapter or {})}
    named = {"r": adapter["rank"], "lora_alpha": adapter["alpha"], "peft_type": "LORA"}
    return named | {key: bool(adapter.get(key)) for key in ("use_rslora", "use_dora")}


def check_all_used(source: ExternalCheckpoint, trained: Mapping[str, list[int]]) -> None:
    """Check that the run trains every tensor of an adapter's file.

    Args:
        source: The file's tensors, with the names of a model in training and possibly a prefix.
        trained: Shapes of our adapter's parameters.

    Raises:
        PipelineError: it does not; the hint has the `lora.target_modules` that would.
    """
    prefix = find_prefix({*source.shapes}, trained)
    surplus = [name for name in source.shapes if name.removeprefix(prefix) not in trained]
    if not surplus:
        return
    hint = (
        f"lora.target_modules: [{', '.join(_layer_ends(source.shapes))}] trains all of its layers"
    )
    if all("lora_magnitude_vector" in name for name in surplus):
        hint = "they are DoRA's: lora.use_dora: true trains them"
    elif all(name.endswith(".bias") for name in surplus):
        hint = "a LoRA with biases is not offered; merge it into its base, and train from that"
    raise PipelineError(
        f"{source.folder}: {join_first(surplus, 2)} would be lost: this run does not train "
        f"{'it' if len(surplus) == 1 else 'them'}",
        hint=hint,
    )


def _layer_ends(names: Iterable[str]) -> list[str]:
    """Return the ends of layers' names that lora.target_modules takes, as `to_q` and `to_out.0`."""
    layers = [name.partition(".lora_")[0].split(".") for name in names]
    return sorted({".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:]) for parts in layers})


def share_first_factors(
    source: ExternalCheckpoint, trained: Mapping[str, list[int]]
) -> ExternalCheckpoint:
    """Fit a LoRA file with a lora_A for each layer to a run with `lora.fused_layers`.

    Args:
        source: The file's tensors, with the names of a model in training and possibly a prefix.
        trained: Shapes of our adapter's parameters: one lora_A per stack of layers.

    Raises:
        PipelineError: layers of a stack have different first factors.
    """
    stacks = {stack_of(name.partition(".lora_")[0]): name for name in trained if ".lora_A." in name}
    firsts = [n.replace(".lora_B.", ".lora_A.") for n in trained if ".lora_B." in n]
    prefix = find_prefix({*source.shapes}, trained)
    copies = {n for name in firsts if name not in trained and (n := prefix + name) in source.shapes}
    for name in copies:
        layer = name.removeprefix(prefix).partition(".lora_")[0]
        first = prefix + stacks[stack_of(layer)]
        if not torch.equal(source.tensor(name, MASTER), source.tensor(first, MASTER)):
            raise PipelineError(
                f"{source.folder}: {name} and {first} differ, and lora.fused_layers trains one "
                "first factor for both layers",
                hint="remove lora.fused_layers: each layer then keeps the factors of the file",
            )
    return replace(source, shapes={n: s for n, s in source.shapes.items() if n not in copies})


def is_kohya(names: Sequence[str]) -> bool:
    """Return whether the names are kohya's."""
    return any(name.startswith(KOHYA) for name in names)


def from_kohya(
    source: ExternalCheckpoint,
    trained: Mapping[str, list[int]],
    places: Mapping[str, tuple[str, ...]],
) -> ExternalCheckpoint:
    """Rename the tensors of a kohya file to our parameter names.

    Args:
        source: The file's tensors, under kohya's names.
        trained: Shapes of our adapter's parameters.
        places: Our layers by the original layer's name, from layers_by_place. If one original layer
            is several of ours, its lora_up has the rows of all.

    Raises:
        PipelineError: one of our layers is missing, or the file has a layer that we do not train.
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
        stored_shape = list(next(iter(pieces(name, MASTER))).shape)
        same = (
            math.prod(stored_shape) == math.prod(trained[name])
            and stored_shape[:1] == trained[name][:1]
        )
        return (
            trained[name] if same else stored_shape
        )  # a 1 x 1 convolution may be stored as a matrix

    shapes = {name: shape(name) for name in trained}
    return replace(source, shapes=shapes, pieces=pieces, numbered=None)
