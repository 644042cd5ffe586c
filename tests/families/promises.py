"""Checks that tests of several families share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tests.builders.images import draw_of
from tests.conftest import ROOT

from zerotrain.cache.reader import stacked
from zerotrain.config.models import EvaluateConfig
from zerotrain.config.training import TrainConfig
from zerotrain.models.families.diffusion import DiffusionFamily
from zerotrain.models.families.lora import add_adapter, save_adapter
from zerotrain.models.families.patches import pack

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0}
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def changed(base: Path, folder: Path, file: str, **values: object) -> Path:
    """A copy of a base model with other values in one JSON file."""
    shutil.copytree(base, folder)
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def sample(
    family: DiffusionFamily, folder: Path, prompts: list[str], seeds: list[int],
    max_sequence_length: int | None = None, **changes: object,
) -> list[bytes]:  # fmt: skip
    """Pixels of sampled 16 px images."""
    config = EvaluateConfig.model_validate({"num_inference_steps": 2, **changes})
    images = draw_of(
        family, folder, prompts, seeds, config, resolution=16, device="cpu",
        max_sequence_length=max_sequence_length,
    )  # fmt: skip
    assert {image.size for image in images} == {(16, 16)}
    return [image.tobytes() for image in images]


def first_call(model: torch.nn.Module, call: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """What a model is first called with while `call` runs, and what it answers."""
    seen: list[tuple[dict[str, Any], torch.Tensor]] = []

    def watch(_: Any, __: Any, given: dict[str, Any], answer: tuple[torch.Tensor]) -> None:
        seen.append((given, answer[0]))

    handle = model.register_forward_hook(watch, with_kwargs=True)
    call()
    handle.remove()
    return seen[0]


def predicted_call(
    family: DiffusionFamily, base: Path, model: Any, latents: torch.Tensor, timesteps: Any,
    batch: dict[str, Any], settings: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], torch.Tensor]:  # fmt: skip
    """What the family's objective calls the model with, and the packed velocity that it gives."""
    predicted = []

    def predict() -> None:
        with torch.inference_mode():
            objective = family.objective(base, settings)
            predicted.append(objective.predict(model, latents, timesteps, batch))

    found, _ = first_call(model, predict)
    return found, pack(predicted[0])


def assert_same_call(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal tensors and values under equal names; what is None need not be given."""
    names = {name for name, value in expected.items() if value is not None and value != {}}
    assert {name for name, value in found.items() if value is not None} == names
    for name in names:
        if isinstance(expected[name], torch.Tensor):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6, msg=name)
        else:
            assert found[name] == expected[name], name


def batch_of(family: DiffusionFamily, base: Path, captions: list[str]) -> dict[str, Any]:
    """Samples of random latents under these captions, as the cache would give them."""
    encoders = family.load_encoders(base, "cpu")
    source = torch.Generator().manual_seed(3)
    pixels = torch.rand(len(captions), 3, 16, 16, generator=source) * 2 - 1
    latents = encoders.encode_images(pixels)
    text = encoders.encode_prompts(captions)
    samples = [
        {
            "latents": latents[row].clone(),
            "noise": torch.randn(latents.shape[1:], generator=source),
            "uniform": torch.tensor((row + 0.5) / len(captions), dtype=torch.float64),
            **{name: tensors[row].clone() for name, tensors in text.items()},
        }
        for row in range(len(captions))
    ]
    return stacked(samples, torch.device("cpu"))


def train_adapter(family: DiffusionFamily, base: Path, batch: dict[str, Any], out: Path) -> Any:
    """Train a LoRA for three steps and write it into `out`; the model, in eval mode."""
    model = family.load_model(base)
    add_adapter(model, seed=0, target_modules=TARGETS, **LORA)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=10.0)
    objective = family.objective(base, TrainConfig().objective(family.name))
    for _ in range(3):
        optimizer.zero_grad()
        objective.loss(model, batch).mean().backward()
        optimizer.step()
    shapes = {name: list(p.shape) for name, p in trained.items()}
    save_adapter(
        family, base, shapes, trained.__getitem__, LORA | {"target_modules": TARGETS},
        dtype=torch.float32, out=out,
    )  # fmt: skip
    return model.eval()


@torch.no_grad()
def prediction(family: DiffusionFamily, base: Path, model: Any, batch: dict[str, Any]) -> Any:
    """The model's velocity for a batch at timestep 500."""
    timesteps = torch.full((len(batch["latents"]),), 500.0)
    return family.objective(base).predict(model, batch["noise"], timesteps, batch)


TOY, TOY_SPEC = (ROOT / "tests/families" / name for name in ("toy_family.py", "toy_spec.py"))
