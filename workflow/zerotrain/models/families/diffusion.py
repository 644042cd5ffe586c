"""The base class of diffusion families: a pipeline of diffusers with one denoiser."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import diffusers
import torch

from zerotrain.artifact.documents import read_bytes
from zerotrain.config.families import Conditioning
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import write_bytes
from zerotrain.models.families.autoencoders import CHANNELS, identity_autoencoder
from zerotrain.models.families.conditioning import read_pipeline
from zerotrain.models.families.model_family import CONFIG, ModelFamily
from zerotrain.models.families.pipeline_sampling import PipelineSampling
from zerotrain.models.pretrained import from_config, from_pretrained, read_config

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.data.dataset import Dataset
    from zerotrain.models.families import Encoders
    from zerotrain.models.families.autoencoders import FittedAutoencoders
    from zerotrain.models.families.small_models import SmallPipeline


class DiffusionFamily(PipelineSampling, ModelFamily):
    """A family of diffusers' pipelines, which make images."""

    modality: Literal["image"] = "image"
    """What it generates."""
    weights_name = "diffusion_pytorch_model"
    small: SmallPipeline
    """Its small models, unless it overrides build_preset."""
    image_parts: tuple[str, ...] = ("vae",)
    """Parts that latents depend on."""

    @abstractmethod
    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Encoders:
        """Load autoencoder and text encoders for encoding; the denoiser stays on disk.

        A family with the choice `long_captions` takes it as a further argument.

        Args:
            base: Folder of the base model.
            device: Device to encode on.
            max_sequence_length: Tokens of a prompt; None for the family's default.
            dtype: Type that text encoders compute in; the autoencoder computes in float32.

        Raises:
            PipelineError: max_sequence_length is more than the family takes.
        """

    @abstractmethod
    def shape_objective(self, config: Mapping[str, Any]) -> Any:
        """Build the objective for a denoiser's config.json alone, of which only `predict` is used.

        Its predictions have the shapes and the cost of those in training.
        """

    def shape_conditioning(
        self, config: Mapping[str, Any], latents: torch.Tensor, count: int
    ) -> dict[str, torch.Tensor]:
        """Return zeros in the shapes of encoded conditioning images, by name in the batch.

        Args:
            config: The denoiser's config.json.
            latents: Latents [B, C, h, w] of the samples.
            count: Conditioning images of each sample.
        """
        if not count:
            return {}
        batch, *size = latents.shape
        return {"conditioning_latents": torch.zeros(batch, count, *size)}

    def build_preset(
        self,
        preset: str,
        dataset: Dataset,
        images: Sequence[Image],
        seed: int,
        out: Path,
        *,
        identity: bool = False,
        conditioned: bool = False,
        longest: int | None = None,
        store: FittedAutoencoders | None = None,
    ) -> None:
        """Build a small base model of the real classes from a seed, into the folder `out`.

        Args:
            preset: Its name.
            dataset: Its captions have the words that the tokenizer knows.
            images: The train split's crops, in order.
            seed: Decides every weight.
            out: Folder to write into.
            identity: Whether its latents are pixels.
            conditioned: Whether it reads conditioning images.
            longest: Longest side of the images that it is trained on; None for squares.
            store: Store that its fitted autoencoder is read from or added to.
        """
        captions = [caption for sample in dataset.split("train") for caption in sample.captions]
        from zerotrain.models.families.nano import build_pipeline  # slow to import

        build_pipeline(
            self,
            captions,
            images,
            seed,
            out,
            preset=preset,
            pipeline=self.spec.conditioned_preset if conditioned else None,
            identity=identity,
            longest=longest,
            store=store,
        )

    def conditioning(self, base: Path) -> Conditioning | None:
        """Return how a base uses conditioning images; None if it takes none."""
        return self.spec.conditioning.get(read_pipeline(base) or "")

    def replace_autoencoder(self, base: Path) -> None:
        """Replace the base's autoencoder with the identity.

        Raises:
            PipelineError: the denoiser takes latents with another number of channels.
        """
        path = base / self.trained_part / CONFIG
        channels = self.spec.latent_channels(read_config(path))
        if channels != CHANNELS:
            raise PipelineError(
                f"vae: identity makes pixels of {CHANNELS} channels the latents, and the "
                f"{self.trained_part} of this base takes latents of {channels}",
                hint="remove `vae`, or choose a base that was made for pixels: `nano` is",
            )
        shutil.rmtree(base / "vae")
        identity_autoencoder(self.spec.classes["vae"]).save_pretrained(base / "vae")

    def load_model(self, base: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Load the denoiser on CPU, in float32 if no type is given."""
        model: torch.nn.Module = from_pretrained(
            self._class(),
            base,
            subfolder=self.trained_part,
            dtype=dtype or torch.float32,
            use_safetensors=True,
        )
        return model

    def empty_model(self, base: Path) -> torch.nn.Module:
        """Build the denoiser that config.json describes, on the meta device."""
        config = read_config(base / self.trained_part / CONFIG)
        # Not accelerate's init_empty_weights, which separates tied weights.
        with torch.device("meta"):
            model: torch.nn.Module = from_config(self._class(), config)
        return model

    def write_config(self, config: Path, dtype: torch.dtype, folder: Path) -> dict[str, str]:
        """Copy the base's config.json, which names no type."""
        write_bytes(folder / CONFIG, read_bytes(config, follow_links=True))
        return {}

    def _class(self) -> Any:
        return getattr(diffusers, self.spec.classes[self.trained_part])
