"""Autoencoders that are made here: fitted to the images of a small model, or the identity."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from safetensors.torch import load_file, save_file

from zerotrain import artifact
from zerotrain.artifact import MANIFEST, Artifact, digest
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.data.buckets import to_pixels
from zerotrain.errors import PipelineError
from zerotrain.machine.file_lock import one_at_a_time
from zerotrain.machine.progress_bar import progress

if TYPE_CHECKING:
    from PIL.Image import Image

KIND = "autoencoder"
FILE = "fitted.safetensors"
PARAMETERS = "autoencoder."
GENERATOR = "generator"


@dataclass(frozen=True)
class FittedAutoencoders:
    """The fitted autoencoders of a dataset, each fitted once and shared by its runs.

    One depends on the images, their order and crops, the resolution, the seed, the threads and the
    code, but not on captions: a run with other captions, or of another family with the same
    autoencoder, uses the stored one. The state of torch's generator after the fit is stored, too,
    since the models that are built next draw from it.
    """

    folder: Path
    """Folder with one for each class, resolution and seed."""
    pixels: str
    """Digest of everything that the pixels of the fit depend on."""
    resolution: int

    def load_or_fit(
        self, autoencoder: Any, seed: int, fit: Callable[[], tuple[float, float]]
    ) -> tuple[float, float]:
        """Load the stored parameters into `autoencoder`, or fit it and store them.

        Either way the parameters and torch's generator are bit for bit those after `fit`. Processes
        that need the same one at the same time wait for the first.

        Args:
            autoencoder: The autoencoder, initialised from its seed.
            seed: The seed; torch's generator depends only on it.
            fit: Fits `autoencoder`.

        Returns:
            What `fit` returns: the latents' mean and standard deviation.
        """
        name = type(autoencoder).__name__
        target = self.folder / f"{name}-{self.resolution}px-seed{seed}"
        config = {key: v for key, v in autoencoder.config.items() if not key.startswith("_")}
        versions = [torch.__version__, diffusers.__version__]
        key = digest(
            [
                *(name, config, self.pixels, self.resolution, seed),
                *(torch.get_num_threads(), versions, VERSIONS["build_base"]),
            ]
        )
        with one_at_a_time(self.folder / f".{target.name}.lock"):
            if stored := _read(target, key):
                print(f"the autoencoder was fitted to these images before: {target}")
                tensors = load_file(stored.path(FILE))
                torch.random.set_rng_state(tensors.pop(GENERATOR))
                autoencoder.load_state_dict(
                    {name.removeprefix(PARAMETERS): value for name, value in tensors.items()}
                )
                autoencoder.eval()
                return stored.content["mean"], stored.content["std"]
            mean, std = fit()
            with artifact.publish(target, KIND, made_by={"stage": "build_base"}) as draft:
                tensors = {
                    PARAMETERS + name: value.detach().contiguous()
                    for name, value in autoencoder.state_dict().items()
                }
                generator = torch.random.get_rng_state()
                save_file({**tensors, GENERATOR: generator}, draft.folder / FILE)
                draft.content = {"key": key, "mean": mean, "std": std}
        return mean, std


def _read(folder: Path, key: str) -> Artifact | None:
    """Read the published fit with this key; return None if it is missing or damaged."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        found = artifact.read(folder, KIND)
    except PipelineError as error:
        print(f"WARNING: {error.what}; the autoencoder is fitted again")
        return None
    return found if found.content["key"] == key else None


LATENT_CHANNELS = 4
AUTOENCODERS: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (16, 32, 32),
        "layers_per_block": 1,
        "latent_channels": LATENT_CHANNELS,
        "norm_num_groups": 8,
        "force_upcast": False,
        "mid_block_add_attention": False,
    },
    "AutoencoderKLQwenImage": {
        "base_dim": 16,
        "z_dim": LATENT_CHANNELS,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, False],
        "latents_mean": [0.0] * LATENT_CHANNELS,
        "latents_std": [1.0] * LATENT_CHANNELS,
    },
}
"""Arguments of those that turn 4 x 4 pixels into one latent, by class."""
VAE_STEPS = 200
VAE_BATCH = 8
VAE_LEARNING_RATE = 4e-3
VAE_KL_WEIGHT = 1e-5
LATENTS_MEASURED = 256
ENDS_OF_BRANCHES = r"\.(conv2|to_out\.0|proj)\."
"""Last parameters of a residual branch, in both classes of autoencoder."""


