"""What each family of images promises, against the classes that its users load."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from tests.builders.images import build_nano
from tests.families.promises import batch_of, changed, prediction, train_adapter

from zerotrain.errors import PipelineError
from zerotrain.models.families import load_family, model_tensors
from zerotrain.models.families.diffusion import DiffusionFamily

STATISTICS = {"latents_mean": [0.5, -1.0, 0.0, 2.0], "latents_std": [1.0, 2.0, 3.0, 0.5]}
SHIFT = {"shift_factor": 0.3}


@dataclass(frozen=True)
class Case:
    """A family, its nano model, and the classes that load it."""

    name: str
    model: type[Any]
    autoencoder: type[Any] = diffusers.AutoencoderKL
    statistics: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[str, ...] = ("a red house", "a blue house")

    @property
    def family(self) -> DiffusionFamily:
        """As a configuration finds it."""
        found = load_family(self.name)
        assert isinstance(found, DiffusionFamily)
        return found


SDXL = Case("sdxl", diffusers.UNet2DConditionModel)
SD3 = Case("sd3", diffusers.SD3Transformer2DModel, statistics=SHIFT)
FLUX = Case("flux", diffusers.FluxTransformer2DModel, statistics=SHIFT)
QWEN = Case(
    "qwen_image", diffusers.QwenImageTransformer2DModel,
    diffusers.AutoencoderKLQwenImage, STATISTICS, ("a red house", "boat", "a red house, a boat"),
)  # fmt: skip
CASES = (SDXL, SD3, FLUX, QWEN)
every_family = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@pytest.fixture
def base(request: pytest.FixtureRequest, case: Case) -> Path:
    """The family's nano model."""
    name = {"sdxl": "nano"}.get(case.name, f"nano_{case.name}")
    found: Path = request.getfixturevalue(name)
    return found


@every_family
def test_the_nano_model_is_in_diffusers_layout(case: Case, base: Path) -> None:
    """The stock pipeline loads it; model_index.json names the classes that the family requires."""
    family, index = case.family, json.loads((base / "model_index.json").read_text())
    assert {part: index[part][1] for part in family.spec.classes} == dict(family.spec.classes)
    left_out = {*family.spec.optional_parts} if case is QWEN else set()
    assert {path.name for path in base.iterdir()} == {
        *family.spec.parts,
        "model_index.json",
    } - left_out
    assert not list(base.rglob("*.bin"))
    loaded = diffusers.DiffusionPipeline.from_pretrained(base)
    assert type(loaded).__name__ == index["_class_name"]


@every_family
def test_the_same_seed_builds_the_same_model(case: Case, tmp_path: Path) -> None:
    """Every file is equal, whatever the global generator was before, which is left as it was;
    another seed gives other weights alone."""

    def build(name: str, seed: int) -> dict[str, bytes]:
        folder = build_nano(case.name, tmp_path / name, steps=2, seed=seed)
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build("first", 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert build("second", 3) == first
    other = build("other", 4)
    differing = {name.split("/")[0] for name in first if first[name] != other[name]}
    weights = {name.split("/")[0] for name in first if name.endswith(".safetensors")}
    assert differing == weights
    assert {case.family.trained_part, "text_encoder", "vae"} <= weights


@pytest.mark.parametrize(
    ("case", "statistics"),
    [(SDXL, STATISTICS), *((case, case.statistics) for case in CASES)],
    ids=["sdxl-statistics", *(case.name for case in CASES)],
)
def test_latents_are_scaled_as_the_pipeline_expects_them(
    case: Case, base: Path, tmp_path: Path, statistics: dict[str, Any]
) -> None:
    """Decoding cached latents as the pipeline does gives the autoencoder's own reconstruction."""
    folder = changed(base, tmp_path / "base", "vae/config.json", **statistics)
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = case.family.load_encoders(folder, "cpu").encode_images(pixels)
    vae = case.autoencoder.from_pretrained(folder, subfolder="vae")

    def value(name: str, default: float) -> torch.Tensor:
        found = vae.config.get(name)
        return torch.tensor(default if found is None else found).view(1, -1, 1, 1)

    with torch.inference_mode():
        if case is QWEN:
            mode = vae.encode(pixels.unsqueeze(2)).latent_dist.mode().squeeze(2)
        else:
            mode = vae.encode(pixels).latent_dist.mode()
    offset = value("latents_mean", 0.0) + value("shift_factor", 0.0)
    unscaled = latents * value("latents_std", 1.0) / value("scaling_factor", 1.0) + offset
    assert (latents.dtype, latents.shape) == (torch.float32, (2, 4, 4, 4))
    torch.testing.assert_close(unscaled, mode)


@every_family
def test_saved_weights_load_and_keep_the_configuration(
    case: Case, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """from_pretrained gives back every tensor from several files; tables that are not trained, such
    as that of positions, are the base's."""
    monkeypatch.setattr(model_tensors, "MAX_SHARD_SIZE", "1MB")
    model = case.family.load_model(base)
    tensors = {name: torch.rand_like(tensor) for name, tensor in model.named_parameters()}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    case.family.save_model(base, shapes, tensors.__getitem__, torch.float32, tmp_path)
    part = case.family.trained_part
    loaded = case.model.from_pretrained(tmp_path / part)
    found = dict(loaded.named_parameters())
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in loaded.named_buffers())
    assert (tmp_path / part / "config.json").read_bytes() == (
        base / part / "config.json"
    ).read_bytes()
    assert len(list((tmp_path / part).glob("*.safetensors"))) > 1


@every_family
def test_weights_of_another_shape_are_refused(case: Case, base: Path, tmp_path: Path) -> None:
    """By name; nothing is written."""
    tensors = dict(case.family.load_model(base).named_parameters())
    name = next(name for name, tensor in tensors.items() if tensor.ndim > 1)

    def save() -> None:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        case.family.save_model(base, shapes, tensors.__getitem__, torch.float32, tmp_path)

    tensors[name] = tensors[name][:, :2]
    with pytest.raises(PipelineError, match=rf"{name}: \(\d+, 2.*\) in the trained"):
        save()
    del tensors[name]
    with pytest.raises(PipelineError, match=f"{name}: absent in the trained tensors"):
        save()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("case", [SD3, FLUX, QWEN], ids=["sd3", "flux", "qwen_image"])
def test_a_trained_adapter_is_what_the_pipeline_loads(
    case: Case, base: Path, tmp_path: Path
) -> None:
    """load_lora_weights, with alpha other than rank: the trained answers, not the base's."""
    family, batch = case.family, batch_of(case.family, base, [*case.prompts])
    model = train_adapter(family, base, batch, tmp_path)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(base)
    before = prediction(family, base, pipeline.transformer, batch)
    pipeline.load_lora_weights(tmp_path)
    after = prediction(family, base, pipeline.transformer, batch)
    expected = prediction(family, base, model, batch)
    assert (after - expected).abs().max() == 0
    assert (after - before).abs().max() > 1e-3
