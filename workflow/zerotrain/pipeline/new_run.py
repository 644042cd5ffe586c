"""`zerotrain new`: a commented configuration for a user's images or text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from zerotrain.artifact import create
from zerotrain.artifact.documents import parse_yaml, read_header, read_object
from zerotrain.config import data
from zerotrain.config.data import BucketConfig, DataConfig
from zerotrain.config.families import FAMILIES, PRESETS
from zerotrain.config.models import CacheConfig, Phase
from zerotrain.config.objective import ObjectiveConfig
from zerotrain.config.read import parse_config
from zerotrain.config.run import OF_MODALITY, RunConfig
from zerotrain.config.scalar import one_line, scalar
from zerotrain.config.section import Role, keys_with
from zerotrain.config.suggestions import after_question, known_names
from zerotrain.config.trained_part import LoraConfig
from zerotrain.config.training import TrainConfig
from zerotrain.data.open import open_source
from zerotrain.data.source import Found
from zerotrain.data.text import hub_id, read_conversations_of
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import read_shipped
from zerotrain.models.families import load_family
from zerotrain.models.hub import HUB_ID
from zerotrain.models.single_file_base import FAMILY as SINGLE_FILE_FAMILY
from zerotrain.models.single_file_base import check_parts, find_single_file
from zerotrain.pipeline.options import NewOptions

OF_IMAGES = [name for name, kind in FAMILIES.items() if kind.modality == "image"]
OF_TEXT = (*data.TEXT_KEYS, *keys_with(TrainConfig, Role.TEXT), *OF_MODALITY["text"]["evaluate"])
OF_OTHERS = {
    "image": {
        "data": data.TEXT_KEYS,
        "train": keys_with(TrainConfig, Role.TEXT),
        "evaluate": OF_MODALITY["text"]["evaluate"],
    },
    "text": {
        "data": data.IMAGE_KEYS,
        "train": keys_with(TrainConfig, Role.IMAGES),
        "cache": (*OF_MODALITY["image"]["cache"], "max_sequence_length"),
        "evaluate": (*OF_MODALITY["image"]["evaluate"], "judge", "scheduler"),
        "": ("vae", "prediction_type", "rescale_betas_zero_snr"),
    },
}
"""Keys of each section that a modality does not use; "" is the run."""
SAMPLES_TO_SEE = 4000
"""Target length of the first phase: usual for fine-tuning on a small set of images."""


@dataclass(frozen=True)
class Samples:
    """The data that was found.

    Attributes:
        what: "captioned images", or "examples".
        place: Where they are.
        usable: Their number; None if it is known only once the hub is queried.
        notes: Comment lines about unusable samples.
    """

    what: str
    place: str
    usable: int | None
    notes: Sequence[str] = ()


def new(options: NewOptions, folder: Path = Path("config")) -> Path:
    """Write folder/NAME.yaml for this data and this model; overwrite nothing.

    Raises:
        PipelineError: a name or option is invalid, the data is unusable, there is no such model, or
            the file exists.
    """
    name, path = options.name, folder / f"{options.name}.yaml"
    _check_name(name, path)
    _check_options(options)
    family = _family(options)
    samples, source = _text(options) if options.text else _images(options)
    chosen = _chosen(options, family, samples, source)
    batch = chosen["train"]["global_batch_size"]
    trains = (
        f"Trains {options.base} on {samples.usable or 'the'} {samples.what} of {samples.place}."
    )
    lines = [
        "# yaml-language-server: $schema=schema.json",
        f"# {one_line(trains)} To run it:",
        f"#     make train CONFIG={one_line(str(path))}",
        "# A line that starts with #key: shows a default; take the # away to change it.",
        "# All keys with their values: docs/configuration.md",
        *samples.notes,
        "",
        *_fields(RunConfig, family, {"run": name, "family": family, "base": options.base}, ""),
    ]
    for section, field in RunConfig.model_fields.items():
        model = field.annotation
        if section == "phases":
            lines += ["", *_phases(options, samples, batch)]
            continue
        if section == "lora" and section in chosen:
            model = LoraConfig
        if isinstance(model, type) and issubclass(model, BaseModel):
            about = (model.__doc__ or "").partition("\n\n")[0]
            body = _fields(model, family, chosen.get(section, {}), section)
            lines += ["", f"# {about}", f"{section}:", *(f"  {line}" for line in body)]
    text = "\n".join(line for line in lines if line != "#lora: null" or "lora" not in chosen) + "\n"
    parse_config(parse_yaml(text, path), str(path))
    try:
        folder.mkdir(exist_ok=True)
        create(path, text)
    except FileExistsError as error:
        raise _exists(path) from error
    return path


def _chosen(
    options: NewOptions, family: str, samples: Samples, source: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Choose the values that suit the model and the data, by section."""
    small = options.base in PRESETS
    batch = min(32, samples.usable or 32) if small else 1
    rate = 1e-3 if small else 1e-5 if options.rank is None else 1e-4
    train = {
        "global_batch_size": batch,
        "gradient_checkpointing": not small,
        "learning_rate": rate,
    }
    if options.text is None:
        own = 32 if small else _native_resolution(options.base)
        train = {"resolution": options.resolution or own, **train}
        # A small model's batch is larger than a bucket of few images.
        if not small and train["resolution"] % BucketConfig.model_fields["alignment"].default == 0:
            source = {**source, "aspect_buckets": True}
    else:
        train = {"max_length": 64 if small else 512, **train}
    chosen: dict[str, dict[str, Any]] = {
        "data": source,
        "train": train,
        "launch": {"mixed_precision": "no" if small else "bf16"},
        "export": {"dtype": "fp32"},
    }
    if options.text is None:
        chosen |= {
            "cache": {"dtype": "fp32" if small else "bf16"},
            "evaluate": {"images_per_prompt": 4},
        }
    else:
        shard = CacheConfig.model_fields["shard_size"].default
        chosen |= {"cache": {"shard_size": shard}, "evaluate": {"max_new_tokens": 128}}
    if options.rank is not None:
        chosen["lora"] = {"rank": options.rank}
    return chosen


