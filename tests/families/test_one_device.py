"""Tensors that meet are on one device: a loss, its gradients and an update mix no two.

No GPU is needed. The meta device takes its place: it computes no numbers, and a mode looks at the
devices of each operation's tensors, as a GPU would.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.builders.phases import make_tiny_phase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerotrain.models.families import load_family
from zerotrain.training.engines.gradient_checkpointing import enable_gradient_checkpointing
from zerotrain.training.engines.torch_engine import FlatGroup
from zerotrain.training.optim.optimizer import Lion

DEVICE = torch.device("meta")
COPIES = ("_to_copy", "copy_")
"""Operations that read from one device and write to another."""
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
"""A tensor on the device takes indices in host memory, but not the other way round."""
SIDE = 4
"""Of the latents."""
SHAPES = {
    "sdxl": {"prompt_embeds": (8, "cross_attention_dim"), "pooled_prompt_embeds": (32,)},
    "sd3": {
        "prompt_embeds": (8, "joint_attention_dim"),
        "pooled_prompt_embeds": ("pooled_projection_dim",),
    },
    "flux": {
        "prompt_embeds": (8, "joint_attention_dim"),
        "pooled_prompt_embeds": ("pooled_projection_dim",),
    },
    "qwen_image": {"prompt_embeds": (8, "joint_attention_dim")},
}
"""The text of a sample; a number of its shape may be a key of the model's config."""
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "sdxl": [
        {"snr_gamma": 5.0},
        {"loss_type": "huber", "huber_schedule": "snr"},
        {"loss_type": "smooth_l1", "huber_schedule": "exponential"},
    ],
    "sd3": [
        {"weighting_scheme": name} for name in ("logit_normal", "mode", "sigma_sqrt", "cosmap")
    ],
    "flux": [{"precondition_outputs": True}, {"flow_shift": 2.0}],
    "qwen_image": [{"weighting_scheme": "none"}],
}


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices; a host's number may meet any tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = (args, kwargs)
        if name in INDEXING and args[0].device.type == DEVICE.type:
            given = (args[0], args[2:])
        tensors = [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
        places = {one.device.type for one in tensors if one.ndim or one.device == DEVICE}
        if len(places) > 1 and name not in COPIES:
            raise RuntimeError(f"{func}: tensors on {' and '.join(sorted(places))}")
        return func(*args, **(kwargs or {}))


def batch(family: str, config: Any) -> dict[str, torch.Tensor]:
    """Two samples on the device, as batches.move_to_device places them on a GPU."""
    shapes: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("latents", "noise"), (channels(family, config), SIDE, SIDE)),
        **SHAPES[family],
    }
    if family == "sdxl":
        shapes |= dict.fromkeys(("original_size", "crop_top_left", "target_size"), (2,))
        added = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        shapes["pooled_prompt_embeds"] = (added,)
    found = {
        name: torch.zeros(2, *(config[n] if isinstance(n, str) else n for n in shape))
        for name, shape in shapes.items()
    }
    found["uniform"] = torch.tensor([0.2, 0.7], dtype=torch.float64)
    found["loss_mask"] = torch.ones(2, 1, SIDE, SIDE)
    if family == "qwen_image":
        found["prompt_embeds_mask"] = torch.ones(2, 8, dtype=torch.bool)
    return {name: tensor.to(DEVICE) for name, tensor in found.items()}


def channels(family: str, config: Any) -> int:
    """Channels of a latent: a packed model takes those of 2 x 2 latents."""
    packed = family in ("flux", "qwen_image")
    return int(config.in_channels) // (4 if packed else 1)


@pytest.mark.parametrize("family", SHAPES)
def test_a_step_mixes_no_devices(family: str, request: pytest.FixtureRequest) -> None:
    """Loss, gradients with recomputed blocks, and the update of a model on a device."""
    base: Path = request.getfixturevalue("nano" if family == "sdxl" else f"nano_{family}")
    kind: Any = load_family(family)
    model = kind.load_model(base).to(DEVICE).train()
    enable_gradient_checkpointing(
        model, make_tiny_phase("a", "torch", 1).with_values(gradient_checkpointing=True)
    )
    flat = FlatGroup(dict(model.named_parameters()))
    given = batch(family, model.config)
    with OneDevice():
        loss = kind.objective(base, SETTINGS[family][0]).loss(model, given)
        loss.mean().backward()
        torch._foreach_norm(flat.gradients, 2, dtype=torch.float64)
        Lion([flat.weights]).step()
    assert (loss.device, loss.shape) == (DEVICE, (2,))
    assert all(part.device == DEVICE for part in (flat.weights, *flat.gradients))
    # A validation keeps the numbers that choose timesteps on the host.
    for uniform in (given["uniform"], torch.tensor([0.2, 0.7], dtype=torch.float64)):
        for settings in SETTINGS[family]:
            objective = kind.objective(base, settings)
            objective.predict = lambda model, noisy, *_: noisy
            with OneDevice():
                assert objective.loss(model, {**given, "uniform": uniform}).device == DEVICE


@pytest.mark.parametrize(
    "planted",
    [
        lambda given: given.loss_mask.mul(torch.ones(2, 1, 1, 1)),
        lambda given: torch.arange(10.0)[given.uniform.long()],
        lambda given: torch.cat([given.noise, torch.zeros(2, 4, SIDE, SIDE)]),
        lambda given: given.loss_mask.add_(torch.ones(1)),
    ],
    ids=["product", "table", "cat", "in place"],
)
def test_a_tensor_left_on_the_host_is_found(planted: Any) -> None:
    """The check itself: each way to meet a tensor of another device is refused."""
    given = {
        "loss_mask": torch.ones(2, 1, SIDE, SIDE),
        "noise": torch.ones(2, 4, SIDE, SIDE),
        "uniform": torch.zeros(2),
    }
    placed = SimpleNamespace(**{name: one.to(DEVICE) for name, one in given.items()})
    with OneDevice(), pytest.raises(RuntimeError, match="tensors on cpu and meta"):
        planted(placed)
