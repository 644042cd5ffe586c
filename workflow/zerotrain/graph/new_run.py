"""`zerotrain new`: a configuration for a user's images or text, with a comment for each value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zerotrain.artifact import create
from zerotrain.artifact.documents import parse_yaml, read_header, read_object
from zerotrain.config.data import BucketConfig, DataConfig
from zerotrain.config.families import FAMILIES, PRESETS
from zerotrain.config.models import CacheConfig, Phase
from zerotrain.config.read import parse_config
from zerotrain.config.scalar import one_line
from zerotrain.config.suggestions import after_question, known_names
from zerotrain.config.training import TrainConfig
from zerotrain.data.bad_samples import Counted, count_bad
from zerotrain.data.text import hub_id
from zerotrain.errors import PipelineError
from zerotrain.graph.new_text import Samples, config_text
from zerotrain.graph.options import NewOptions
from zerotrain.launch.planner.architecture import read_shipped
from zerotrain.models.base_places import FAMILY as SINGLE_FILE_FAMILY
from zerotrain.models.base_places import check_parts, find_single_file
from zerotrain.models.hub import HUB_ID

OF_IMAGES = [name for name, kind in FAMILIES.items() if kind.modality == "image"]


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
    text = config_text(options, family, samples, chosen, path)
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
        own = FAMILIES[name]
        if kind in (own.pipeline, *own.conditioning):
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
    found = _counted(source)
    if not found.usable:
        raise PipelineError(
            f"--images {options.images}: none of its {found.total} images has a caption "
            f"({found.describe_first()})",
            hint="put NAME.txt next to each NAME.png, or a metadata.csv with the columns "
            "file_name,text into the folder; or give all one caption with --instance-prompt",
        )
    unopened = f"# No image was opened; `zerotrain data show {options.name}` opens them."
    notes = [*_unusable(found), unopened]
    return Samples("captioned images", str(options.images), len(found.usable), notes), source


def _text(options: NewOptions) -> tuple[Samples, dict[str, Any]]:
    """Count the examples of a file; return the section `data`. On the hub they are not counted."""
    source = {"source": "text", "path": options.text}
    if hub_id(DataConfig(**source)) is not None:
        return Samples("examples", str(options.text), None), source
    found = _counted(source)
    if not found.usable:
        raise PipelineError(
            f"--text {options.text}: none of its {found.total} rows is an example "
            f"({found.describe_first()})",
            hint="docs/text.md shows the forms that are read",
        )
    return Samples("examples", str(options.text), len(found.usable), _unusable(found)), source


def _counted(source: dict[str, Any]) -> Counted:
    found = count_bad(DataConfig(**source))
    assert found is not None  # it is on this disk
    return found


def _unusable(found: Counted) -> list[str]:
    if not found.bad:
        return []
    first = found.bad[0]
    return [
        f"# {one_line(found.describe())}, first {one_line(first.file)}:",
        f"# {one_line(first.reason or '')}. Fix them, or let data.max_bad_samples pass over that "
        "many.",
    ]


def _native_resolution(base: str) -> int:
    """Return the side of the images that the model was trained on."""
    folder = Path(base).expanduser()
    parts = sorted({kind.trained_name for kind in FAMILIES.values()})
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
