"""Memory and operations of a micro batch, without parameters, gradients and optimizer.

A forward and a backward pass run on fake tensors (torch's FakeTensorMode), which have shapes, types
and lifetimes but no data. The blocks that gradient checkpointing would recompute are cut out: each
distinct one is traced once by itself, forwards and backwards, and represents all equal ones. The
passes over the rest of the model are then fast, whatever the depth.

Two simplifications, which both overestimate: an unused output of the last block counts as used
(Qwen-Image's text stream, one of 60 blocks), and blocks are recomputed to their end.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zerotrain.artifact.tensor_file import MIXED_PRECISION
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import Architecture
from zerotrain.launch.planner.model import TrainedModel
from zerotrain.launch.planner.passes import Loss, Mode, Trace
from zerotrain.launch.planner.shape import Shape, pixels_per_latent, prompt_shapes, text_tokens
from zerotrain.launch.planner.trace_store import Activations
from zerotrain.machine.progress_bar import Tell, ignore
from zerotrain.models.families import Batch, load_family


class Forward:
    """The forward pass of an architecture's trained part. Build it outside of FakeTensorMode.

    Images are predicted by the family's own objective. Values do not matter, so they are zeros.

    Args:
        architecture: The architecture.
    """

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._family: Any = load_family(architecture.family)
        self._objective: Any = None
        if self._family.modality == "image":
            self._objective = self._family.shape_objective(architecture.trained.config)

    def loss_of(self, model: torch.nn.Module, shape: Shape) -> Loss:
        """Return the function of the training loss of one micro batch.

        Args:
            model: The trained part, on CPU (real or fake).
            shape: Size of the micro batch.

        Raises:
            PipelineError: the resolution is not a multiple of the model's patch size in pixels, or
                exceeds its positions.
        """
        if self._objective is None:
            return self._loss_of_text(model, shape)
        side = self._latent_side(shape)
        channels = self._family.spec.latent_channels(self._architecture.trained.config)
        noisy = torch.zeros(shape.batch, channels, side, side)
        target, timesteps = torch.zeros_like(noisy), torch.zeros(shape.batch)
        batch = self._batch(noisy, shape)

        def loss() -> torch.Tensor:
            prediction: torch.Tensor = self._objective.predict(model, noisy, timesteps, batch)
            each = (prediction.float() - target).square().mean(dim=(1, 2, 3))
            return each.mean()

        return loss

    def _loss_of_text(self, model: torch.nn.Module, shape: Shape) -> Loss:
        """Every token is learned: the objective's choice of tokens depends on values."""
        length = text_tokens(self._architecture, shape)
        tokens = torch.zeros(shape.batch, length, dtype=torch.int64)

        def loss() -> torch.Tensor:
            found: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            return found

        return loss

    def _batch(self, noisy: torch.Tensor, shape: Shape) -> Batch:
        shapes = prompt_shapes(self._architecture, shape)
        sizes = ("original_size", "crop_top_left", "target_size")
        return {
            **{name: torch.zeros(shape.batch, *size) for name, size in shapes.items()},
            **{name: torch.zeros(shape.batch, 2, dtype=torch.int64) for name in sizes},
            **self._family.shape_conditioning(
                self._architecture.trained.config, noisy, shape.conditioning_images
            ),
        }

    def _latent_side(self, shape: Shape) -> int:
        known, config = self._architecture, self._architecture.trained.config
        pixels, patch = pixels_per_latent(known), self._family.spec.patch
        patch = patch or config.get("patch_size") or 2 ** (len(config["block_out_channels"]) - 1)
        if shape.resolution % (pixels * patch):
            raise PipelineError(
                f"resolution {shape.resolution} is no multiple of {pixels * patch}, which "
                f"{known.source} divides images into",
                hint=f"choose a multiple of {pixels * patch}",
            )
        most = config.get("pos_embed_max_size", shape.resolution) * pixels * patch
        if shape.resolution > most:
            raise PipelineError(
                f"resolution {shape.resolution}: {known.source} has positions for images of up "
                f"to {most} px a side",
                hint=f"choose {most} or less (nano and micro are built for the first phase's "
                "images)",
            )
        return shape.resolution // pixels


