"""How base models use conditioning images; without torch.

This depends on the class in a base's model_index.json. Sources: the pipelines of diffusers, and for
plain bases that learn to read further images (in-context control) DiffSynth-Studio's units
QwenImageUnit_EditImageEmbedder and FluxImageUnit_Kontext.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.config.families import FAMILIES, Conditioning
from zerotrain.errors import PipelineError
from zerotrain.models.pretrained import read_config

if TYPE_CHECKING:
    from zerotrain.config.data import DataConfig


IMAGE_EMBEDDER, IMAGE_ENCODER = FAMILIES["flux"].extra_parts
REDUX = FAMILIES["flux"].extra_pipeline
"""FLUX.1 Redux: a FluxPipeline whose folder has the parts of this pipeline as well."""
HINT = "set data.conditioning_images or data.conditioning_columns (docs/conditioning.md)"


def read_pipeline(base: Path) -> str | None:
    """Return the pipeline's class that a folder's model_index.json names; None without one.

    A pipeline with a family's extra parts is its extra pipeline here.

    Raises:
        OSError: the folder has no model_index.json.
        ValueError: it is not JSON.
    """
    index = read_config(base / "model_index.json")
    found = index.get("_class_name") if isinstance(index, dict) else None
    for spec in FAMILIES.values():
        first = next(iter(spec.extra_parts), None)
        if first and found == spec.pipeline and (base / first).is_dir():
            return spec.extra_pipeline
    return found if isinstance(found, str) else None


def read_conditioning(family: str, base: Path) -> Conditioning | None:
    """Return how a base uses conditioning images; None if it has no input for them.

    Raises:
        OSError: the folder has no model_index.json.
        ValueError: it is not JSON.
    """
    return FAMILIES[family].conditioning.get(read_pipeline(base) or "")


def takes_fill(config: Mapping[str, Any]) -> bool:
    """Return whether a Flux takes a masked image and its mask next to noisy latents (FLUX.1 Fill).

    Args:
        config: The transformer's config.json.
    """
    taken: int = config["in_channels"]
    return 4 * FAMILIES["flux"].latent_channels(config) < taken and not takes_control(config)


def takes_control(config: Mapping[str, Any]) -> bool:
    """Return whether a Flux takes a masked image, a mask and a control image, as FLEX.2 does."""
    taken: int = config["in_channels"]
    return taken == 4 * (3 * FAMILIES["flux"].latent_channels(config) + 1)


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
    if not found.takes(count):
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
    known = {name: one for spec in FAMILIES.values() for name, one in spec.conditioning.items()}
    found = known.get(named or "")
    if found is None and count:
        raise PipelineError(
            f"{key}: {folder} has no input for conditioning images" + (f" ({named})" * bool(named)),
            hint=f"remove {key}, or take weights that read them: docs/conditioning.md",
        )
    if found is None or found.takes(count):
        return
    raise PipelineError(
        f"{key}: {folder} ({named}) takes {found.describe()} for each prompt, and "
        f"{count or 'none'} {'is' if count < 2 else 'are'} given",
        hint=f"give each prompt {found.describe()}",
    )
