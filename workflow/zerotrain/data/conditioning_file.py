"""Conditioning images as files: those that a user gives with prompts, and which are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.artifact.documents import DocumentError, read_bytes
from zerotrain.data.listing import check_usable_path
from zerotrain.data.source import MOST_IMAGE_BYTES, BadImageError
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from PIL.Image import Image


def prompt_files(images: Iterable[Sequence[str]], key: str) -> list[str]:
    """List the files of the conditioning images of all prompts, each once, sorted.

    Args:
        images: The files of each prompt; relative paths start from the working directory.
        key: The key of the configuration that names them.

    Raises:
        PipelineError: a file is missing, or its name is not UTF-8.
    """
    files = sorted({str(Path(file).expanduser()) for of_prompt in images for file in of_prompt})
    for file in files:
        if not Path(file).is_file():
            raise PipelineError(
                f"{key}: {file}: no such file",
                hint="relative paths count from where snakemake runs",
            )
        check_usable_path(Path(file), key)
    return files


def read_conditioning_images(files: Sequence[str | Path], key: str) -> list[Image]:
    """Read files as upright RGB, as prepare_dataset reads those of a dataset.

    Args:
        files: Image files; relative paths start from the working directory.
        key: The option or the key of the configuration that names them.

    Raises:
        PipelineError: a file is missing, is not a readable image, or has transparent pixels.
    """
    from zerotrain.data.decode import decode

    found = []
    for file in files:
        try:
            content = read_bytes(Path(file).expanduser(), most=MOST_IMAGE_BYTES, follow_links=True)
            found.append(decode(content))
            check_opaque(content)
        except (OSError, DocumentError, BadImageError) as error:
            why = getattr(error, "strerror", None) or getattr(error, "why", error)
            raise PipelineError(
                f"{key}: {file}: {why}", hint="give image files (.png, .jpg, .webp, ...)"
            ) from error
    return found


def check_opaque(data: bytes) -> None:
    """Check that an image is opaque: over white, a mask on a transparent background is all white.

    Args:
        data: The file's bytes, as for decode.

    Raises:
        BadImageError: a pixel is not fully opaque.
    """
    from zerotrain.data.transparency import read_alpha

    if read_alpha(data) is not None:
        raise BadImageError("has transparent pixels; save it without an alpha channel")