def _check_options(options: NewOptions) -> None:
    if (options.images is None) == (options.text is None):
        raise PipelineError(
            "new: give --images DIR or --text FILE",
            hint="zerotrain new NAME --images photos --base nano, or --text talks.json",
        )
    if options.text is not None:
        for option, value in (
            ("--resolution", options.resolution),
            ("--instance-prompt", options.instance_prompt),
        ):
            if value is not None:
                raise PipelineError(f"{option}: text has none", hint="leave it away")
    if options.resolution is not None and (options.resolution < 8 or options.resolution % 8):
        raise PipelineError(
            f"--resolution: {options.resolution} is not a multiple of 8",
            hint=f"give --resolution {max(8, options.resolution // 8 * 8)}",
        )
    if options.until is not None:
        try:
            Phase(name="plain", until=options.until)
        except ValidationError as error:
            raise PipelineError(
                f"--until: {options.until!r} is no end of a phase",
                hint="give a step (300), '3 epochs' or '5000 samples'",
            ) from error


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


def _family(options: NewOptions) -> str:
    """Return the family of a known hub id or folder; by default SDXL, or causal_lm for text."""
    modality = "image" if options.text is None else "text"
    here = [name for name, kind in FAMILIES.items() if kind.modality == modality]
    if options.family is not None:
        if options.family not in here:
            raise PipelineError(
                f"--family {options.family}: no family of {modality}",
                hint=known_names(options.family, here, "families"),
            )
        return options.family
    base = options.base
    folder = Path(base).expanduser()
    if base in PRESETS or (HUB_ID.fullmatch(base) and not folder.exists()):
        known = {name: a.family for a in read_shipped() for name in a.source.split(", ")}
        if (family := known.get(base, here[0])) in here:
            return family
        raise _unknown_family(base, f"a model of {family}", here)
    hint = after_question(
        base,
        PRESETS,
        "give a folder in the layout of diffusers (of transformers for text), a hub id as "
        "owner/name, or nano for a small model",
    )
    if modality == "image" and (file := find_single_file(base)) is not None:
        check_parts(file, read_header(file, follow_links=True).tensors)
        return SINGLE_FILE_FAMILY
    if not folder.is_dir():
        raise PipelineError(f"--base {base}: no such folder, and no hub id", hint=hint)
    index = folder / ("config.json" if modality == "text" else "model_index.json")
    if not index.is_file():
        raise PipelineError(f"--base {base}: holds no {index.name}", hint=hint)
    found = _read_config(index)
    if modality == "text":
        return "seq2seq_lm" if found.get("is_encoder_decoder") else "causal_lm"
    kind = found.get("_class_name")
    for name in OF_IMAGES:
        own: Any = load_family(name)
        if kind in (own.pipeline, *own.pipelines):
            return name
    raise _unknown_family(base, f"a {kind}", here)


def _unknown_family(base: str, found: str, known: Sequence[str]) -> PipelineError:
    what = "images" if FAMILIES[known[0]].modality == "image" else "text"
    return PipelineError(
        f"--base {base}: {found}, and the families of {what} are {', '.join(known)}",
        hint="give a model of one of them",
    )


