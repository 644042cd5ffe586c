"""The keys of how a source's images are read, and how much they count in the loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from zerotrain.config.captions import is_value
from zerotrain.config.section import Section

WHITE = "#ffffff"


class ImageOptions(Section):
    """What transparent images are on, and how much samples and parts of them count."""

    transparent_background: str = Field(
        WHITE,
        pattern=r"^#[0-9a-fA-F]{6}$",
        exclude_if=is_value(WHITE),
        description="The colour that transparent images are put on, as #rrggbb.",
    )
    loss_weight: float = Field(
        1.0,
        gt=0,
        exclude_if=is_value(1.0),
        description="Factor of each sample's loss; what prior_loss_weight is for images of "
        "prior preservation. See [loss-weights.md](loss-weights.md).",
    )
    loss_mask: Literal["alpha"] | None = Field(
        None,
        exclude_if=is_value(None),
        description="`alpha`: the loss of each part of an image is multiplied by its opacity.",
    )
    mask_images: str | None = Field(
        None,
        min_length=1,
        exclude_if=is_value(None),
        description="Folder of masks, each of the name without extension and of the size of its "
        "image: black parts are not learned, white ones are.",
    )

    @model_validator(mode="after")
    def _masks_have_one_source(self) -> ImageOptions:
        if self.loss_mask is not None and self.mask_images is not None:
            raise ValueError("give loss_mask or mask_images, not both")
        return self
