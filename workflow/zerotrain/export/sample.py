"""zerotrain sample: images of a prompt from exported weights of any format."""

from __future__ import annotations

import re
import sys
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain import artifact
from zerotrain.artifact import replacing
from zerotrain.artifact.documents import read_bytes
from zerotrain.config.models import EvaluateConfig
from zerotrain.data.conditioning import read_conditioning_images
from zerotrain.errors import PipelineError
from zerotrain.export.options import SampleOptions
from zerotrain.machine.disk_errors import check_writable
from zerotrain.machine.regular_file import write_bytes
from zerotrain.models.families.conditioning import check_sampling

if TYPE_CHECKING:
    from PIL.Image import Image


def sample(options: SampleOptions) -> list[Path]:
    """Write PNG files; the image of a seed does not depend on how many are made.

    Existing images are kept: another image of the same prompt and seed, from other weights, gets
    the next free number.

    Returns:
        The files; for an image that exists already, bit for bit, the existing file.

    Raises:
        PipelineError: the weights cannot be opened, they take another number of conditioning
            images, one of these cannot be read, or nothing can be written in `out`.
    """
    check_writable(options.out)
    images_read = read_conditioning_images(options.image or (), "--image")
    from zerotrain.export.formats.opening import open_pipeline
    from zerotrain.machine.device import device_type

    check_sampling(options.base or options.weights, len(images_read), "--image")
    family, pipeline = open_pipeline(options.weights, options.base, device_type())
    seeds = [options.seed + place for place in range(options.number)]
    # One at a time: the last bits depend on the batch size.
    values = EvaluateConfig(
        num_inference_steps=options.steps, guidance_scale=options.guidance, batch_size=1
    )
    size = options.size
    try:
        images = family.draw(
            pipeline,
            [options.prompt] * options.number,
            seeds,
            values,
            resolution=size,
            conditioning=[images_read] * options.number if images_read else None,
            **trained_prompts(options.weights),
        )
    except ValueError as error:  # the pipelines check the side themselves
        if size is None:
            raise
        raise PipelineError(
            f"--resolution {options.resolution}: {error}", hint="choose another, or omit it"
        ) from error
    if size is not None and images[0].size != size:
        width, height = images[0].size
        print(f"--resolution: made {width}x{height} pixels, the next that it can", file=sys.stderr)
    name = file_name(options.prompt)
    return [
        save_image(image, options.out / f"{name}-{seed}.png", overwrite=options.overwrite)
        for seed, image in zip(seeds, images, strict=True)
    ]


def save_image(image: Image, file: Path, *, overwrite: bool = False) -> Path:
    """Write a PNG file without replacing another image, unless `overwrite` is set.

    Args:
        image: The image.
        file: Its name if that is free; otherwise NAME-2.png, NAME-3.png, ...
        overwrite: Write to `file` in any case.

    Returns:
        The file with the image; an existing one with the same bytes is left unchanged.
    """
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    content, name = buffer.getvalue(), file
    for number in count(2):
        if overwrite or not name.exists():
            break
        if (
            name.is_file()
            and name.stat().st_size == len(content)
            and read_bytes(name, most=len(content), follow_links=True) == content
        ):
            return name
        name = file.with_stem(f"{file.stem}-{number}")
    with replacing(name) as new:
        write_bytes(new, content)
    return name


def trained_prompts(weights: Path) -> dict[str, Any]:
    """Read from the manifest of exported weights how they were trained to read prompts.

    Returns:
        max_sequence_length and long_captions, as `draw` of an image family takes them.
    """
    from zerotrain.export.formats.opening import OPENED

    folder = weights if weights.is_dir() else weights.parent
    if artifact.kind_of(folder) not in OPENED:
        return {}
    content = artifact.read(folder, OPENED, verify=False).content
    return {key: content[key] for key in ("max_sequence_length", "long_captions") if key in content}


def file_name(prompt: str) -> str:
    """Return the prompt's words as the start of a file's name."""
    return "-".join(re.findall(r"\w+", prompt.lower()))[:60] or "image"
