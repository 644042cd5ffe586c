"""Keys of cached tensors: digests of everything that their numbers depend on."""

from __future__ import annotations

from collections.abc import Mapping

from zerotrain.artifact import digest
from zerotrain.cache.layout import FORMAT


def latents_key(
    image_sha256: str,
    crop: tuple[int, int, int],
    resolution: int,
    *,
    parts: Mapping[str, str],
    dtype: str,
    code: str,
) -> str:
    """Key of an image's latents.

    Args:
        image_sha256: Digest of the image.
        crop: Left, top and side of the square that is encoded.
        resolution: Side in pixels that the square is scaled to.
        parts: Digests of the model's parts that encode images.
        dtype: Type of the stored tensor.
        code: Digest of the code that decodes, crops and encodes.
    """
    return digest(["latents", FORMAT, image_sha256, crop, resolution, dict(parts), dtype, code])


def text_key(
    caption_sha256: str,
    *,
    parts: Mapping[str, str],
    dtype: str,
    code: str,
    encoder_dtype: str,
    max_sequence_length: int | None,
) -> str:
    """Key of a caption's embeddings.

    Args:
        caption_sha256: Digest of the caption.
        parts: Digests of the model's parts that encode text.
        dtype: Type of the stored tensors.
        code: Digest of the code that encodes.
        encoder_dtype: Type that the text encoders compute in.
        max_sequence_length: As the configuration has it; None is the family's own.
    """
    what = [dict(parts), dtype, code, encoder_dtype, max_sequence_length]
    return digest(["text", FORMAT, caption_sha256, *what])
