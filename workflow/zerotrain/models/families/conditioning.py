"""How base models use conditioning images; without torch.

This depends on the class in a base's model_index.json. Sources: the pipelines of diffusers, and for
plain bases that learn to read further images (in-context control) DiffSynth-Studio's units
QwenImageUnit_EditImageEmbedder and FluxImageUnit_Kontext.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.errors import PipelineError
from zerotrain.models.families.layouts import LAYOUTS
from zerotrain.models.pretrained import read_config

if TYPE_CHECKING:
    from zerotrain.config.data import DataConfig


@dataclass(frozen=True)
class Conditioning:
    """A base model's use of the conditioning images of a sample.

    Attributes:
        least: Minimum of images per sample; 0 if the base trains without them, too.
        most: Maximum of images per sample, equal to `least`; None for any number.
        in_prompt: Whether the embeddings of a caption depend on them, too.
        in_latents: Whether the denoiser reads them as latents.
    """

    least: int
    most: int | None
    in_prompt: bool = False
    in_latents: bool = True

    def describe(self) -> str:
        """Return the number of images that it takes in words, as a minimum or exactly."""
        if self.most is None:
            return f"at least {name_count(self.least)}"
        return name_count(self.most)


IMAGE_EMBEDDER, IMAGE_ENCODER = LAYOUTS["flux"].extra_parts
REDUX = "FluxPriorReduxPipeline"
"""FLUX.1 Redux: a FluxPipeline whose folder has the parts of this pipeline as well."""
CONDITIONING: dict[str, dict[str, Conditioning]] = {
    "qwen_image": {
        "QwenImagePipeline": Conditioning(0, None),
        "QwenImageEditPipeline": Conditioning(1, 1, in_prompt=True),
        "QwenImageEditPlusPipeline": Conditioning(1, None, in_prompt=True),
    },
    "flux": {
        "FluxPipeline": Conditioning(0, None),
        "FluxKontextPipeline": Conditioning(0, None),
        "FluxFillPipeline": Conditioning(2, 2),
        REDUX: Conditioning(
            1,
            1,
            in_prompt=True,
            in_latents=False,
        ),
    },
}
"""By family and by the pipeline's class. FluxFillPipeline takes the image and the mask of the area
to fill."""
CONDITIONED_PRESETS = {
    "qwen_image": "QwenImageEditPlusPipeline",
    "flux": "FluxKontextPipeline",
}
"""The pipeline of a family's small models if samples have conditioning images."""
HINT = "set data.conditioning_images or data.conditioning_columns (docs/conditioning.md)"


def read_pipeline(base: Path) -> str | None:
    """Return the pipeline's class that a folder's model_index.json names; None without one.

    A FluxPipeline with the parts of FLUX.1 Redux is a FluxPriorReduxPipeline here.

    Raises:
        OSError: the folder has no model_index.json.
        ValueError: it is not JSON.
    """
    index = read_config(base / "model_index.json")
    found = index.get("_class_name") if isinstance(index, dict) else None
    if found == "FluxPipeline" and (base / IMAGE_EMBEDDER).is_dir():
        return REDUX
    return found if isinstance(found, str) else None


def read_conditioning(family: str, base: Path) -> Conditioning | None:
    """Return how a base uses conditioning images; None if it has no input for them.

    Raises:
        OSError: the folder has no model_index.json.
        ValueError: it is not JSON.
    """
    return CONDITIONING.get(family, {}).get(read_pipeline(base) or "")


def check_conditioning(found: Conditioning | None, count: int, base: str) -> None:
    """Check that a base takes the number of conditioning images that each sample has.

    Args:
        found: How the base uses them.
        count: Conditioning images of each sample.
        base: Name of the base in messages: `base` of the configuration.

    Raises:
        PipelineError: the base takes none, or another number.
    """
    if found is None:
        if count:
            raise PipelineError(
                f"base: {base} has no input for conditioning images, and the data has {count} for "
                "each sample",
                hint="remove data.conditioning_images and data.conditioning_columns, or choose a "
                "base that reads them: docs/conditioning.md lists them",
            )
        return
    if count < found.least or (found.most is not None and count > found.most):
        raise PipelineError(
            f"base: {base} takes {found.describe()} for each sample, and the data has "
            f"{count or 'none'}",
            hint=HINT if count < found.least else "give fewer folders or columns, or another base",
        )


def check_crops(found: Conditioning | None, count: int, data: DataConfig, base: str) -> None:
    """Check that a base takes several crops of an image with its conditioning images.

    Args:
        found: How the base uses conditioning images.
        count: Conditioning images of each sample.
        data: The section `data` of the configuration.
        base: Name of the base in messages: `base` of the configuration.

    Raises:
        PipelineError: its text encoder sees them: a caption would be encoded for every crop.
    """
    crops = data.aspect_buckets.crop_variants if data.aspect_buckets else 1
    if found is not None and found.in_prompt and count and crops > 1:
        raise PipelineError(
            f"data.aspect_buckets.crop_variants: {crops}, and the text encoder of base: {base} "
            "sees conditioning images, of which a caption is encoded with one crop",
            hint="set it to 1, or choose a base whose text encoder sees none: "
            "docs/conditioning.md lists them",
        )


def check_sampling(folder: Path, count: int, key: str) -> None:
    """Check that the model of a folder samples with this number of conditioning images.

    Args:
        folder: Folder of a base or of weights; one without model_index.json has no input for them.
        count: Conditioning images of a prompt.
        key: The option or configuration key that names them.

    Raises:
        PipelineError: it has no input for them, or takes another number.
    """
    named = read_pipeline(folder) if (folder / "model_index.json").is_file() else None
    found = {name: one for of in CONDITIONING.values() for name, one in of.items()}.get(named or "")
    if found is None and count:
        raise PipelineError(
            f"{key}: {folder} has no input for conditioning images" + (f" ({named})" * bool(named)),
            hint=f"remove {key}, or take weights that read them: docs/conditioning.md",
        )
    if found is None or (count >= found.least and (found.most is None or count <= found.most)):
        return
    raise PipelineError(
        f"{key}: {folder} ({named}) takes {found.describe()} for each prompt, and "
        f"{count or 'none'} {'is' if count < 2 else 'are'} given",
        hint=f"give each prompt {found.describe()}",
    )


def name_count(count: int) -> str:
    """Return a number of conditioning images in words."""
    return f"{count} conditioning image{'' if count == 1 else 's'}"
