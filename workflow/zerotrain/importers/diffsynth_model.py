"""DiffSynth-Studio's base model, its training loss, and its inputs besides captions.

The parts of a model (--model_id_with_origin_paths) have the same form as in `base`
(zerotrain.models.composed_base), with parts as folders in diffusers' layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.program import put_run
from zerotrain.models.families.conditioning import IMAGE_EMBEDDER

FAMILIES = {
    "qwen-image": "qwen_image",
    "firered-image": "qwen_image",
    "flux.1": "flux",
    "flex.2": "flux",
    "stable-diffusion-xl": "sdxl",
    "stable-diffusion-3": "sd3",
}
"""Prefixes of model names in hub ids, and our families."""

SHIFTS = {"qwen_image": 2.2255, "flux": 3.0}
"""diffsynth/diffusion/flow_match.py: e^0.8, and 3."""

LEAST_NOISE = {"qwen_image": (0.002, 0.02), "flux": (0.003, 0.009)}
"""Least noise after the shift: of the 1,000 evenly spaced timesteps here, and of its schedules.
Qwen-Image's is stretched to 0.02; Flux's starts at 0.003 / 1.002 before the shift."""

ORIGINAL_FILES = {
    r"(flux1-[\w-]+|Flex\.2-preview)\.safetensors": "transformer/*.safetensors",
    r"ae\.safetensors": "vae/*.safetensors",
}
"""Single files of Black Forest Labs and ostris, and the same weights in the same repository."""

PLAIN = "Qwen/Qwen-Image:model_index.json"
"""Turns an editing model into one that reads only captions, as in training without images."""


def put_model(
    prepare: list[dict[str, Any]],
    arguments: dict[str, Any],
    result: ImportedConfig,
    where: str,
    *,
    whole: bool,
) -> None:
    """Set the base; with `whole`, for commands without a denoiser, the whole repository."""
    name = "model_id_with_origin_paths"
    parts = [a[name] for a in (*prepare, arguments) if name in a]
    given = ",".join(parts) or arguments.get("model_paths")
    if given is None:
        raise PipelineError(f"{where}: no --{name}", hint="paste the whole command line")
    base = _whole_repository(name, str(given), result) if whole else str(given)
    repo = base if whole else str(arguments.get(name, given)).partition(":")[0]
    model = repo.rpartition("/")[2].casefold()
    family = next((f for start, f in FAMILIES.items() if model.startswith(start)), None)
    if family is None:
        raise PipelineError(
            f"{where}: {repo} is of no family that zerotrain trains",
            hint=f"families: {', '.join(sorted(set(FAMILIES.values())))}",
        )
    if parts and not whole:
        base = ",".join(map(_part, base.split(",")))
        if re.match(EDITS, model) and not arguments.get(NAME):
            base += f",{PLAIN}"
        reason = "the same parts in diffusers' layout" if base != given else ""
        if len(parts) > 1:
            reason = "the parts of both commands are one model"
        for part in parts:
            result.keep(name, part, "base", base, reason)
    elif not whole:
        result.keep("model_paths", given, "base")
    result.assume("family", family, f"by its name, {repo}")
    _put_objective(family, result, captions=reads_captions(arguments))
    put_run(arguments.get("output_path"), repo, result, "output_path")
    result.attempt(put_inputs, arguments, model, result)


def _whole_repository(name: str, parts: str, result: ImportedConfig) -> str:
    repositories = {part.partition(":")[0] for part in parts.split(",")}
    if len(repositories) != 1:
        raise PipelineError(
            f"{name}: the encoders are of {' and '.join(sorted(repositories))}, and nothing names "
            "the denoiser",
            hint="paste the sft:train command as well",
        )
    base = repositories.pop()
    result.keep(name, parts, "base", base, "the whole repository: the phase needs its denoiser")
    return base


def _put_objective(family: str, result: ImportedConfig, *, captions: bool) -> None:
    """Set the training loss, which no flag names."""
    if family in SHIFTS:
        result.assume(
            "train.weighting_scheme", "gaussian",
            "DiffSynth-Studio draws timesteps equally often, and weighs the middle ones higher",
        )  # fmt: skip
        result.assume("train.flow_shift", SHIFTS[family], "DiffSynth-Studio's own, at every size")
        least, theirs = LEAST_NOISE[family]
        result.note(
            "changed", "flow schedule", None,
            f"the least noise is {least}; DiffSynth-Studio's schedule ends at {theirs}",
        )  # fmt: skip
    ours = "cache.max_sequence_length"
    if family == "flux":
        result.assume(ours, 512, "DiffSynth-Studio's tokens of T5")
    if family == "qwen_image":
        reason = "all that the base takes; DiffSynth-Studio cuts a caption at 4096 tokens"
        result.put("changed", ours, None, ours, 1024, reason)
    if family == "sdxl":
        result.note(
            "changed", "time_ids", None,
            "size and crop of the image file; DiffSynth-Studio says the trained size, uncut",
        )  # fmt: skip
    ours = "train.caption_dropout_probability"
    if captions:
        result.assume(ours, 0.0, "DiffSynth-Studio drops no caption")
    else:
        result.assume(
            ours, 1.0,
            "with flux_redux_image DiffSynth-Studio reads zeros in place of every caption, as the "
            "empty one is here",
        )  # fmt: skip


def _part(part: str) -> str:
    """Return PLACE:FILES in the form of `base`."""
    place, colon, files = part.rpartition(":")
    for original, ours in ORIGINAL_FILES.items():
        if re.fullmatch(original, files):
            return f"{place}{colon}{ours}"
    return part


NAME, FLAG = "extra_inputs", "zero_cond_t"
EDITS, FILLS = r"(qwen|firered)-image-edit", r"flux\.1-fill"
ONE_IMAGE, NEW_TIMESTEP = "qwen-image-edit", "qwen-image-edit-2511"
"""The editing models that read one image, and that see conditioning images without noise.

