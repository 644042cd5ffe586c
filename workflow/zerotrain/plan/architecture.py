"""Architectures: what a base model is made of, without its weights, a hub or torch.

config/models holds those of the models that recipes name; a folder brings its own config.json
files, and of a single file of weights the header says enough to find a shipped architecture.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from zerotrain.composed_base import Selection, read_selections
from zerotrain.errors import PipelineError
from zerotrain.families import FAMILIES, LANGUAGE_MODELS, PRESETS
from zerotrain.model_sizes import POSITIONS, read_header

MODELS = Path(__file__).parents[3] / "config" / "models"
LIBRARIES = ("diffusers", "transformers")
UNUSED_PARTS = ("safety_checker", "image_encoder", "feature_extractor")
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "unet.")
"""Before the names of a denoiser's tensors in a single file, where other parts lie beside them."""


@dataclass(frozen=True)
class Part:
    """One model of a base: a class of a library, and its config.json.

    Attributes:
        library: `diffusers` or `transformers`.
        class_name: The class's name there.
        config: The values of its config.json.
        parameters: Their number, tied ones once; None where only building it tells.
    """

    library: str
    class_name: str
    config: Mapping[str, Any]
    parameters: int | None = None


@dataclass(frozen=True)
class Architecture:
    """What a base model is made of.

    Attributes:
        family: The model family.
        source: Where it was found, for messages: a hub id, a folder or a file.
        parts: The models, by the names of their folders; a language model is the part `model`.
    """

    family: str
    source: str
    parts: Mapping[str, Part]

    @property
    def trained_name(self) -> str:
        """The name of the part that training changes."""
        return FAMILIES[self.family].trained_part

    @property
    def trained(self) -> Part:
        """The part that training changes."""
        return self.parts[self.trained_name]

    @property
    def encoders(self) -> dict[str, Part]:
        """The parts that the cache stage loads: autoencoder and text encoders."""
        return {name: part for name, part in self.parts.items() if name != self.trained_name}


def find_architecture(family: str, base: str) -> Architecture:
    """The architecture of a run's model.

    Args:
        family: A key of FAMILIES.
        base: A hub id of config/models, a folder in diffusers' or transformers' layout, a file of
            safetensors, parts of several (see composed_base), `nano` or `micro`. Weights need not
            be there: config.json files are enough.

    Raises:
        PipelineError: the family or base is unknown, a config.json is missing or of another class,
            or the file's header fits no shipped architecture of the family.
    """
    if family not in FAMILIES:
        raise PipelineError(
            f"family: {family!r} is not known", hint=f"families: {', '.join(FAMILIES)}"
        )
    if base in PRESETS:
        from zerotrain.plan.nano import nano_parts  # building them takes torch

        return Architecture(family, base, nano_parts(family, base))
    if selections := read_selections(base):
        return _of_selections(family, base, selections)
    path = Path(base).expanduser()
    if path.is_dir():
        return _of_folder(family, path)
    if path.suffix == ".safetensors":
        return _of_file(family, path)
    for known in shipped(family):
        if base in known.source.split(", "):
            return known
    ids = {name: a.family for a in shipped() for name in a.source.split(", ")}
    if base in ids:
        raise PipelineError(
            f"base: {base} is of the family {ids[base]}, the configuration says {family}",
            hint=f"set family: {ids[base]}",
        )
    near = difflib.get_close_matches(base, ids, n=3)
    raise PipelineError(
        f"base: {base!r} is no folder or file here and no model of {MODELS.name}/",
        hint=f"near names: {', '.join(near)}"
        if near
        else "name a folder that holds the model's config.json files; weights need not be there",
    )


def shipped(family: str | None = None) -> list[Architecture]:
    """The architectures of config/models; `source` holds their hub ids with commas between."""
    found = []
    for file in sorted(MODELS.glob("*.json")):
        document = json.loads(file.read_text())
        parts = {
            name: Part(part["library"], part["class"], part["config"], part["parameters"])
            for name, part in document["parts"].items()
        }
        found.append(Architecture(document["family"], ", ".join(document["hub"]), parts))
    return [known for known in found if family in (None, known.family)]


