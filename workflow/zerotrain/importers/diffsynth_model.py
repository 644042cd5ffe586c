"""DiffSynth-Studio's base model and its training loss.

The parts of a model (--model_id_with_origin_paths) have the same form as in `base`
(zerotrain.models.composed_base), with parts as folders in diffusers' layout.
"""

from __future__ import annotations

import re
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.arguments import name_of
from zerotrain.importers.diffsynth_inputs import EDITS, put_inputs, reads_captions
from zerotrain.importers.imported_config import ImportedConfig

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
        base = in_our_layout(base, model, bool(arguments.get("extra_inputs")))
        reason = "the same parts in diffusers' layout" if base != given else ""
        if len(parts) > 1:
            reason = "the parts of both commands are one model"
        for part in parts:
            result.keep(name, part, "base", base, reason)
    elif not whole:
        result.keep("model_paths", given, "base")
    result.assume("family", family, f"by its name, {repo}")
    _put_objective(family, result, captions=reads_captions(arguments))
    output = arguments.get("output_path")
    if output is not None:
        result.keep(
            "output_path", output, "run", name_of(output), "results lie under results/<run>"
        )
    else:
        result.assume("run", name_of(repo), "named by its model")
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


def in_our_layout(parts: str, model: str, conditioned: bool) -> str:
    """Return the parts in the form of `base`.

    Args:
        parts: PLACE:FILES,PLACE:FILES.
        model: The name of the denoiser's repository, without the owner, in lower case.
        conditioned: Whether the training has additional inputs.
    """
    found = [_part(part) for part in parts.split(",")]
    if re.match(EDITS, model) and not conditioned:
        found.append(PLAIN)
    return ",".join(found)


def _part(part: str) -> str:
    place, colon, files = part.rpartition(":")
    for original, ours in ORIGINAL_FILES.items():
        if re.fullmatch(original, files):
            return f"{place}{colon}{ours}"
    return part
