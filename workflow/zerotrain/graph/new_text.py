"""The text of a configuration that `zerotrain new` writes: values with comments, or all keys."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from zerotrain.config import data
from zerotrain.config.families import FAMILIES
from zerotrain.config.models import Phase
from zerotrain.config.run import OF_MODALITY, RunConfig
from zerotrain.config.scalar import one_line, scalar
from zerotrain.config.section import Role, keys_with
from zerotrain.config.trained_part import LoraConfig
from zerotrain.config.training import ObjectiveConfig, TrainConfig
from zerotrain.graph.options import NewOptions

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
CHOSEN_KEYS = (
    "# All other keys have their defaults: docs/configuration.md lists them, an editor that knows",
    "# YAML completes them, and `zerotrain new --all-keys` writes them.",
)
ALL_KEYS = (
    "# A line that starts with #key: shows a default; take the # away to change it.",
    "# All keys with their values: docs/configuration.md",
)
SHORT = {
    ".base": "The model: a folder, a hub id, or nano or micro, which are built from the seed.",
    "data.source": "What samples are: folder, huggingface, webdataset, text or a built-in set.",
    "data.path": "A .json, .jsonl or .csv file, a folder of save_to_disk, or a dataset's hub id.",
    "data.caption_strategy": "Captions: textfile, filename, foldername, or instanceprompt for all.",
    "data.aspect_buckets": "Keep the shape of images instead of the centre square.",
    "train.resolution": "Side in pixels of the square that images are cut to, or of the largest.",
    "cache.dtype": "Type of stored tensors; on a GPU also the one that text encoders compute in.",
}
"""One line about a key whose first sentence is longer, or is about other values than new's."""
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


def config_text(
    options: NewOptions,
    family: str,
    samples: Samples,
    chosen: dict[str, dict[str, Any]],
    path: Path,
) -> str:
    """Return the file's text.

    Args:
        options: The options of the command.
        family: The model's family.
        samples: The data that was found.
        chosen: The values that are not left to their defaults, by section.
        path: Where the file will be.
    """
    trains = (
        f"Trains {options.base} on {samples.usable or 'the'} {samples.what} of {samples.place}."
    )
    lines = [
        "# yaml-language-server: $schema=schema.json",
        f"# {one_line(trains)} To run it:",
        f"#     make train CONFIG={one_line(str(path))}",
        *(ALL_KEYS if options.all_keys else CHOSEN_KEYS),
        *samples.notes,
        "",
    ]
    own = {"run": options.name, "family": family, "base": options.base}
    lines += _fields(RunConfig, family, own, "", every=options.all_keys)
    for section, field in RunConfig.model_fields.items():
        model = field.annotation
        if section == "phases":
            lines += ["", *_phases(options, samples, chosen["train"]["global_batch_size"])]
            continue
        if section == "lora" and section in chosen:
            model = LoraConfig
        if isinstance(model, type) and issubclass(model, BaseModel):
            meaning = (model.__doc__ or "").partition("\n\n")[0]
            about = [f"# {meaning}"] if options.all_keys else []
            values = chosen.get(section, {})
            if body := [*_fields(model, family, values, section, every=options.all_keys)]:
                lines += ["", *about, f"{section}:", *(f"  {line}" for line in body)]
    return "\n".join(line for line in lines if line != "#lora: null" or "lora" not in chosen) + "\n"


def _fields(
    model: type[BaseModel], family: str, chosen: dict[str, Any], section: str, *, every: bool
) -> Iterator[str]:
    """Yield each chosen key with one line; of `every` key all that is said, defaults behind a #."""
    hidden = OF_OTHERS[FAMILIES[family].modality].get(section, ())
    for key, field in model.model_fields.items():
        others = key in ObjectiveConfig.model_fields and key not in FAMILIES[family].objective
        others |= key in hidden
        if field.description is None or key == "phases" or others:  # phases have a section
            continue
        if not every and key not in chosen:
            continue
        meaning = field.description if every else _short(f"{section}.{key}", field.description)
        yield from textwrap.wrap(meaning, 96, initial_indent="# ", subsequent_indent="# ")
        value = chosen.get(key, field.default)
        value = value.model_dump() if isinstance(value, BaseModel) else value
        yield f"{'' if key in chosen else '#'}{key}: {scalar(value)}"


def _short(key: str, description: str) -> str:
    """Return what a key means in one line: its first sentence, unless that is long."""
    return SHORT.get(key) or f"{description.partition('. ')[0].rstrip('.')}."


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
    first = [
        "phases:",
        "  # A stretch of training; the next one of the list continues where it ends.",
        "  - name: plain",
        *(comment or ["    # Steps, epochs or samples from the start of the run."]),
        f"    until: {until}",
        "    # torch is plain PyTorch; zero2_offload keeps the optimizer in the host's memory.",
        "    launch: torch",
    ]
    if not options.all_keys:
        return first
    return [
        "# Stretches of training, each with its own launch; the next continues where one ends. To",
        "# train longer raise `until`, or append a phase: only the new steps are trained.",
        *first,
        "  # Then the same model under DeepSpeed; a phase may change any key of `train`:",
        "  #- name: offload",
        f"  #  until: {(2 * Decimal(amount)).normalize():f} {unit}",
        "  #  launch: zero2_offload",
        "  #  learning_rate: 5.0e-6",
    ]