def _of_file(family: str, path: Path) -> Architecture:
    """The shipped architecture whose trained part has as many parameters as the file.

    Numbers are compared and not names: checkpoints of the makers have other names and fused
    projections. They differ between all shipped architectures.
    """
    shapes = read_header(path)
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in shapes)), "")
    count = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if name.startswith(prefix) and not name.endswith(POSITIONS)
    )
    for known in shipped(family):
        if known.trained.parameters == count:
            return Architecture(family, str(path), known.parts)
    sizes = ", ".join(f"{known.trained.parameters:,} ({known.source})" for known in shipped(family))
    raise PipelineError(
        f"{path}: {count:,} parameters of a denoiser are in its header; the known architectures "
        f"of the family {family} have {sizes}",
        hint="name a folder in diffusers layout, whose config.json describes the model",
    )


def _of_folder(family: str, folder: Path) -> Architecture:
    index = folder / "model_index.json"
    own = folder / "config.json"
    if family in LANGUAGE_MODELS or (own.is_file() and not index.is_file()):
        parts = {FAMILIES[family].trained_part: _own_part(own)}
    else:
        parts = {
            name: Part(entry[0], entry[1], _read_json(folder / name / "config.json"))
            for name, entry in _read_json(index).items()
            if isinstance(entry, list)
            and entry[0] in LIBRARIES
            and name not in UNUSED_PARTS
            and not str(entry[1]).endswith(("Scheduler", "Tokenizer", "TokenizerFast"))
        }
    return _checked(family, str(folder), parts)


def _of_selections(family: str, base: str, selections: Sequence[Selection]) -> Architecture:
    """Each part as its place describes it. What no place on this machine or of config/models
    describes has the shapes that the denoiser was made for."""
    trained = FAMILIES[family].trained_part
    classes = {name: part.class_name for name, part in shipped(family)[0].parts.items()}
    beside: Mapping[str, Part] = {}
    parts: dict[str, Part] = {}
    for selection in selections:
        folder = Path(selection.place).expanduser()
        inside = PurePosixPath(selection.pattern).parent
        name = trained if family in LANGUAGE_MODELS else inside.name
        if folder.is_dir():
            if not (folder / inside / "config.json").is_file():
                continue  # a tokenizer or a noise scheduler
            part = _own_part(folder / inside / "config.json")
            if name not in classes:
                name = next((n for n, c in classes.items() if c == part.class_name), name)
            parts[name] = part
        elif name == trained:
            beside = find_architecture(family, selection.place).parts
        else:
            known = (a.parts for a in shipped(family) if selection.place in a.source.split(", "))
            parts |= {n: part for n, part in next(known, {}).items() if n == name}
    return _checked(family, base, {**beside, **parts})


def _own_part(path: Path) -> Part:
    """What a config.json says of itself."""
    config = _read_json(path)
    name = config.get("_class_name") or next(iter(config.get("architectures") or []), None)
    if name is None:
        raise PipelineError(
            f"{path}: it names no class (architectures or _class_name)",
            hint="complete the model's config.json",
        )
    return Part("diffusers" if "_class_name" in config else "transformers", str(name), config)


def _checked(family: str, source: str, parts: Mapping[str, Part]) -> Architecture:
    """The architecture, if its trained part is there and of the family."""
    trained = FAMILIES[family].trained_part
    expected = {known.trained.class_name for known in shipped(family)}
    if trained not in parts:
        raise PipelineError(
            f"{source}: the part {trained} is missing, which the family {family} trains",
            hint=f"the parts are {', '.join(parts) or 'none'}; check `base` and `family`",
        )
    found = parts[trained].class_name
    if family not in LANGUAGE_MODELS and found not in expected:
        raise PipelineError(
            f"{source}: {trained} is a {found}, the family {family} trains "
            f"{' or '.join(sorted(expected))}",
            hint="check `base` and `family`",
        )
    return Architecture(family, source, parts)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PipelineError(
            f"{path}: {error.strerror if isinstance(error, OSError) else error}",
            hint="a base is described by its config.json files; complete the folder",
        ) from error
    return document
