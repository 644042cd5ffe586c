"""A switch of each family's model: trained, switched twice, exported and loaded again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from tests.training.conftest import Training
from tests.training.matrix import deviation, export_state

from zerotrain import artifact
from zerotrain.checkpoint import Checkpoint
from zerotrain.config import TrainConfig
from zerotrain.export import WeightsTarget, export
from zerotrain.families import load_family
from zerotrain.families.lora import add_adapter
from zerotrain.position import MASTER

SWITCHES = ("torch", "zero2_offload", "zero3_offload")
STEPS = 4
"""Of each phase."""
LORA = {"rank": 3, "alpha": 6.0, "dropout": 0.0, "target_modules": ["to_q", "to_v"]}


def sd3(folder: Path) -> None:
    """A transformer of two blocks for the cache's 8 x 8 latents and embeddings."""
    torch.manual_seed(0)
    SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2,
        attention_head_dim=4, num_attention_heads=3, joint_attention_dim=16,
        caption_projection_dim=12, pooled_projection_dim=6, pos_embed_max_size=4,
    ).save_pretrained(folder / "transformer")  # fmt: skip
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")


MODELS: dict[str, Callable[[Path], None]] = {"sd3": sd3}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("lora", [None, pytest.param(LORA, marks=pytest.mark.slow)])
def test_switch_of_every_family_goes_on_and_exports(
    training: Training, tmp_path: Path, family: str, lora: dict[str, Any] | None
) -> None:
    """The losses are those of a run without a switch; diffusers loads the weights of the end, and
    they answer as the trained model does."""
    training.base = tmp_path / "base"
    with artifact.publish(training.base, "base") as draft:
        MODELS[family](draft.folder)
        draft.content = {"parts": {}}
    shape = {
        "family": family,
        "objective": TrainConfig().objective(family),
        "caption_dropout_probability": 0.3,
        "lora": lora,
    }
    end = STEPS * len(SWITCHES)
    whole = training.run("whole", "torch", end, **shape)
    state, losses = None, []
    for number, preset in enumerate(SWITCHES, start=1):
        losses = training.run(preset, preset, STEPS * number, state=state, **shape)
        rolling = training.progress(preset) / f"step-{STEPS * number:08d}"
        state = export_state(rolling, tmp_path / f"state-{preset}")
    apart = deviation(losses, whole)
    print(f"{family}: largest relative deviation {apart:.1e}")
    assert apart <= 1e-6
    assert losses[-1] != losses[0]

    checkpoint, known = Checkpoint(rolling), load_family(family)
    weights = tmp_path / "weights"
    target = WeightsTarget(weights, training.base, known, "fp32", lora=lora)
    export(checkpoint, rolling, target, None)
    trained = known.load_model(training.base).eval()
    if lora:
        add_adapter(trained, seed=0, **lora)
    parameters = dict(trained.named_parameters())
    for name in checkpoint.shapes:
        parameters[name].data = checkpoint.tensor(name, MASTER)
    loaded = known.load_trained(weights)
    objective, given = known.objective(training.base), batch()
    with torch.inference_mode():
        expected = objective.loss(trained.eval(), given)
        assert torch.equal(objective.loss(loaded, given), expected)
        assert not torch.equal(objective.loss(known.load_model(training.base), given), expected)


def batch() -> dict[str, torch.Tensor]:
    """Two samples of the cache's shapes."""
    source = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, 2, 4, 8, 8, generator=source)
    return {
        "latents": latents,
        "noise": noise,
        "uniform": torch.tensor([0.2, 0.7], dtype=torch.float64),
        "prompt_embeds": torch.randn(2, 5, 16, generator=source),
        "pooled_prompt_embeds": torch.randn(2, 6, generator=source),
    }
