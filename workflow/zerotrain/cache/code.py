"""The code that decides the numbers of a cache, by declared modules.

Families, sources and readers of conditioning images declare their modules; no other code of the
package changes the encoded tensors. The digests are recorded in the cache and compared at the next
run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotrain.artifact.sources import code_digest
from zerotrain.models.encoding_code import BATCHES, BUCKETS, CROP, MASKS

if TYPE_CHECKING:
    from zerotrain.data.source import Source
    from zerotrain.models.families.conditioning import Conditioning
    from zerotrain.models.families.diffusion import DiffusionFamily
    from zerotrain.models.families.language import LanguageFamily

IMAGES, TEXTS, TOKENS, LOSS_MASKS = "images", "texts", "tokens", "loss masks"
"""Groups of series whose numbers depend on the same code."""


def image_modules(source: Source, family: DiffusionFamily) -> tuple[str, ...]:
    """List the modules that latents depend on; `module:Class` is only a class."""
    return (*source.pixel_modules, CROP, BUCKETS, *BATCHES, *family.encoding_code)


def text_modules(
    source: Source, family: DiffusionFamily, reads: Conditioning | None
) -> tuple[str, ...]:
    """List the modules that embeddings of captions depend on.

    Args:
        source: The source of the images.
        family: The base's family.
        reads: How the base uses conditioning images; None if it uses none.
    """
    seen: tuple[str, ...] = ()
    if reads is not None:
        seen = (*source.pixel_modules, CROP, *reads.prompt_code)
    return (*BATCHES, *family.encoding_code, *family.prompt_code, *seen)


def code_digests(
    source: Source, family: DiffusionFamily, reads: Conditioning | None, *, masks: bool
) -> dict[str, str]:
    """Compute the digest of the code of each group of an image cache, which may have masks."""
    found = {
        IMAGES: code_digest(*set(image_modules(source, family))),
        TEXTS: code_digest(*set(text_modules(source, family, reads))),
    }
    if masks:
        found[LOSS_MASKS] = code_digest(*{*source.pixel_modules, BUCKETS, *MASKS})
    return found


def tokenising_digests(family: LanguageFamily) -> dict[str, str]:
    """Compute the digest of the code of a text cache."""
    return {TOKENS: code_digest(*family.encoding_code)}