def build_autoencoder(kind: str, side: int) -> Any:
    """Build a small autoencoder of a class, for images of this side in pixels."""
    size = {"sample_size": side} if kind == "AutoencoderKL" else {}
    return getattr(diffusers, kind)(**AUTOENCODERS[kind], **size)


def statistics(kind: str, mean: float | None, std: float) -> dict[str, Any]:
    """Return the values of an autoencoder's config.json that normalise its latents."""
    if kind == "AutoencoderKL":
        return {"scaling_factor": 1 / std, **({} if mean is None else {"shift_factor": mean})}
    values = {"latents_mean": mean, "latents_std": std}
    return {name: [value] * LATENT_CHANNELS for name, value in values.items()}


def fit_autoencoder(
    autoencoder: Any,
    images: Sequence[Image],
    seed: int,
    *,
    store: FittedAutoencoders | None = None,
) -> tuple[float, float]:
    """Fit an autoencoder to the images by squared error and a small KL term.

    Args:
        autoencoder: The autoencoder, initialised from its seed.
        images: Squares of one size.
        seed: Seed of the draws of images.
        store: Store that the result is read from or added to.

    Returns:
        The latents' mean and standard deviation.
    """
    fit = partial(_fit, autoencoder, images, seed)
    return store.load_or_fit(autoencoder, seed, fit) if store else fit()


