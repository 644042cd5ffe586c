"""Bases that are no single folder or repository: parts from several places, or one file.

*Several places*: `PLACE:FILES,PLACE:FILES`, the syntax of DiffSynth-Studio's
--model_id_with_origin_paths. PLACE is a folder or a hub id, FILES a pattern of its files. Only
weights that match a pattern are taken. Parts without weights (tokenizers, the noise scheduler)
come from the place of the part that they belong to, and so does the pipeline's class, unless
PLACE:model_index.json selects it.

*One file* in SDXL's original layout, which ComfyUI, A1111 and kohya use, has only weights.
Tokenizers, the noise scheduler and the parts' config.json come from `config/` next to the file,
which `zerotrain export --to ldm` writes, or from ORIGIN on the hub.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from zerotrain.artifact.documents import read_header
from zerotrain.config.families import FamilySpec
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.models.base import (
    CONFIG_FILES,
    MODEL_INDEX,
    check_inside,
    choose_files,
    list_others,
    loaded_names,
)
from zerotrain.models.hub import ModelLocation, check_no_revision, open_location
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


@dataclass(frozen=True)
class BaseFiles:
    """The files that make up a base.

    Attributes:
        source: Name of the base in messages.
        places: Each place, with its name of every file to take by the file's name in the base.
        others: Files in the same folders that are not part of the model and are not taken.
        single_file: The file with the weights of all parts, if the base is one; the places then
            have only configurations and tokenizers.
    """

    source: str
    places: list[tuple[ModelLocation, dict[str, str]]]
    others: list[str]
    single_file: Path | None = None


def base_files(base: str, revision: str | None, family: FamilySpec) -> BaseFiles:
    """Return the files that the family needs; at most some config.json are downloaded.

    Raises:
        PipelineError: a place does not exist or cannot be reached, a part is missing, or a file is
            a link to another place.
    """
    if (file := find_single_file(base)) is not None:
        check_no_revision(base, revision)
        return BaseFiles(base, [locate_configurations(base, file, family)], [], file)
    selections = read_selections(base)
    if len({selection.place for selection in selections}) > 1:
        check_no_revision(base, revision)
    names = [selection.place for selection in selections] or [base]
    places = {name: open_location(name, revision) for name in names}
    if selections:
        listed, source = listing(selections, places, family), "base"
    else:
        (place,) = places.values()
        listed, source = {name: (place, name) for name in place.names}, place.name
    taken = choose_files(listed, family, source)
    chosen = {name: listed[file] for name, file in taken.items()}
    by_place = [
        (place, {name: file for name, (other, file) in chosen.items() if other is place})
        for place in places.values()
    ]
    for place, wanted in by_place:
        if place.folder is not None:
            check_inside(place.folder, wanted.values(), place.name)
    return BaseFiles(source, by_place, list_others(listed, taken.values(), family))


FAMILY = "sdxl"
CONFIG_FOLDER = "config"
ORIGIN = "stabilityai/stable-diffusion-xl-base-1.0"
SUFFIX = ".safetensors"
EXPORTED = f"model{SUFFIX}"
UNET, VAE = "model.diffusion_model.", "first_stage_model."
ENCODERS = ("conditioner.embedders.0.transformer.", "conditioner.embedders.1.model.")
PARTS = (UNET, VAE, *ENCODERS)
OTHERS = (
    ("lora_", "a LoRA in kohya's layout"),
    ("cond_stage_model.transformer.", "Stable Diffusion 1.x"),
    ("cond_stage_model.model.", "Stable Diffusion 2.x"),
    ("conditioner.embedders.0.model.", "SDXL's refiner"),
    ("model.diffusion_model.joint_blocks.", "SD3"),
    ("model.diffusion_model.double_blocks.", "Flux"),
    ("double_blocks.", "Flux"),
)
"""Prefixes of names that identify a file of another model."""


def find_single_file(base: str) -> Path | None:
    """Return the single file that `base` names, by itself or as a folder of `export --to ldm`."""
    path = Path(base).expanduser()
    if path.is_file():
        return path
    inside = path / EXPORTED
    if inside.is_file() and (path / CONFIG_FOLDER / MODEL_INDEX).is_file():
        return inside
    return None


def check_single_file(base: str, file: Path, family: str) -> None:
    """Check that a family can be read from a file, by its suffix and header.

    Raises:
        PipelineError: the family has no such files, or the file is of another model.
    """
    if family != FAMILY or file.suffix != SUFFIX:
        raise PipelineError(
            f"base: {base} is a file, not a folder in diffusers' layout; a single file is read of "
            f"the family {FAMILY} and of {SUFFIX} alone",
            hint="convert it once with diffusers' from_single_file(FILE).save_pretrained(DIR) of "
            "its pipeline's class, then set `base` to DIR",
        )
    check_parts(file, read_header(file, follow_links=True).tensors)


def locate_configurations(
    base: str, file: Path, family: FamilySpec
) -> tuple[ModelLocation, dict[str, str]]:
    """Return the location of a file's tokenizers and configurations, and their names there.

    Raises:
        PipelineError: the family has no such files, the file is of another model, no location is
            found, or a part is missing.
    """
    check_single_file(base, file, family.name)
    folder = file.parent / CONFIG_FOLDER
    try:
        place = open_location(str(folder) if folder.is_dir() else ORIGIN, None)
    except PipelineError as error:
        raise PipelineError(
            f"base: {base} holds weights alone; its tokenizers and configurations are looked for "
            f"in {folder} and in the hub's {ORIGIN}, and neither is there",
            hint=f"put {MODEL_INDEX}, the scheduler, both tokenizers and the parts' config.json of "
            "any SDXL in diffusers' layout into that folder",
        ) from error
    wanted = [MODEL_INDEX]
    for part in family.parts:
        names = CONFIG_FILES if part in family.classes else loaded_names(part, family)
        inside = [f"{part}/{name}" for name in sorted(names) if f"{part}/{name}" in place.names]
        if not inside:
            raise PipelineError(
                f"base: {place.name} has no files of the part {part}, which {file} needs",
                hint=f"copy the folder {part} of any SDXL in diffusers' layout there; its weights "
                "are not read",
            )
        wanted += inside
    return place, {name: name for name in wanted}


def check_parts(file: Path, names: Collection[str]) -> None:
    """Check that a file is of this model, with all parts.

    Raises:
        PipelineError: it is not.
    """
    missing = [part for part in PARTS if not any(name.startswith(part) for name in names)]
    if not missing:
        return
    found = next((k for start, k in OTHERS if any(n.startswith(start) for n in names)), None)
    if found is None and missing == [VAE]:
        raise PipelineError(
            f"base: {file} has no autoencoder: no tensor is named {VAE}*",
            hint="take a file with a baked-in VAE, or convert it once with diffusers' "
            "from_single_file(FILE, vae=AutoencoderKL.from_pretrained(VAE)).save_pretrained(DIR)",
        )
    raise PipelineError(
        f"base: {file} is {found}, and not a whole SDXL"
        if found
        else f"base: {file} is not a whole SDXL: no tensor is named {missing[0]}*",
        hint="name a whole checkpoint of SDXL with U-Net, both text encoders and autoencoder",
    )
