"""`vae: identity`: an autoencoder of the family's own class that returns its input.

Pixels are then the latents, for images that an autoencoder would blur (pixel art). Caching,
training, sampling and programs that load the exported folder need no special case for it.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage

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