def _fit(autoencoder: Any, images: Sequence[Image], seed: int) -> tuple[float, float]:
    """Fit with residual branches that start at zero: a nearly linear model needs half the time."""
    draw = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(
        autoencoder.parameters(), lr=VAE_LEARNING_RATE, weight_decay=0.0, fused=True
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=VAE_LEARNING_RATE, total_steps=VAE_STEPS
    )

    def shown(chosen: Iterable[int]) -> torch.Tensor:
        pixels = pixels_of([images[i] for i in chosen])
        # An autoencoder of videos gets each image as a single frame.
        return pixels.unsqueeze(2) if isinstance(autoencoder, AutoencoderKLQwenImage) else pixels

    for name, parameter in autoencoder.named_parameters():
        if re.search(ENDS_OF_BRANCHES, name):
            torch.nn.init.zeros_(parameter)
    autoencoder.train()
    with _single_frames(autoencoder):
        for _ in progress(range(VAE_STEPS), VAE_STEPS, "fitting the autoencoder", "step"):
            pixels = shown(draw.integers(len(images), size=VAE_BATCH))
            posterior = autoencoder.encode(pixels).latent_dist
            decoded = autoencoder.decode(posterior.sample()).sample
            loss = (decoded - pixels).square().mean() + VAE_KL_WEIGHT * posterior.kl().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    autoencoder.eval()
    with torch.inference_mode():
        chosen = range(0, len(images), -(-len(images) // LATENTS_MEASURED))
        latents = autoencoder.encode(shown(chosen)).latent_dist.mode()
    return float(latents.mean()), float(latents.std())


@contextmanager
def _single_frames(autoencoder: Any) -> Iterator[None]:
    """Make convolutions over time compute only the last tap, half of the work.

    Before a single frame there are only zeros.
    """
    convolutions = [m for m in autoencoder.modules() if isinstance(m, QwenImageCausalConv3d)]
    for convolution in convolutions:
        convolution.forward = partial(_of_one_frame, convolution)
    yield
    for convolution in convolutions:
        del convolution.forward


def _of_one_frame(convolution: Any, x: torch.Tensor, cache_x: None = None) -> torch.Tensor:
    """Compute QwenImageCausalConv3d's output for x [B, C, 1, H, W]."""
    padding = convolution._padding[0]
    weight, bias = convolution.weight[:, :, -1], convolution.bias
    return torch.nn.functional.conv2d(x.squeeze(2), weight, bias, padding=padding).unsqueeze(2)


def pixels_of(images: Sequence[Image]) -> torch.Tensor:
    """Convert RGB images of one size to float32 [B, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(np.stack([to_pixels(image) for image in images]))


NAME = "identity: pixels are the latents"
"""Its name in vae/config.json."""
CHANNELS = 3
"""Channels of its latents: red, green and blue, in [-1, 1]."""
WIDTH, LARGE_CHANNELS = 16, 4
LARGE = 1024.0
"""Value next to the pixels so that normalising divides by it, whatever they are: their share of
the norm is below 6 / (8 * LARGE**2) = 1e-6. All factors are powers of two, which round nothing in
16 bits."""
NO_VARIANCE = -30.0
"""Logarithm of the posterior's variance: the minimum in diffusers."""


def identity_autoencoder(name: str) -> Any:
    """Build the autoencoder of the class with this name: AutoencoderKL or AutoencoderKLQwenImage.

    With `vae: identity` it returns its input: pixels are then the latents, for images that an
    autoencoder would blur (pixel art). Caching, training, sampling and programs that load the
    exported folder need no special case for it.

    It has one block, whose residuals have no effect, and an activation that cancels out:
    silu(x) - silu(-x) = x. Latents and pixels are equal within 1e-5 in float32.
    """
    if name == "AutoencoderKL":
        autoencoder: Any = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            block_out_channels=(WIDTH,),
            layers_per_block=1,
            latent_channels=CHANNELS,
            norm_num_groups=1,
            scaling_factor=1.0,
            shift_factor=0.0,
            force_upcast=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
        )
        norms = [autoencoder.encoder.conv_norm_out, autoencoder.decoder.conv_norm_out]
    else:
        autoencoder = AutoencoderKLQwenImage(
            base_dim=WIDTH,
            z_dim=CHANNELS,
            dim_mult=[1],
            num_res_blocks=1,
            temperal_downsample=[],
            latents_mean=[0.0] * CHANNELS,
            latents_std=[1.0] * CHANNELS,
        )
        norms = [autoencoder.encoder.norm_out, autoencoder.decoder.norm_out]
    signs = torch.tensor([[1.0], [-1.0]])
    split = torch.kron(torch.eye(CHANNELS), signs)  # x and -x of each colour
    split = torch.cat([split, torch.zeros(WIDTH - len(split), CHANNELS)])
    with torch.no_grad():
        for parameter in autoencoder.parameters():
            parameter.zero_()
        for half, norm in zip((autoencoder.encoder, autoencoder.decoder), norms, strict=True):
            _tap(half.conv_in).copy_(split)
            half.conv_in.bias[-LARGE_CHANNELS:] = LARGE * signs.flatten().repeat(2)
            # A quarter of the values is large, so that their root mean square is half of LARGE.
            next(norm.parameters()).fill_(LARGE / 2)
            _tap(half.conv_out)[:CHANNELS] = split.T
        autoencoder.encoder.conv_out.bias[CHANNELS:] = NO_VARIANCE
        for name, size in (("quant_conv", 2 * CHANNELS), ("post_quant_conv", CHANNELS)):
            if getattr(autoencoder, name) is not None:
                _tap(getattr(autoencoder, name)).copy_(torch.eye(size))
    autoencoder.register_to_config(_name_or_path=NAME)
    return autoencoder


def _tap(convolution: Any) -> torch.Tensor:
    """Return a kernel's central weights [out, in]; for videos, those of the last frame."""
    weight: torch.Tensor = convolution.weight
    if weight.dim() == 5:
        weight = weight[:, :, -1]
    return weight[:, :, weight.shape[2] // 2, weight.shape[3] // 2]