Of all scripts in examples/qwen_image at fed7b18f only those of Edit-2511 pass --zero_cond_t; those
of FireRed-Image-Edit-1.0 and -1.1, and docs/en/Model_Details/Qwen-Image.md, do not mention it."""
REDUX = "flux_redux_image"
SIDE = 1024
"""It scales edited images to the area of this square, whatever the trained size."""


@dataclass(frozen=True)
class Inputs:
    """Columns that one kind of base reads."""

    columns: tuple[str, ...]
    """In the order in which the model reads them here."""
    family: str
    bases: str
    """A regular expression for the beginning of its name."""


TABLE = (
    Inputs(("edit_image",), "qwen_image", EDITS),
    Inputs(("context_image",), "qwen_image", "qwen-image(?!-edit)"),
    Inputs(("kontext_images",), "flux", r"flux\.1-(?!fill)"),
    Inputs((REDUX,), "flux", r"flux\.1-(?!fill|kontext)"),
    Inputs(("flux_fill_image", "flux_fill_mask"), "flux", FILLS),
)


def input_columns(arguments: Mapping[str, Any]) -> list[str]:
    """Return the columns of the inputs next to captions."""
    return [word.strip() for word in str(arguments.get(NAME, "")).split(",") if word.strip()]


def put_inputs(arguments: Mapping[str, Any], model: str, result: ImportedConfig) -> None:
    """Set the columns of conditioning images.

    Args:
        arguments: The flags of the training.
        model: The name of its denoiser, without the owner, in lower case.
        result: Receives the columns; has the family and the resolution.

    Raises:
        PipelineError: inputs are not conditioning images, or the model does not read them or lacks
            required ones.
    """
    columns = input_columns(arguments)
    known = next((one for one in TABLE if {*one.columns} == {*columns}), None)
    if columns and (known is None or known.family != result.values.get("family")):
        raise PipelineError(
            f"{NAME}: {','.join(columns)!r} cannot be honoured: no conditioning images that a base "
            "reads here",
            hint="taken are " + "; ".join(",".join(one.columns) for one in TABLE)
            + f"; `--skip {NAME}` imports the rest, if the training is meant without them",
        )  # fmt: skip
    if known is not None and not re.match(known.bases, model):
        raise PipelineError(
            f"{NAME}: {','.join(columns)} belongs to another model than {model}",
            hint="name the base that reads these images",
        )
    if known is None and re.match(FILLS, model):
        raise PipelineError(
            f"{NAME}: {model} without an image and a mask would be trained to fill all of it",
            hint=f"--{NAME} flux_fill_image,flux_fill_mask names the columns of both",
        )
    if known is not None and REDUX in columns and IMAGE_EMBEDDER not in result.values["base"]:
        raise PipelineError(
            f"{NAME}: {REDUX} is read by image_encoder and image_embedder, and the base has none",
            hint="add black-forest-labs/FLUX.1-Redux-dev:image_encoder/model.safetensors and "
            "black-forest-labs/FLUX.1-Redux-dev:image_embedder/diffusion_pytorch_model.safetensors",
        )
    _check_timestep(bool(arguments.get(FLAG)), model, result)
    if known is None:
        return
    ours = "data.conditioning_columns"
    result.keep(NAME, arguments[NAME], ours, list(known.columns))
    if known.columns == ("edit_image",):
        _put_edit(arguments, model, result)
    if known.columns == (REDUX,):
        result.note(
            "changed", REDUX, None,
            "its centre square, at the trained size, is scaled to 384 x 384 and normalised in "
            "float32; DiffSynth-Studio squeezes the whole image and normalises it in bf16",
        )  # fmt: skip


def reads_captions(arguments: Mapping[str, Any]) -> bool:
    """Return whether the model reads captions; Redux's tokens follow zeros instead."""
    return REDUX not in str(arguments.get(NAME, ""))


