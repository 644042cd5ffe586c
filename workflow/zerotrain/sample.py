"""zerotrain sample: images of a prompt, made by exported weights of any format."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import replacing
from zerotrain.config import EvaluateConfig
from zerotrain.disk_errors import check_writable
from zerotrain.errors import PipelineError


def sample(
    weights: Path,
    prompt: str,
    output: Path,
    *,
    number: int,
    seed: int,
    steps: int,
    guidance: float | None,
    resolution: int | None,
    base: Path | None,
) -> list[Path]:
    """Write PNG files; the one of a seed is the same however many are made.

    Args:
        weights: Exported weights: see zerotrain.formats.opening.open_pipeline.
        prompt: What the images are to show.
        output: Folder of the images, which are named by prompt and seed.
        number: Images to make, of seed, seed + 1, and so on.
        seed: Seed of the first.
        steps: Denoising steps.
        guidance: Scale of the guidance; default: the pipeline's own.
        resolution: Side in pixels; default: the model's own.
        base: The base model, where `weights` is a part of one.

    Returns:
        The files.

    Raises:
        PipelineError: a number is none that can be, or the weights cannot be opened,
            or nothing can be written in `output`.
    """
    for option, value, least in (
        ("-n", number, 1),
        ("--steps", steps, 1),
        ("--seed", seed, 0),
        ("--guidance", guidance, 0),
    ):
        if value is not None and value < least:
            raise PipelineError(f"{option}: {value} is too small", hint=f"{least} or more")
    check_writable(output)
    from zerotrain.formats.opening import open_pipeline
    from zerotrain.machine.device import device_type

    family, pipeline = open_pipeline(weights, base, device_type())
    seeds = [seed + place for place in range(number)]
    # One at a time: in a batch of another size the last bits are others.
    values = EvaluateConfig(num_inference_steps=steps, guidance_scale=guidance, batch_size=1)
    length = trained_prompt_length(weights)
    try:
        images = family.draw(  # type: ignore[attr-defined]
            pipeline,
            [prompt] * number,
            seeds,
            values,
            resolution=resolution,
            max_sequence_length=length,
        )
    except ValueError as error:  # the pipelines check the side themselves
        if resolution is None:
            raise
        raise PipelineError(
            f"--resolution {resolution}: {error}", hint="choose another, or leave it away"
        ) from error
    if resolution is not None and images[0].width != resolution:
        print(f"--resolution: made {images[0].width} pixels, the next that it can", file=sys.stderr)
    files = [output / f"{file_name(prompt)}-{which}.png" for which in seeds]
    for file, image in zip(files, images, strict=True):
        with replacing(file) as new:
            image.save(new, format="PNG")
    return files


def trained_prompt_length(weights: Path) -> int | None:
    """Tokens of a prompt that exported weights were trained with, as their manifest says."""
    from zerotrain.formats.opening import OPENED

    folder = weights if weights.is_dir() else weights.parent
    if artifact.kind_of(folder) not in OPENED:
        return None
    found = artifact.read(folder, OPENED, verify=False)
    length: int | None = found.content.get("max_sequence_length")
    return length


def file_name(prompt: str) -> str:
    """The prompt's words as the start of a file's name."""
    return "-".join(re.findall(r"\w+", prompt.lower()))[:60] or "image"
