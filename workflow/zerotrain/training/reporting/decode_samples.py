"""Decodes the latents that a training sampled.

python -m zerotrain.training.reporting.decode_samples FOLDER

The training starts it as a separate process, on the CPU and at the lowest priority. Next to each
step-<step>.safetensors it writes
    step-00000100.png     a row of images for each prompt, like the grid of an evaluation
    step-00000100/        the single images
    steps.png             the first image of each prompt, a column per step
and adds each grid to TensorBoard's folder as a separate run, `samples`.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field
from safetensors import safe_open

from zerotrain.artifact.documents import check_type, parse_json, read_header
from zerotrain.data.sheets import (
    BACKGROUND,
    GRID_GAP,
    LABEL_FONT_SIZE,
    LABEL_INK,
    LABEL_WIDTH,
    draw_grid,
    grid_cell_size,
)
from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.machine.child_process import end_with_parent
from zerotrain.machine.disk_errors import writing
from zerotrain.machine.regular_file import make_folder, open_new, open_to_read

if TYPE_CHECKING:
    from zerotrain.models.families.diffusion import DiffusionFamily

FOLDER = "samples"
MOST_STEPS = 8
"""Columns of steps.png: the first step and the newest ones."""


PROGRAM = "zerotrain.training.reporting.decode_samples"


@dataclass(frozen=True)
class _Sampled:
    """What latents were sampled of: the metadata of their file."""

    prompts: list[str]
    columns: Annotated[int, Field(gt=0)]
    step: Annotated[int, Field(ge=0, lt=2**62)]


def main(argv: list[str] | None = None) -> None:
    """Decode a folder's latents that have no images yet."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the sampled latents")
    parser.add_argument("--family", required=True, help="the model's family")
    parser.add_argument("--base", type=Path, required=True, help="folder of the base model")
    arguments = parser.parse_args(argv)
    end_with_parent()  # else it would decode at the same time as the next start's process
    os.nice(19)
    from zerotrain.models.families import load_family

    family = load_family(arguments.family)
    assert family.modality == "image"
    try:
        with writing(arguments.folder):
            decode(arguments.folder, family, arguments.base, "cpu")
    except PipelineError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def list_undecoded(folder: Path) -> list[Path]:
    """Return latents without a grid, or with a grid of earlier latents, by step."""
    return [path for path in sorted(folder.glob("step-*.safetensors")) if not _has_grid(path)]


def decode(folder: Path, family: DiffusionFamily, base: Path, device: str) -> None:
    """Decode all latents without images, on a device."""
    while waiting := list_undecoded(folder):
        path = waiting[0]
        about = _read_sampled(path)
        with safe_open(path, framework="pt") as opened:
            latents = opened.get_tensor("latents")
        images = family.decode_latents(base, latents, device)
        columns, prompts = about.columns, about.prompts
        rows = [images[start : start + columns] for start in range(0, len(images), columns)]
        make_folder(path.with_suffix(""))
        for number, row in enumerate(rows):
            for column, image in enumerate(row):
                _save(image, path.with_suffix("") / f"{number:02d}-{column:02d}.png")
        grid = draw_grid(prompts, rows)
        _show(grid, folder.parent / "tensorboard" / FOLDER, about.step)
        _save(grid, path.with_suffix(".png"))
        _save(_over_steps(folder, prompts), folder / "steps.png")


def _read_sampled(path: Path) -> _Sampled:
    metadata = read_header(path).metadata
    prompts = parse_json(metadata.get("prompts", "null"), path)
    return check_type({**metadata, "prompts": prompts}, _Sampled, path)


def _has_grid(path: Path) -> bool:
    grid = path.with_suffix(".png")
    return grid.is_file() and grid.stat().st_mtime_ns >= path.stat().st_mtime_ns


def _show(grid: Image.Image, board: Path, step: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    make_folder(board.parent)
    make_folder(board)
    # A second event file in the training's own folder would end TensorBoard's reading of it.
    with SummaryWriter(str(board)) as writer:
        writer.add_image("samples", np.asarray(grid), step, dataformats="HWC")


def _over_steps(folder: Path, prompts: list[str]) -> Image.Image:
    """Draw the first image of each prompt, a column for each step that had the same prompts."""
    steps = []
    for path in sorted(folder.glob("step-*.safetensors")):
        if _read_sampled(path).prompts == prompts and path.with_suffix(".png").is_file():
            steps.append(path)
    steps = [*steps[:1], *steps[1:][1 - MOST_STEPS :]]
    rows = [
        [_open(path.with_suffix("") / f"{number:02d}-00.png") for path in steps]
        for number in range(len(prompts))
    ]
    grid = draw_grid(prompts, rows)
    head = LABEL_FONT_SIZE + 2 * GRID_GAP
    whole = Image.new("RGB", (grid.width, grid.height + head), BACKGROUND)
    whole.paste(grid, (0, head))
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default(LABEL_FONT_SIZE)
    for column, path in enumerate(steps):
        left = LABEL_WIDTH + GRID_GAP + column * (grid_cell_size(rows[0][0].size)[0] + GRID_GAP)
        draw.text((left, GRID_GAP), f"step {int(path.stem[5:])}", fill=LABEL_INK, font=font)
    return whole


def _open(path: Path) -> Image.Image:
    with open_to_read(path) as stream:
        image = Image.open(stream, formats=["PNG"])
        image.load()
    return image


def _save(image: Image.Image, path: Path) -> None:
    new = path.with_name(f".{path.name}.new")
    with open_new(new) as stream:
        image.save(stream, format="PNG")
    new.replace(path)


if __name__ == "__main__":
    main()
