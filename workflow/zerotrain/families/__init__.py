"""Model families: what the pipeline needs to know of a kind of model. One family, one module.

The stages and the training loop know only the protocols below. A family has a line in FAMILIES,
and a module of that name here which offers `FAMILY`, an object of class Family (docs/families.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from zerotrain.config import EvaluateConfig
    from zerotrain.data.conversation import Conversations, Message
    from zerotrain.data.dataset import Dataset

PRESETS = ("nano", "micro")
"""Small models of the real classes that `base` may name; `micro` has ten times the parameters."""
DENOISING = ("snr_gamma", "noise_offset")
FLOW_MATCHING = ("weighting_scheme", "logit_mean", "logit_std", "mode_scale", "flow_shift")
CONDITIONS = ("flux_guidance_value",)
"""Keys of config.objective that the model is told; the others say how it is taught."""


@dataclass(frozen=True)
class Kind:
    """What is asked of a family before its module, and torch with it, is imported.

    Attributes:
        modality: What it makes.
        trained_part: The part that training changes; of a language model `model`.
        objective: Keys of config.objective that mean something to it.
        pixels: Whether its presets can take pixels as latents (vae: identity).
        text_length: Whether its text encoders take captions of any length (max_sequence_length).
        noise_schedule: Whether prediction_type, zero terminal SNR and the sampler can be chosen.
        weighting_scheme: Of flow matching, where nothing else is said.
    """

    modality: Literal["image", "text"]
    trained_part: str
    objective: tuple[str, ...] = ()
    _: KW_ONLY
    pixels: bool = False
    text_length: bool = False
    noise_schedule: bool = False
    weighting_scheme: str = "none"


FAMILIES: dict[str, Kind] = {
    "sdxl": Kind("image", "unet", DENOISING, noise_schedule=True),
    "sd3": Kind(
        "image",
        "transformer",
        FLOW_MATCHING,
        text_length=True,
        weighting_scheme="logit_normal",
    ),
    "qwen_image": Kind("image", "transformer", FLOW_MATCHING, pixels=True, text_length=True),
    "flux": Kind(
        "image",
        "transformer",
        (*FLOW_MATCHING, *CONDITIONS),
        pixels=True,
        text_length=True,
    ),
    "causal_lm": Kind("text", "model"),
    "seq2seq_lm": Kind("text", "model"),
}
"""Those that a configuration may name."""
LANGUAGE_MODELS = tuple(name for name, kind in FAMILIES.items() if kind.modality == "text")
"""Those of text; the others are of images."""
ROOT = "."
"""The trained part of a model whose files lie in its folder itself, as transformers has them."""


Batch: TypeAlias = "dict[str, torch.Tensor]"
"""What one forward pass learns from: tensors by name, B samples on the training device.

Of images: `latents` float32 [B, C, h, w], scaled as the denoiser expects them; what
Encoders.encode_prompts gave, each with leading dimension B, and where prompts differ in length
filled up with zeros, beside `<name>_mask` bool [B, T]; `original_size`, `crop_top_left` and
`target_size` int64 [B, 2] (height and width of the image file, top and left of the crop, height
and width after crop and resize); `noise` float32 of the latents' shape, standard normal; `uniform`
float64 [B] in [0, 1), from which the family derives the timestep.

Of text, int64, T the longest of the batch: `input_ids` [B, T]; `labels` [B, T], of a seq2seq model
as long as its longest answer, -100 where nothing is learned; `attention_mask` [B, T], 0 where a row
is filled up. Of packed rows `position_ids` [B, T] in its place, which begin at 0 with each example.
"""


@dataclass(frozen=True)
class Tokens:
    """A conversation as a language model learns it."""

    input_ids: list[int]
    labels: list[int]
    """-100 where nothing is learned. Of a causal model as long as input_ids."""
    left_out: int = 0
    """Answers that the tokenizer's chat template does not render as they were generated."""


