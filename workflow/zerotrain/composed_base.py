"""A base whose parts come from several places: `PLACE:FILES,PLACE:FILES`.

So DiffSynth-Studio spells it in --model_id_with_origin_paths. A place is a folder or a hub id,
FILES a pattern of its files.

Only weights that a pattern names are taken. What has no weights (tokenizers, the noise scheduler)
comes from where the part lies that it belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from zerotrain.base import MODEL_INDEX, some
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.families import Family
    from zerotrain.model_place import Place

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
    """The selections that `base` names; none where it is a single folder, file, hub id or preset.

    Raises:
        PipelineError: some of it is no PLACE:FILES.
    """
    if ":" not in base or Path(base).expanduser().exists():
        return []
    found = []
    for entry in base.split(","):
        place, colon, pattern = entry.strip().rpartition(":")
        if not (colon and place and pattern):
            raise PipelineError(
                f"base: {entry.strip()!r} is no PLACE:FILES",
                hint="name parts as Qwen/Qwen-Image:transformer/*.safetensors, with commas between",
            )
        found.append(Selection(place, f"{pattern}*" if pattern.endswith("/") else pattern))
    return found


def local_folders(base: str) -> list[Path]:
    """The folders on this machine that `base` names, by itself or among its selections."""
    names = [selection.place for selection in read_selections(base)] or [base]
    return [f for f in dict.fromkeys(Path(name).expanduser() for name in names) if f.is_dir()]


def listing(
    selections: Sequence[Selection], places: Mapping[str, Place], family: Family
) -> dict[str, tuple[Place, str]]:
    """The files of one model's folder, as if they lay in one place.

    Args:
        selections: What `base` names.
        places: Each place, by its name in `selections`.
        family: The model family.

    Returns:
        The place and the name there of each file, by its name in a model's folder.

    Raises:
        PipelineError: a pattern matches nothing or no part, or a part has two sources.
    """
    sources: dict[str, tuple[Selection, str]] = {}
    found: dict[str, tuple[Place, str]] = {}
    for selection in selections:
        place = places[selection.place]
        matched = [name for name in place.names if fnmatchcase(name, selection.pattern)]
        if not matched:
            raise PipelineError(
                f"base: {selection} matches no file; there is {some(_near(selection, place))}",
                hint="check the pattern: * stands for any characters",
            )
        folders = dict.fromkeys(str(PurePosixPath(name).parent) for name in matched)
        parts = {folder: part for folder in folders if (part := _part(folder, place, family))}
        if not parts:
            raise PipelineError(
                f"base: {selection} is no part that is known",
                hint=f"family {family.name} has {', '.join(family.parts)}: name files in a folder "
                "of that name, or beside a config.json of the part's class",
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
    for part in (*family.parts, MODEL_INDEX):
        if part in sources or part in family.classes:
            continue
        if part in family.optional_parts and not sources.keys() & {*family.optional_parts}:
            continue  # the text encoder was left away, and this is its tokenizer
        owner = sources.get(part.replace("tokenizer", "text_encoder"), (trained, ""))[0]
        for place in (places[selection.place] for selection in (owner, trained, *selections)):
            if beside := [name for name in place.names if f"{name}/".startswith(f"{part}/")]:
                found |= {name: (place, name) for name in beside}
                break
    return found


def _part(folder: str, place: Place, family: Family) -> str | None:
    """The part that lies in a folder of a place: by its name, or by the class in config.json."""
    if folder in family.parts:
        return folder
    config = str(PurePosixPath(folder) / CONFIG)
    if config not in place.names:
        return None
    values = json.loads((place.fetch([config]) / config).read_text())
    name = values.get("_class_name") or next(iter(values.get("architectures") or []), None)
    parts = [part for part, expected in family.classes.items() if expected == name]
    return parts[0] if len(parts) == 1 else None


def _inside(part: str, name: str) -> str:
    return str(PurePosixPath(part) / PurePosixPath(name).name)


def _near(selection: Selection, place: Place) -> list[str]:
    """What lies in the pattern's folder, or all there is."""
    folder = str(PurePosixPath(selection.pattern).parent)
    return [n for n in place.names if str(PurePosixPath(n).parent) == folder] or [*place.names]
