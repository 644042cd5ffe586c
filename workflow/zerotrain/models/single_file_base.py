"""A base that is one file in SDXL's original layout, which ComfyUI, A1111 and kohya use.

The file has only weights. Tokenizers, the noise scheduler and the parts' config.json come from
`config/` next to the file, which `zerotrain export --to ldm` writes, or from ORIGIN on the hub.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from zerotrain.artifact.documents import read_header
from zerotrain.config.families import FamilySpec
from zerotrain.errors import PipelineError
from zerotrain.models.base import CONFIG_FILES, MODEL_INDEX, loaded_names
from zerotrain.models.hub import ModelLocation, open_location

FAMILY = "sdxl"
CONFIG = "config"
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
    if inside.is_file() and (path / CONFIG / MODEL_INDEX).is_file():
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
    folder = file.parent / CONFIG
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
