"""A base whose parts come from several places: `PLACE:FILES,PLACE:FILES`.

The syntax is that of DiffSynth-Studio's --model_id_with_origin_paths. PLACE is a folder or a hub
id, FILES a pattern of its files.

Only weights that match a pattern are taken. Parts without weights (tokenizers, the noise scheduler)
come from the place of the part that they belong to, and so does the pipeline's class, unless
PLACE:model_index.json selects it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from zerotrain.config.families import FamilySpec
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.models.base import MODEL_INDEX
from zerotrain.models.pretrained import find_class_name, read_config

if TYPE_CHECKING:
    from zerotrain.models.hub import ModelLocation

CONFIG = "config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx")


@dataclass(frozen=True)
class Selection:
    """Files of a folder or hub repository."""

    place: str
    pattern: str

    def __str__(self) -> str:
        return f"{self.place}:{self.pattern}"


def read_selections(base: str) -> list[Selection]:
    """Read the selections that `base` names; none for a single folder, file, hub id or preset.

    Raises:
        PipelineError: some of it is not PLACE:FILES.
    """
    if ":" not in base or Path(base).expanduser().exists():
        return []
    found = []
    for entry in base.split(","):
        place, colon, pattern = entry.strip().rpartition(":")
        if not (colon and place and pattern):
            raise PipelineError(
                f"base: {entry.strip()!r} is not PLACE:FILES",
                hint="name parts as Qwen/Qwen-Image:transformer/*.safetensors, with commas between",
            )
        found.append(Selection(place, f"{pattern}*" if pattern.endswith("/") else pattern))
    return found


def local_folders(base: str) -> list[Path]:
    """List the folders on this machine that `base` names, by itself or among its selections."""
    file = Path(base).expanduser()
    if file.is_file():  # the configurations of its parts may be next to it
        return [folder for folder in (file.parent / "config",) if folder.is_dir()]
    names = [selection.place for selection in read_selections(base)] or [base]
    return [f for f in dict.fromkeys(Path(name).expanduser() for name in names) if f.is_dir()]


def listing(
    selections: Sequence[Selection], places: Mapping[str, ModelLocation], family: FamilySpec
) -> dict[str, tuple[ModelLocation, str]]:
    """List the files of one model, as if they were in one folder.

    Args:
        selections: The selections that `base` names.
        places: The place of each name in `selections`.
        family: The model family.

    Returns:
        The place of each file and its name there, by its name in a model's folder.

    Raises:
        PipelineError: a pattern matches nothing or no part, or a part has two sources.
    """
    sources: dict[str, tuple[Selection, str]] = {}
    found: dict[str, tuple[ModelLocation, str]] = {}
    for selection in selections:
        place = places[selection.place]
        matched = [name for name in place.names if fnmatchcase(name, selection.pattern)]
        if not matched:
            raise PipelineError(
                f"base: {selection} matches no file; "
                f"there is {join_first(_near(selection, place))}",
                hint="check the pattern: * stands for any characters",
            )
        if selection.pattern == MODEL_INDEX:  # this place decides the pipeline's class
            sources[MODEL_INDEX] = selection, ""
            found[MODEL_INDEX] = place, MODEL_INDEX
            continue
        folders = dict.fromkeys(str(PurePosixPath(name).parent) for name in matched)
        parts = {folder: part for folder in folders if (part := _part(folder, place, family))}
        if not parts:
            raise PipelineError(
                f"base: {selection} is not a known part",
                hint=f"family {family.name} has {', '.join(family.parts)}: name files in a folder "
                "of that name, or next to a config.json of the part's class",
            )
        for folder, part in parts.items():
            first, there = sources.setdefault(part, (selection, folder))
            if (first.place, there) != (selection.place, folder):
                raise PipelineError(
                    f"base: the part {part} comes from {first} and from {selection}",
                    hint="remove one of them",
                )
            inside = [name for name in place.names if str(PurePosixPath(name).parent) == folder]
            chosen = [n for n in inside if n in matched or not n.endswith(WEIGHTS)]
            found |= {_inside(part, name): (place, name) for name in chosen}
    trained = sources.get(family.trained_part, (selections[0], ""))[0]
    optional = {*family.optional_parts}
    omitted = optional & {*family.classes} and not optional & sources.keys()
    for part in (*family.parts, MODEL_INDEX):
        if part in sources or part in family.classes:
            continue
        if part in optional and omitted:
            continue  # the text encoder was omitted, and this is its tokenizer
        owner = sources.get(part.replace("tokenizer", "text_encoder"), (trained, ""))[0]
        for place in (places[selection.place] for selection in (owner, trained, *selections)):
            if inside := [name for name in place.names if f"{name}/".startswith(f"{part}/")]:
                found |= {name: (place, name) for name in inside}
                break
    return found


def _part(folder: str, place: ModelLocation, family: FamilySpec) -> str | None:
    """Return the part in a folder, by the folder's name or the class in config.json."""
    if folder in (*family.parts, *family.extra_parts):
        return folder
    config = str(PurePosixPath(folder) / CONFIG)
    if config not in place.names:
        return None
    name = find_class_name(read_config(place.fetch([config]) / config))
    parts = [part for part, expected in family.classes.items() if expected == name]
    return parts[0] if len(parts) == 1 else None


def _inside(part: str, name: str) -> str:
    return str(PurePosixPath(part) / PurePosixPath(name).name)


def _near(selection: Selection, place: ModelLocation) -> list[str]:
    """Return the files in the pattern's folder, or all files if it has no file."""
    folder = str(PurePosixPath(selection.pattern).parent)
    return [n for n in place.names if str(PurePosixPath(n).parent) == folder] or [*place.names]
