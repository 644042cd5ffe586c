"""`zerotrain new`: a commented configuration for a folder of one's own images."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML

from zerotrain.artifact import create
from zerotrain.config import DataConfig, RunConfig, TrainConfig, data, parse_config, training
from zerotrain.config.agreement import OF_MODALITY
from zerotrain.config.objective import ObjectiveConfig
from zerotrain.data.source import Found, open_source
from zerotrain.errors import PipelineError
from zerotrain.families import FAMILIES, PRESETS, load_family
from zerotrain.model_place import HUB_ID
from zerotrain.plan.architecture import shipped
from zerotrain.scalar import one_line, scalar

OF_IMAGES = [name for name, kind in FAMILIES.items() if kind.modality == "image"]
OF_TEXT = (*data.TEXT_KEYS, *training.TEXT_KEYS, *OF_MODALITY["text"]["evaluate"])
SAMPLES_TO_SEE = 4000
"""What the first phase aims at: a usual length for fine-tuning on a small set of images."""


def new(name: str, images: Path, base: str, folder: Path = Path("config")) -> Path:
    """Write folder/NAME.yaml, made for these images and this model; nothing is overwritten.

    Raises:
        PipelineError: a bad name, no usable images or captions, no such model, or a file in place.
    """
    path = folder / f"{name}.yaml"
    _check_name(name, path)
    family = _family(base)
    samples = _captioned(images)
    usable = sum(sample.reason is None for sample in samples)
    small = base in PRESETS
    resolution = 32 if small else _native_resolution(base)
    batch = min(32, usable) if small else 1
    epochs = max(1, min(100, round(SAMPLES_TO_SEE / usable)))
    chosen: dict[str, dict[str, Any]] = {
        "data": {"source": "folder", "images": str(images)},
        "train": {
            "resolution": resolution,
            "global_batch_size": batch,
            "gradient_checkpointing": not small,
            "learning_rate": 1e-3 if small else 1e-5,
        },
        "launch": {"mixed_precision": "no" if small else "bf16"},
        "cache": {"dtype": "fp32"},
        "export": {"dtype": "fp32"},
        "evaluate": {"images_per_prompt": 4},
    }
    steps = -(-usable * epochs // batch)
    lines = [
        "# yaml-language-server: $schema=schema.json",
        f"# {one_line(f'Trains {base} on {usable} captioned images of {images}.')} To run it:",
        f"#     make train CONFIG={one_line(str(path))}",
        "# A line that starts with #key: shows a default; take the # away to change it.",
        "# All keys with their values: docs/configuration.md",
        *_unusable(samples),
        "",
        *_fields(RunConfig, family, {"run": name, "family": family, "base": base}),
    ]
    for section, field in RunConfig.model_fields.items():
        if section == "phases":
            lines += ["", *_phases(epochs, usable, steps)]
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            about = (field.annotation.__doc__ or "").partition("\n\n")[0]
            body = _fields(field.annotation, family, chosen.get(section, {}))
            lines += ["", f"# {about}", f"{section}:", *(f"  {line}" for line in body)]
    text = "\n".join(lines) + "\n"
    parse_config(YAML(typ="safe").load(text), str(path))
    try:
        folder.mkdir(exist_ok=True)
        create(path, text)
    except FileExistsError as error:
        raise _exists(path) from error
    return path


def _check_name(name: str, path: Path) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name == "data":
        raise PipelineError(
            f"{name!r} cannot name a run",
            hint="use letters, digits, - and _, starting with a letter or digit, and not `data`",
        )
    if path.exists():
        raise _exists(path)


def _exists(path: Path) -> PipelineError:
    return PipelineError(f"{path} exists already", hint="choose another name, or remove it")


def _family(base: str) -> str:
    """Of a known hub id, or of a folder; SDXL for a preset and for a hub id that is not known."""
    folder = Path(base).expanduser()
    hub_id = HUB_ID.fullmatch(base)
    if base in PRESETS or (hub_id and not folder.exists()):
        known = {name: a.family for a in shipped() for name in a.source.split(", ")}
        if (family := known.get(base, "sdxl")) in OF_IMAGES:
            return family
        raise _unknown_family(base, f"a model of {family}")
    hint = "give a folder in diffusers layout, a hub id as owner/name, or nano for a small model"
    if folder.is_file():
        raise PipelineError(f"--base {base}: a single file, not a folder", hint=hint)
    if not folder.is_dir():
        raise PipelineError(f"--base {base}: no such folder, and no hub id", hint=hint)
    index = folder / "model_index.json"
    if not index.is_file():
        raise PipelineError(f"--base {base}: holds no model_index.json", hint=hint)
    kind = _json(index).get("_class_name")
    for name in OF_IMAGES:
        own: Any = load_family(name)
        if own.pipeline == kind:
            return name
    raise _unknown_family(base, f"a {kind}")


def _unknown_family(base: str, found: str) -> PipelineError:
    return PipelineError(
        f"--base {base}: {found}, and the families of images are {', '.join(OF_IMAGES)}",
        hint="give a model of one of them",
    )


def _captioned(images: Path) -> list[Found]:
    """Every image and every complaint of the folder, at least one image with a caption."""
    found = open_source(DataConfig(source="folder", images=str(images))).found()
    if all(sample.reason for sample in found):
        raise PipelineError(
            f"--images {images}: none of its {len(found)} images has a caption "
            f"({found[0].file}: {found[0].reason})",
            hint="put NAME.txt beside each NAME.png, or a metadata.csv with the columns "
            "file_name,text into the folder",
        )
    return found


def _unusable(samples: list[Found]) -> list[str]:
    bad = [sample for sample in samples if sample.reason]
    if not bad:
        return []
    return [
        f"# {len(bad)} of {len(samples)} entries cannot be used, first {one_line(bad[0].file)}:",
        f"# {one_line(bad[0].reason or '')}. Fix them, or let data.max_bad_samples pass over that "
        "many.",
    ]


def _native_resolution(base: str) -> int:
    """The side of the images that the model was made for."""
    folder = Path(base).expanduser()
    parts = sorted({kind.trained_part for kind in FAMILIES.values()})
    denoisers = [file for part in parts if (file := folder / part / "config.json").is_file()]
    vae = folder / "vae" / "config.json"
    if not (denoisers and vae.is_file()):
        return int(TrainConfig.model_fields["resolution"].default)
    scale: int = 2 ** (len(_json(vae).get("block_out_channels", [0] * 4)) - 1)
    latents = _json(denoisers[0]).get("sample_size")
    return (latents if isinstance(latents, int) else 128) * scale


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise PipelineError(f"{path}: not JSON ({error})", hint="download it again") from error
    return found if isinstance(found, dict) else {}


def _fields(model: type[BaseModel], family: str, chosen: dict[str, Any]) -> Iterator[str]:
    """Each key with its meaning: chosen values as they are, defaults behind a #."""
    for key, field in model.model_fields.items():
        others = key in ObjectiveConfig.model_fields and key not in FAMILIES[family].objective
        others |= key in OF_TEXT
        if field.description is None or key == "phases" or others:  # phases: a section of its own
            continue
        yield from textwrap.wrap(field.description, 96, initial_indent="# ", subsequent_indent="# ")
        value = chosen.get(key, field.default)
        value = value.model_dump() if isinstance(value, BaseModel) else value
        yield f"{'' if key in chosen else '#'}{key}: {scalar(value)}"


def _phases(epochs: int, usable: int, steps: int) -> list[str]:
    return [
        "# Stretches of training, each with its own launch; the next goes on where one ends. To",
        "# train longer raise `until`, or append a phase: only the new steps are trained.",
        "phases:",
        "  - name: plain",
        f"    # {epochs} times through {usable} images are {steps} steps.",
        f"    until: {epochs} epochs",
        "    # torch is plain PyTorch; zero2_offload keeps the optimizer in the host's memory.",
        "    launch: torch",
        "  # Then the same model under DeepSpeed; a phase may change any key of `train`:",
        "  #- name: offload",
        f"  #  until: {2 * epochs} epochs",
        "  #  launch: zero2_offload",
        "  #  learning_rate: 5.0e-6",
    ]