FLOAT32 = frozenset(
    {
        functional.layer_norm,
        functional.group_norm,
        functional.softmax,
        functional.log_softmax,
        functional.interpolate,
        torch.softmax,
        torch.exp,
        torch.log,
        torch.pow,
        torch.rsqrt,
        torch.reciprocal,
        torch.sum,
        torch.prod,
        torch.cumsum,
        torch.Tensor.softmax,
        torch.Tensor.exp,
        torch.Tensor.log,
        torch.Tensor.pow,
        torch.Tensor.rsqrt,
        torch.Tensor.reciprocal,
        torch.Tensor.sum,
        torch.Tensor.prod,
        torch.Tensor.cumsum,
        torch.Tensor.__pow__,
    }
)
"""Operations of the families that CUDA's autocast runs in float32 and the CPU's does not. Source:
https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
"""


class GpuOperations(TorchFunctionMode):
    """Function mode that runs attention and autocast's float32 operations like CUDA and ROCm.

    Traces use fake CPU tensors, since a torch build without GPU kernels cannot run autograd on fake
    GPU tensors.

    Attention uses the flash kernel for 16-bit types without a mask, else the memory-efficient one;
    both save their inputs, their output and a float32 number per row. These kernels recompute a
    dropout within attention from its seed.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in FLOAT32 and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return func(*_widen(args), **dict(zip(kwargs, _widen(kwargs.values()))))  # noqa: B905
        return func(*args, **kwargs)


def _widen(values: Any) -> list[Any]:
    """Return the values with 16-bit tensors in float32."""
    return [
        value.float()
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        else value
        for value in values
    ]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention [B, H, T, D] of queries [B, H, T, D] over keys and values [B, G, S, D]."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (
            x.to(dtype) if x.is_floating_point() else x for x in (query, key, value)
        )
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    with torch.autocast("cpu", enabled=False):
        if attn_mask is None and query.dtype != torch.float32:
            output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
            return output
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:  # the kernel adds its mask
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        efficient: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
        return efficient


MODES: tuple[Mode, ...] = ("plain", "checkpointed", "on_host")


def trace_activations(
    model: TrainedModel,
    shape: Shape,
    *,
    mixed_precision: str = "no",
    autocast: bool = False,
    device: str = "cuda",
    tell: Tell = ignore,
) -> Activations:
    """Trace a training step of one micro batch.

    Args:
        model: The run's model.
        shape: The micro batch.
        mixed_precision: `no`, `bf16` or `fp16`.
        autocast: Weights are float32 and are cast when used (plain PyTorch); otherwise they have
            the type of mixed_precision (DeepSpeed).
        device: The device type; on `cpu` attention and autocast differ from a GPU's.
        tell: Receives a text for each pass that starts.

    Raises:
        PipelineError: the model does not support such a batch.
    """
    dtype = torch.float32 if autocast else MIXED_PRECISION[mixed_precision]
    cast = MIXED_PRECISION[mixed_precision] if autocast and mixed_precision != "no" else None
    forward = Forward(model.architecture)
    # Some adapters have index tensors that are neither parameters nor buffers.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, _on_cpu(model.module, dtype), contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # of a GPU
        if device != "cpu":
            stack.enter_context(GpuOperations())
        loss = forward.loss_of(model.module, shape)
        trace = Trace(model.module, cast)
        passes = []
        for number, mode in enumerate(MODES, 1):
            tell(f"pass {number} of {len(MODES)}")
            passes.append(trace.run(loss, mode))
    plain, checkpointed, on_host = passes
    return Activations(
        saved=plain.saved,
        peak=plain.peak,
        checkpointed=checkpointed.saved,
        peak_checkpointed=checkpointed.peak,
        on_device=on_host.saved,
        on_host=on_host.host,
        peak_on_host=on_host.peak,
        blocks=plain.blocks,
        batch=shape.batch,
        forward_flops=plain.forward_flops,
        backward_flops=plain.backward_flops,
        recomputed_flops=plain.block_flops,
    )


@contextlib.contextmanager
def _on_cpu(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give a meta model fake CPU tensors of this type, and restore its own afterwards."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            fake_tensor = torch.empty(tensor.shape, dtype=kind)
            if isinstance(tensor, torch.nn.Parameter):
                fake_tensor = torch.nn.Parameter(fake_tensor, requires_grad=tensor.requires_grad)
            made[id(tensor)] = fake_tensor
        return made[id(tensor)]

    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        holders: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
        for values in holders:
            tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
            if tensors:
                kept.append((values, tensors))
    for values, tensors in kept:
        values.update({name: fake(tensor) for name, tensor in tensors.items()})
    try:
        yield
    finally:
        for values, tensors in kept:
            values.update(tensors)
