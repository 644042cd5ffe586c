"""Building of the small models of image families: the presets `nano` and `micro`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.models.families.identity import identity_autoencoder
from zerotrain.models.families.nano import TEXT_WIDTH, build_autoencoder, fit_autoencoder
from zerotrain.models.families.pipelines import pipeline_class

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.models.families.fitted_autoencoder import FittedAutoencoders


@dataclass(frozen=True)
class SmallSpec:
    """The properties that the models of a small pipeline are built for."""

    preset: str
    pipeline: str
    """Name of the pipeline's class in diffusers."""
    tokenizers: Mapping[str, Any]
    """Its tokenizers, by part."""
    side: int
    """Side of its square images in pixels."""
    channels: int
    """Channels of their latents."""
    longest: int | None = None
    """Longest side of its images, if some are no squares."""

    @property
    def width(self) -> int:
        """Width of the text embeddings."""
        return TEXT_WIDTH[self.preset]


@dataclass(frozen=True)
class SmallPipeline:
    """The small models of a family: its real classes, with random weights from a seed."""

    pipeline: str
    """Name of the pipeline's class in diffusers."""
    train_tokenizers: Callable[[Sequence[str], str], dict[str, Any]]
    """Trains the tokenizers of a pipeline's class on captions, by part."""
    build_models: Callable[[SmallSpec], dict[str, Any]]
    """Builds the models other than the autoencoder, by part."""
    build_scheduler: Callable[[], Any]
    """Builds the noise scheduler."""
    build_autoencoder: Callable[[int], Any] = build_autoencoder
    """Builds the autoencoder for images of this side."""
    autoencoder: str = "AutoencoderKL"
    """Name of its class in diffusers."""
    scaling: Callable[[float, float], dict[str, Any]] = lambda mean, std: {
        "scaling_factor": 1 / std,
        "shift_factor": mean,
    }
    """Returns the values of its config.json that normalise latents of this mean and deviation."""
    frames: bool = False
    """Whether the autoencoder takes videos."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's class."""
    add_parts: Callable[[SmallSpec, Path], None] | None = None
    """Adds the parts that only the classes `extended` have to the saved folder."""
    extended: tuple[str, ...] = ()
    """Further classes of pipelines, which are saved as the class `pipeline`."""

    def build(
        self,
        captions: Sequence[str],
        images: Sequence[Image],
        seed: int,
        out: Path,
        *,
        preset: str = "nano",
        pipeline: str | None = None,
        identity: bool = False,
        longest: int | None = None,
        store: FittedAutoencoders | None = None,
    ) -> None:
        """Write a model into `out` in diffusers' layout; equal arguments give equal files.

        Args:
            captions: Texts that the tokenizers are trained on.
            images: Squares of one size.
            seed: Decides every weight.
            out: Folder to write into.
            preset: `nano` or `micro`.
            pipeline: Class of the pipeline, if it is not the family's own.
            identity: Whether the autoencoder is the identity, so that pixels are the latents.
            longest: Longest side of the images that it is trained on; None for squares.
            store: Store that the fitted autoencoder is read from or added to.
        """
        chosen = pipeline or self.pipeline
        side = images[0].width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokenizers = self.train_tokenizers(captions, chosen)
            if identity:
                vae = identity_autoencoder(self.autoencoder)
            else:
                vae = self.build_autoencoder(side)
                fit = fit_autoencoder(vae, images, seed, frames=self.frames, store=store)
                vae.register_to_config(**self.scaling(*fit))
            spec = SmallSpec(preset, chosen, tokenizers, side, latent_channels(vae), longest)
            extends = chosen in self.extended
            built = pipeline_class(self.pipeline if extends else chosen)(
                vae=vae,
                **self.build_models(spec),
                **tokenizers,
                scheduler=self.build_scheduler(),
                **self.arguments,
            )
            built.save_pretrained(out)
            if extends and self.add_parts is not None:
                self.add_parts(spec, out)


def latent_channels(autoencoder: Any) -> int:
    """Return the number of channels of an autoencoder's latents."""
    config = autoencoder.config
    found: int = getattr(config, "latent_channels", None) or config.z_dim
    return found
