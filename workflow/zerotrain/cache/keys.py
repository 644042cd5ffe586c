"""Keys of cached tensors: digests of the user's choices that decide their numbers.

Code and versions of libraries are not part of a key, so an upgrade does not change it. They are
recorded instead, and compared by their results (`record`, `comparison`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from zerotrain.artifact import digest
from zerotrain.data.buckets import View

FORMAT = 2
"""Part of every key: increase it when equal keys would have different numbers."""


@dataclass(frozen=True)
class Encoder:
    """The properties of an encoder that decide its tensors.

    Args:
        family: Decides the computation and its scale.
        parts: Digests of the model's parts that compute.
        computed: Dtype of the computation.
        device: Kind of device that computes: kinds differ in more than the last bits.
        dtype: Dtype of the stored tensors.
        pipeline: The base's class, if it decides how prompts and conditioning images are read.
    """

    family: str
    parts: Mapping[str, str]
    computed: str
    device: str
    dtype: str
    pipeline: str | None = None


def latents_key(
    image_sha256: str,
    view: View,
    encoder: Encoder,
    *,
    flipped: bool = False,
    background: str | None = None,
) -> str:
    """Compute the key of an image's latents.

    Args:
        image_sha256: Digest of the image.
        view: The encoded part of the image, and its size in pixels.
        encoder: The image encoder.
        flipped: Whether the mirror image is encoded.
        background: The colour behind transparent pixels, if there are any and it is not white.
    """
    cut = view.box, view.size
    return digest(["latents", FORMAT, image_sha256, *cut, asdict(encoder), flipped, background])


def mask_key(mask_sha256: str, latents: str) -> str:
    """Compute the key of a loss mask.

    Args:
        mask_sha256: Digest of the file with the mask.
        latents: Key of the latents, in whose shape it is stored.
    """
    return digest(["mask", FORMAT, mask_sha256, latents])


def conditioning_key(pixels: str, encoder: Encoder) -> str:
    """Compute the key of a sample's encoded conditioning images.

    Args:
        pixels: The result of pixels_digest.
        encoder: The image encoder.
    """
    return digest(["conditioning", FORMAT, pixels, asdict(encoder)])


def pixels_digest(images: Sequence[tuple[str, View]]) -> str:
    """Compute the digest of everything that the pixels of conditioning images depend on.

    Args:
        images: Digest and encoded part of each image, in order; all parts are of one size.
    """
    [size] = {view.size for _, view in images}
    return digest([[(sha256, view.box) for sha256, view in images], size])


def text_key(
    caption_sha256: str,
    encoder: Encoder,
    *,
    max_sequence_length: int | None,
    long_captions: str = "truncate",
    conditioning: str | None = None,
) -> str:
    """Compute the key of a caption's embeddings.

    Args:
        caption_sha256: Digest of the caption.
        encoder: The text encoder.
        max_sequence_length: The configuration's value; None: the family's.
        long_captions: The configuration's value.
        conditioning: The result of pixels_digest, if the text encoder sees conditioning images.
    """
    what = [caption_sha256, asdict(encoder), max_sequence_length, long_captions, conditioning]
    return digest(["text", FORMAT, *what])


def tokens_key(sha256: str, max_length: int, *, family: str, parts: Mapping[str, str]) -> str:
    """Compute the key of a conversation's tokens.

    Args:
        sha256: Digest of the conversation.
        max_length: Number of tokens at which conversations are truncated.
        family: Decides which tokens are read and learned.
        parts: Digests of the tokenizer's files.
    """
    return digest(["tokens", FORMAT, sha256, max_length, family, dict(parts)])