def _images(options: NewOptions) -> tuple[Samples, dict[str, Any]]:
    """Check that an image of the folder has a caption; return the section `data`."""
    assert options.images is not None
    source: dict[str, Any] = {"source": "folder", "images": str(options.images)}
    if options.instance_prompt is not None:
        source |= {
            "caption_strategy": "instanceprompt",
            "instance_prompt": options.instance_prompt,
        }
    found = open_source(DataConfig(**source)).found()
    if all(sample.reason for sample in found):
        raise PipelineError(
            f"--images {options.images}: none of its {len(found)} images has a caption "
            f"({found[0].file}: {found[0].reason})",
            hint="put NAME.txt next to each NAME.png, or a metadata.csv with the columns "
            "file_name,text into the folder; or give all one caption with --instance-prompt",
        )
    usable = sum(sample.reason is None for sample in found)
    return Samples("captioned images", str(options.images), usable, _unusable(found)), source


def _text(options: NewOptions) -> tuple[Samples, dict[str, Any]]:
    """Count the examples of a file; return the section `data`. On the hub they are not counted."""
    source = {"source": "text", "path": options.text}
    config = DataConfig(**source)
    if hub_id(config) is not None:
        return Samples("examples", str(options.text), None), source
    rows = read_conversations_of(config)
    found = [row for row in rows if isinstance(row, Found)]
    if len(found) == len(rows):
        raise PipelineError(
            f"--text {options.text}: none of its {len(rows)} rows is an example "
            f"({found[0].file}: {found[0].reason})",
            hint="docs/text.md shows the forms that are read",
        )
    notes = _unusable([*found, *(Found("") for _ in range(len(rows) - len(found)))])
    return Samples("examples", str(options.text), len(rows) - len(found), notes), source


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
    """Return the side of the images that the model was trained on."""
    folder = Path(base).expanduser()
    parts = sorted({kind.trained_part for kind in FAMILIES.values()})
    denoisers = [file for part in parts if (file := folder / part / "config.json").is_file()]
    vae = folder / "vae" / "config.json"
    if not (denoisers and vae.is_file()):
        return int(TrainConfig.model_fields["resolution"].default)
    blocks = _read_config(vae).get("block_out_channels")
    scale: int = 2 ** (min(len(blocks), 8) - 1) if isinstance(blocks, list) and blocks else 8
    latents = _read_config(denoisers[0]).get("sample_size")
    return (latents if isinstance(latents, int) else 128) * scale


def _read_config(path: Path) -> dict[str, Any]:
    return read_object(path, follow_links=True, hint="download it again")


def _fields(
    model: type[BaseModel], family: str, chosen: dict[str, Any], section: str
) -> Iterator[str]:
    """Yield each key with its meaning: chosen values as they are, defaults behind a #."""
    hidden = OF_OTHERS[FAMILIES[family].modality].get(section, ())
    for key, field in model.model_fields.items():
        others = key in ObjectiveConfig.model_fields and key not in FAMILIES[family].objective
        others |= key in hidden
        if field.description is None or key == "phases" or others:  # phases have a section
            continue
        yield from textwrap.wrap(field.description, 96, initial_indent="# ", subsequent_indent="# ")
        value = chosen.get(key, field.default)
        value = value.model_dump() if isinstance(value, BaseModel) else value
        yield f"{'' if key in chosen else '#'}{key}: {scalar(value)}"


def _phases(options: NewOptions, samples: Samples, batch: int) -> list[str]:
    usable = samples.usable
    epochs = max(1, min(100, round(SAMPLES_TO_SEE / usable))) if usable else 1
    until = options.until or f"{epochs} epochs"
    amount, unit = Phase(name="plain", until=until).until.split()
    comment = []
    if options.until is None and usable:
        what = samples.what.removeprefix("captioned ")
        steps = -(-usable * epochs // batch)
        comment = [f"    # {epochs} times through {usable} {what} are {steps} steps."]
    return [
        "# Stretches of training, each with its own launch; the next continues where one ends. To",
        "# train longer raise `until`, or append a phase: only the new steps are trained.",
        "phases:",
        "  - name: plain",
        *comment,
        f"    until: {until}",
        "    # torch is plain PyTorch; zero2_offload keeps the optimizer in the host's memory.",
        "    launch: torch",
        "  # Then the same model under DeepSpeed; a phase may change any key of `train`:",
        "  #- name: offload",
        f"  #  until: {(2 * Decimal(amount)).normalize():f} {unit}",
        "  #  launch: zero2_offload",
        "  #  learning_rate: 5.0e-6",
    ]