def _check_timestep(given: bool, model: str, result: ImportedConfig) -> None:
    """Check the flag against the model, whose config.json has it here."""
    if given != model.startswith(NEW_TIMESTEP):
        there = "it" if given else f"--{FLAG}"
        raise PipelineError(
            f"{FLAG}: {model} is trained {'with' if given else 'without'} {there}, and its "
            f"config.json says {'nothing of it' if given else 'that it has it'}",
            hint=f"{'remove' if given else 'give'} --{FLAG}: it belongs to Qwen-Image-Edit-2511",
        )
    if given:
        result.ignore(FLAG, True, "the base's config.json says it")


def _put_edit(arguments: Mapping[str, Any], model: str, result: ImportedConfig) -> None:
    """Report differences in scale; refuse a table whose cells the model cannot read."""
    table = str(arguments.get("dataset_metadata_path", ""))
    if model == ONE_IMAGE:
        # In a CSV a cell is one file name there, so the prompt is for one image.
        listed = "where a cell is a list, DiffSynth-Studio takes the prompt of Qwen-Image-Edit-2509"
        reasons = [] if table.endswith(".csv") else [listed]
    else:
        if table.endswith(".csv"):
            raise PipelineError(
                f"dataset_metadata_path: {table} holds no lists, and of a single edit_image "
                f"DiffSynth-Studio makes the prompt of Qwen-Image-Edit, not that of {model}",
                hint="give a .json or .jsonl whose edit_image is a list, also of one image",
            )
        reasons = [
            "the text encoder's copy is scaled by diffusers' filter, Lanczos instead of cubic"
        ]
    side = result.values.get("train.resolution", SIDE)
    if side != SIDE:
        reasons.append(f"scaled to {side} x {side}, as the image is, instead of {SIDE} x {SIDE}")
    if reasons:
        result.note("changed", "edit_image", None, "; ".join(reasons))
