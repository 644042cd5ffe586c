"""Architectures: the parts of a base model, found without its weights, the hub or torch.

config/models has those of the models in recipes; a folder has its own config.json files, and the
header of a single weights file is enough to find a shipped architecture. The small models, which
families build from a seed, are built without their weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from zerotrain.artifact.documents import read_header
from zerotrain.config.families import FAMILIES, LANGUAGE_MODELS, PRESETS
from zerotrain.config.suggestions import known_names, nearest
from zerotrain.errors import PipelineError
from zerotrain.models.base_places import Selection, read_selections
from zerotrain.models.pretrained import LIBRARIES, check_libraries, find_class_name, read_config
from zerotrain.models.sizes import POSITIONS


@dataclass(frozen=True)
class Part:
    """Model of a base: a library's class and its config.json.

    Attributes:
        library: `diffusers` or `transformers`.
        class_name: The class's name in the library.
        config: The values of its config.json.
        parameters: Number of parameters, tied ones once; None if only building the model shows it.
    """

    library: str
    class_name: str
    config: Mapping[str, Any]
    parameters: int | None = None


MODELS = Path(__file__).parents[4] / "config" / "models"
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "unet.")
"""Prefixes of a denoiser's tensor names in a single file that also contains other parts."""


@dataclass(frozen=True)
class Architecture:
    """Parts of a base model.

    Attributes:
        family: The model family.
        source: Its source, for messages: a hub id, a folder or a file.
        parts: The models by folder name; a language model is the part `model`.
    """

    family: str
    source: str
    parts: Mapping[str, Part]

    @property
    def trained_name(self) -> str:
        """Name of the trained part."""
        return FAMILIES[self.family].trained_name

    @property
    def trained(self) -> Part:
        """The trained part."""
        return self.parts[self.trained_name]

    @property
    def encoders(self) -> dict[str, Part]:
        """Parts that the cache stage loads: autoencoder and text encoders."""
        return {name: part for name, part in self.parts.items() if name != self.trained_name}


def find_architecture(family: str, base: str, side: int | None = None) -> Architecture:
    """Return the architecture of a run's model.

    Args:
        family: A key of FAMILIES.
        base: A hub id of config/models, a folder in diffusers' or transformers' layout, a file of
            safetensors, parts of several (see composed_base), `nano` or `micro`. Weights are not
            needed: config.json files are enough.
        side: Side in pixels of the images for which `nano` and `micro` are built: the resolution of
            a run's first phase.

    Raises:
        PipelineError: the family or base is unknown, a config.json is missing or of another class,
            or the file's header matches no shipped architecture of the family.
    """
    if family not in FAMILIES:
        raise PipelineError(
            f"family: {family!r} is not known", hint=known_names(family, FAMILIES, "families")
        )
    if base in PRESETS:
        return Architecture(family, base, nano_parts(family, base, side or SIDE))
    if selections := read_selections(base):
        return _compose(family, base, selections)
    path = Path(base).expanduser()
    config_folder = (path if path.is_dir() else path.parent) / "config"
    if (
        config_folder / "model_index.json"
    ).is_file():  # for a single file, such as an export --to ldm
        return replace(_read_from_folder(family, config_folder), source=str(path))
    if path.is_dir():
        return _read_from_folder(family, path)
    if path.suffix == ".safetensors":
        return _read_from_weights(family, path)
    for known in read_shipped(family):
        if base in known.source.split(", "):
            return known
    ids = {name: a.family for a in read_shipped() for name in a.source.split(", ")}
    if base in ids:
        raise PipelineError(
            f"base: {base} is of the family {ids[base]}, the configuration says {family}",
            hint=f"set family: {ids[base]}",
        )
    near = nearest(base, ids, most=3)
    raise PipelineError(
        f"base: {base!r} is no folder or file here and no model of {MODELS.name}/",
        hint=f"near names: {', '.join(near)}"
        if near
        else "name a folder that holds the model's config.json files; weights need not be there",
    )


def read_shipped(family: str | None = None) -> list[Architecture]:
    """Return the architectures of config/models; `source` has their hub ids with commas between."""
    architectures = []
    for file in sorted(MODELS.glob("*.json"), key=lambda file: file.stem):
        document = read_config(file)
        parts = {
            name: Part(part["library"], part["class"], part["config"], part["parameters"])
            for name, part in document["parts"].items()
        }
        architectures.append(Architecture(document["family"], ", ".join(document["hub"]), parts))
    return [known for known in architectures if family in (None, known.family)]


def _read_from_weights(family: str, path: Path) -> Architecture:
    """Return the shipped architecture whose trained part has as many parameters as the file.

    Numbers are compared, not names: the makers' checkpoints have other names and fused projections.
    The numbers of all shipped architectures differ except for those of Qwen-Image, of which the
    plain one is the first: the file does not show whether it is Edit-2511.
    """
    shapes = read_header(path, follow_links=True).shapes
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in shapes)), "")
    count = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if name.startswith(prefix) and not name.endswith(POSITIONS)
    )
    for known in read_shipped(family):
        if known.trained.parameters == count:
            return Architecture(family, str(path), known.parts)
    sizes = ", ".join(
        f"{known.trained.parameters:,} ({known.source})" for known in read_shipped(family)
    )
    raise PipelineError(
        f"{path}: {count:,} parameters of a denoiser are in its header; the known architectures "
        f"of the family {family} have {sizes}",
        hint="name a folder in diffusers layout, whose config.json describes the model",
    )