class Encoders(Protocol):
    """The parts of a model that the cache stage loads and training never does."""

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Float32 [B, 3, H, W] in [-1, 1] to float32 latents [B, C, h, w]; the posterior's mode."""

    def encode_prompts(
        self, prompts: Sequence[str]
    ) -> Mapping[str, torch.Tensor | list[torch.Tensor]]:
        """B prompts to float32 tensors, by name: with leading dimension B, or B of them that differ
        in their first."""


class Family(Protocol):
    """One kind of model: what is common to those of images and of text."""

    name: str
    parts: tuple[str, ...]
    """Sub-folders of the base model, in diffusers' layout; or ROOT alone, in transformers'."""
    optional_parts: tuple[str, ...]
    """Those of `parts` that a base may lack, all of them together."""
    encoding_code: tuple[str, ...]
    """Modules, or `module:Class`, whose code turns samples into cached tensors: an edit there makes
    them stale."""
    classes: Mapping[str, str]
    """The class that model_index.json must name, for each part that holds weights."""
    trained_part: str
    """The part that training changes."""

    @property
    def modality(self) -> Literal["image", "text"]:
        """What it makes."""

    def load_model(self, base: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Load the trainable part on CPU, in float32 if no type is given."""

    def empty_model(self, base: Path) -> torch.nn.Module:
        """The trainable part without its weights: names, shapes and ties.

        Parameters are on the meta device. Buffers that no file holds have the values that building
        gives, on CPU; of a denoiser the others are on the meta device, too.
        """

    def load_trained(self, weights: Path) -> torch.nn.Module:
        """Load the trained part of a weights folder in float32 on CPU, in eval mode.

        An adapter that lies in the folder is applied.
        """

    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> Objective:
        """The training objective.

        Args:
            base: Folder of the base model, whose noise scheduler or config.json defines it.
            settings: The family's keys of config.objective; without any but CONDITIONS the plain
                loss, which evaluations compare.
        """

    def save_model(
        self,
        base: Path,
        shapes: Mapping[str, list[int]],
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        out: Path,
        *,
        frozen: Callable[[str], bool] = lambda name: False,
        max_shard_size: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Write the trainable part in the library's own format into `out`/<trained_part>.

        Of a part at the root, files without tensors are those of the base and are not written, but
        for a config.json that names another type.

        Args:
            base: Folder of the base model.
            shapes: Shape of each trained tensor.
            read: Gives a trained tensor when its turn comes; only one is held.
            dtype: Type to write.
            out: Folder to write into.
            frozen: Whether training left a name alone: it is taken from the base, like buffers.
            max_shard_size: A larger file becomes several, with an index; 10GB by default.
            metadata: What the files' headers say beside their tensors.

        Returns:
            sha256 of each written file, by its name relative to `out`.

        Raises:
            PipelineError: names or shapes are not those of the base; nothing is written.
        """


class ImageFamily(Family, Protocol):
    """One kind of model that makes images."""

    modality: Literal["image"]
    image_parts: tuple[str, ...]
    """Parts that latents depend on."""
    text_parts: tuple[str, ...]
    """Parts that text embeddings depend on."""

    def load_trained(self, weights: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """As Family has it, in another type if one is given."""

    def build_preset(
        self,
        preset: str,
        dataset: Dataset,
        images: Sequence[Image],
        seed: int,
        out: Path,
        *,
        identity: bool = False,
    ) -> None:
        """Build a small base model of the real classes from a seed, into the folder `out`.

        Args:
            preset: Its name.
            dataset: Whose captions it shall know.
            images: The train split's crops, in order.
            seed: Decides every weight.
            out: Folder to write into.
            identity: Whether pixels are its latents.
        """

    def replace_autoencoder(self, base: Path) -> None:
        """Put an autoencoder that gives back its pixels in the place of the base's.

        Raises:
            PipelineError: the denoiser takes latents of another number of channels.
        """

    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = ...,
    ) -> Encoders:
        """Load VAE and text encoders for encoding.

        Args:
            base: Folder of the base model.
            device: Where to encode.
            max_sequence_length: Tokens of a prompt; None for the family's own number.
            dtype: Type that text encoders compute in, float32 if none is given; the VAE computes
                in float32.

        Raises:
            PipelineError: max_sequence_length is more than the family takes.
        """

    def sample(
        self,
        weights: Path,
        prompts: Sequence[str],
        seeds: Sequence[int],
        config: EvaluateConfig,
        *,
        resolution: int,
        device: str,
        max_sequence_length: int | None = None,
    ) -> list[Image]:
        """One image per prompt, each from its own seed, with classifier-free guidance."""

    def live_pipeline(
        self,
        base: Path,
        model: torch.nn.Module,
        resolution: int,
        shape: Sequence[int],
        config: EvaluateConfig,
    ) -> Any:
        """A pipeline around a model that is trained, without encoders and autoencoder.

        Args:
            base: Folder of the base model, whose noise scheduler is used.
            model: The trained part, as load_model gave it.
            resolution: Side of its images in pixels.
            shape: C, h and w of their latents.
            config: What names the sampler.
        """

    def sample_latents(
        self,
        pipeline: Any,
        embeds: Mapping[str, torch.Tensor],
        empty: Mapping[str, torch.Tensor],
        seed: int,
        config: EvaluateConfig,
        *,
        resolution: int,
        shape: Sequence[int],
    ) -> torch.Tensor:
        """Latents float32 [C, h, w] on the CPU, of the image that `sample` makes of this seed.

        Args:
            pipeline: What live_pipeline gave.
            embeds: What Encoders.encode_prompts gave of the prompt, with leading dimension 1.
            empty: The same of the empty prompt.
            seed: Decides the noise.
            config: How it is sampled.
            resolution: As for the pipeline.
            shape: As for the pipeline.
        """

    def decode_latents(self, base: Path, latents: torch.Tensor, device: str) -> list[Image]:
        """The image of each of latents [B, C, h, w], by the base's autoencoder in float32."""


class TextFamily(Family, Protocol):
    """One kind of model that makes text."""

    modality: Literal["text"]

    def build_preset(self, preset: str, dataset: Conversations, seed: int, out: Path) -> None:
        """Build a small base model and its tokenizer from a seed, into the folder `out`."""

    def load_tokenizer(self, base: Path) -> Any:
        """The tokenizer of a base model or weights folder, as transformers loads it."""

    def tokenise(
        self, tokenizer: Any, messages: Sequence[Message], max_length: int
    ) -> Tokens | None:
        """What is learned of a conversation; None if nothing of an answer is left of it."""

    def generate(
        self,
        weights: Path,
        prompts: Sequence[Sequence[Message]],
        config: EvaluateConfig,
        *,
        max_length: int,
        device: str,
    ) -> list[str]:
        """The likeliest answer to each prompt, token by token (greedy)."""

    def load_for_answers(self, weights: Path, device: str) -> torch.nn.Module:
        """Load a folder, with its adapter, onto a device; float32 on a CPU, else bfloat16."""

    def name_ends(self, folder: Path) -> dict[str, str]:
        """Complete a weights folder: what ends an answer is named for other programs, too.

        Returns:
            sha256 of each file that was written anew, by name.
        """


class Objective(Protocol):
    """What a model is trained to do."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Loss of each sample, float32 [B]."""


def load_family(name: str) -> ImageFamily | TextFamily:
    """The family of that name.

    Raises:
        PipelineError: there is none.
    """
    if name not in FAMILIES:
        raise PipelineError(
            f"family: {name!r} is not known", hint=f"families: {', '.join(FAMILIES)}"
        )
    family: Any = importlib.import_module(f"zerotrain.families.{name}").FAMILY
    return family  # type: ignore[no-any-return]