def _read_from_folder(family: str, folder: Path) -> Architecture:
    layout, index = FAMILIES[family], folder / "model_index.json"
    own = folder / "config.json"
    if family in LANGUAGE_MODELS or (own.is_file() and not index.is_file()):
        parts = {FAMILIES[family].trained_name: _own_part(own, family)}
    else:
        named = read_config(index)
        check_libraries(named, index)
        parts = {
            name: Part(entry[0], entry[1], read_config(folder / name / "config.json"))
            for name, entry in named.items()
            if name in layout.classes
            and isinstance(entry, list)
            and entry[0] in LIBRARIES
            and not (name in layout.optional_parts and not any((folder / name).glob("*")))
        }
    return _check(family, str(folder), parts)


def _compose(family: str, base: str, selections: Sequence[Selection]) -> Architecture:
    """Return the architecture with each part as described by its place.

    Parts that no place on this machine or in config/models describes get the shapes that belong to
    the denoiser.
    """
    trained = FAMILIES[family].trained_name
    classes = FAMILIES[family].classes
    base_parts: Mapping[str, Part] = {}
    parts: dict[str, Part] = {}
    for selection in selections:
        folder = Path(selection.place).expanduser()
        inside = PurePosixPath(selection.pattern).parent
        name = trained if family in LANGUAGE_MODELS else inside.name
        if folder.is_dir():
            if not (folder / inside / "config.json").is_file():
                continue  # a tokenizer or a noise scheduler
            part = _own_part(folder / inside / "config.json", family)
            if name not in classes:
                name = next((n for n, c in classes.items() if c == part.class_name), name)
            parts[name] = part
        elif name == trained:
            base_parts = find_architecture(family, selection.place).parts
        else:
            known = (
                a.parts for a in read_shipped(family) if selection.place in a.source.split(", ")
            )
            parts |= {n: part for n, part in next(known, {}).items() if n == name}
    return _check(family, base, {**base_parts, **parts})


def _own_part(path: Path, family: str | None = None) -> Part:
    """Return the part that a config.json describes; for a text family, model_type is enough."""
    config = read_config(path)
    name = find_class_name(config)
    if name is None and family in LANGUAGE_MODELS and "model_type" in config:
        name = _class_of_model_type(str(family), str(config["model_type"]))
    if name is None:
        raise PipelineError(
            f"{path}: it names no class (architectures or _class_name)",
            hint="complete the model's config.json",
        )
    return Part("diffusers" if "_class_name" in config else "transformers", name, config)


def _class_of_model_type(family: str, model_type: str) -> str | None:
    """Return the class that a family's auto class of transformers selects; None if unknown."""
    from transformers.models.auto import modeling_auto  # slow to import

    known = {
        "causal_lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq_lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    name: str | None = known[family].get(model_type)
    return name


def _check(family: str, source: str, parts: Mapping[str, Part]) -> Architecture:
    """Return the architecture after a check that it has a trained part of the family."""
    spec = FAMILIES[family]
    trained, expected = spec.trained_name, spec.classes[spec.trained_part]
    if trained not in parts:
        raise PipelineError(
            f"{source}: the part {trained} is missing, which the family {family} trains",
            hint=f"the parts are {', '.join(parts) or 'none'}; check `base` and `family`",
        )
    class_name = parts[trained].class_name
    if family not in LANGUAGE_MODELS and class_name != expected:
        raise PipelineError(
            f"{source}: {trained} is a {class_name}, the family {family} trains {expected}",
            hint="check `base` and `family`",
        )
    return Architecture(family, source, parts)


SIDE = 256
"""Default side in pixels: it changes no parameter, only SD3's positions."""
BYTES = 256


class _Vocabulary:
    """Tokenizer with the largest vocabulary of a small model."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def nano_parts(family: str, preset: str, side: int = SIDE) -> dict[str, Part]:
    """Return the models of a family's preset, with the largest text vocabulary.

    Args:
        family: A family with small models.
        preset: `nano` or `micro`.
        side: Side in pixels of the images for which it is built. SD3's transformer does not support
            larger ones.
    """
    import torch  # the other architectures are found without it

    from zerotrain.models.families import load_family, nano
    from zerotrain.models.families.autoencoders import build_autoencoder
    from zerotrain.models.families.small_models import SmallSpec

    kind: Any = load_family(family)
    with torch.device("meta"):
        if family in LANGUAGE_MODELS:
            values = kind.small.arguments(_Vocabulary(nano.TEXT_VOCABULARY), preset)
            return {"model": _part(nano.build_model(kind.small.model, **values))}
        # Each byte at the end of a word and within one, and merges.
        vocabulary = _Vocabulary(nano.VOCABULARY + BYTES + 2)
        tokenizers = dict.fromkeys(kind.small.tokenizers, vocabulary)
        autoencoder = build_autoencoder(kind.spec.classes["vae"], side)
        channels = nano.latent_channels(autoencoder)
        spec = SmallSpec(preset, kind.spec.pipeline, tokenizers, side, channels)
        models = nano.build_models(kind, spec)
    return {name: _part(model) for name, model in {**models, "vae": autoencoder}.items()}


def _part(model: Any) -> Part:
    library = type(model).__module__.partition(".")[0]
    config = model.config.to_dict() if library == "transformers" else dict(model.config)
    return Part(library, type(model).__name__, config)
