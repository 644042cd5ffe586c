"""What surrounds the steps on a GPU: EMA, validation, samples, export, compile, attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel
from PIL import Image
from safetensors.torch import load_file
from tests.builders.models import make_unet
from tests.builders.phases import SEED
from tests.builders.processes import join_ranks
from tests.gpu.conftest import DEVICE, ON_CPU, GpuTraining
from tests.gpu.jobs import train_with_attention
from tests.training.inputs import PROMPTS, SIDE
from tests.training.matrix import PRESETS, ROUNDED, deviation
from tests.training.measures import SETTINGS, validations, weights
from tests.training.test_samples import GRID, VALUES, evaluated

from zerotrain import artifact
from zerotrain.cache.reader import read_cache
from zerotrain.export.options import SampleOptions
from zerotrain.export.sample import sample
from zerotrain.models.families import load_family
from zerotrain.state.position import EMA_SLOT, MASTER
from zerotrain.training.checkpointing.rank_writer import Staging, staged_bytes
from zerotrain.training.reporting.holdout_loss import HeldOutImages, holdout_loss

pytestmark = pytest.mark.gpu

FP32 = {"NVIDIA_TF32_OVERRIDE": "0"}


@pytest.fixture
def _no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions of this process in float32, as those of the training that it is held to."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("preset", ["torch", "zero2_offload", "zero3", "zero3_offload"])
def test_average_is_that_of_diffusers(training: GpuTraining, preset: str) -> None:
    """Every element, wherever the average is kept."""
    steps, highest = 6, 0.3
    training.run(
        "a", preset, steps, use_ema=True, ema_decay=highest, save_every=1, keep=steps,
        mixed_precision="bf16",
    )  # fmt: skip

    def masters(step: int) -> list[torch.nn.Parameter]:
        found = training.checkpoint("a", step)
        return [torch.nn.Parameter(found.tensor(name, MASTER)) for name in found.names]

    average = EMAModel(masters(1), decay=highest)
    for step in range(1, steps + 1):
        average.step(masters(step))
    found = training.checkpoint("a", steps)
    for name, expected in zip(found.names, average.shadow_params, strict=True):
        own = found.tensor(name, EMA_SLOT)
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-8)
        assert not torch.equal(own, found.tensor(name, MASTER))


@pytest.mark.usefixtures("_no_tf32")
@pytest.mark.parametrize("preset", PRESETS)
def test_validation_finds_what_an_evaluation_finds(training: GpuTraining, preset: str) -> None:
    """val_loss of the weights and of their average is that of the saved tensors, measured on the
    same device in this process; and no trained bit changes."""
    training.environment = FP32
    values = {"use_ema": True, "ema_decay": 0.3, "save_every": 2, "keep": 9}
    training.run("plain", preset, 4, **values)
    chosen = {**SETTINGS, "metric_for_best_model": "val_loss_ema"}
    training.run("p", preset, 4, **values, validation=chosen)
    assert training.hashes("p", 4) == training.hashes("plain", 4)
    cache: Any = read_cache(training.cache)
    device = torch.device(DEVICE)
    held_out = HeldOutImages(cache, SEED)
    objective = load_family("sdxl").objective(training.base)
    lines = validations(training, "p")[1:]
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        for key, slot in (("val_loss", MASTER), ("val_loss_ema", EMA_SLOT)):
            model = weights(training, "sdxl", "p", line["step"], slot).to(device)
            expected = holdout_loss(model, objective, held_out, device, held_out.batches(8))
            assert line[key] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("_no_tf32")
@pytest.mark.parametrize(
    ("family", "preset"),
    [("sdxl", "torch"), ("sdxl", "zero3_offload"), ("sd3", "zero2_offload"), ("flux", "zero3"),
     ("qwen_image", "torch")],
)  # fmt: skip
def test_samples_are_those_of_the_saved_weights(
    image_training: Callable[[str], GpuTraining], family: str, preset: str
) -> None:
    """The grid while training: latents within 1e-2 of those that a pipeline draws on the device
    with the saved weights, its images within four levels of 255; no trained bit changes."""
    training = image_training(family)
    training.environment = FP32
    values = {**VALUES, "family": family, "objective": {}}
    training.run("plain", preset, 3, **values)
    decode = "process" if family == "sdxl" else "inline"
    training.run("p", preset, 3, **values, validation={**GRID, "decode": decode})
    assert training.hashes("p", 3) == training.hashes("plain", 3)
    samples = training.progress("p") / "samples"
    sampled = load_file(samples / "step-00000003.safetensors")["latents"]
    assert sorted(path.stem for path in samples.glob("step-*.png")) == [
        "step-00000000", "step-00000002", "step-00000003"
    ]  # fmt: skip
    apart, levels = 0.0, 0
    for place, (image, latents) in enumerate(evaluated(training, family, 3, DEVICE)):
        expected = load_family(family).unpacked(latents.cpu(), sampled.shape[1:])[0]
        apart = max(apart, float((sampled[place] - expected.float()).abs().max()))
        file = samples / "step-00000003" / f"{place // 2:02d}-{place % 2:02d}.png"
        own, drawn = (np.asarray(one).astype(int) for one in (Image.open(file), image))
        levels = max(levels, int(np.abs(own - drawn).max()))
    print(f"{family} {preset}: latents {apart:.1e} apart, pixels {levels} of 255")
    assert apart <= 1e-2
    assert levels <= 4


@pytest.mark.parametrize("preset", ["torch", "zero3_offload"])
def test_export_is_what_was_trained_and_draws_on_the_device(
    image_training: Callable[[str], GpuTraining], tmp_path: Path, preset: str
) -> None:
    """Exported weights have the masters' bits, and `sample` draws with them, twice the same."""
    training = image_training("sdxl")
    training.run("a", preset, 2, **VALUES, objective={}, mixed_precision="bf16")
    exported, _ = training.export("a", 2)
    found = training.checkpoint("a", 2)
    saved = load_file(exported / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(saved[name], found.tensor(name, MASTER)) for name in found.names)
    drawn = [
        sample(SampleOptions(
            weights=exported, prompt=PROMPTS[0], out=tmp_path / name, seed=3,
            number=2, steps=2, guidance=3.0, resolution=str(SIDE),
        ))
        for name in ("first", "second")
    ]  # fmt: skip
    pixels = [[path.read_bytes() for path in files] for files in drawn]
    assert pixels[0] == pixels[1]
    assert pixels[0][0] != pixels[0][1]


@pytest.mark.parametrize("preset", ["torch", "zero2_offload", "zero3"])
def test_gradient_checkpointing_changes_no_loss(training: GpuTraining, preset: str) -> None:
    """Recomputed on the device, with inputs of the blocks kept there or in page-locked memory."""
    training.environment = FP32
    plain = training.run("plain", preset, 4)
    again = training.run("again", preset, 4, gradient_checkpointing=True)
    apart = {"recomputed": deviation(again, plain)}
    if preset != "zero3":
        host = training.run(
            "host", preset, 4, gradient_checkpointing=True, cpu_checkpointing=True
        )  # fmt: skip
        apart["kept on the host"] = deviation(host, plain)
    print(preset, apart)
    assert max(apart.values()) <= 1e-5


@pytest.fixture
def regular(training: GpuTraining, tmp_path: Path) -> GpuTraining:
    """A run of a U-Net whose heads have 16 channels, as the fast kernels of attention ask for."""
    training.base = tmp_path / "regular"
    torch.manual_seed(0)
    with artifact.publish(training.base, "base") as draft:
        unet = make_unet((32, 64), groups=8, attention_head_dim=4)
        unet.save_pretrained(draft.folder / "unet")
        DDPMScheduler(prediction_type="v_prediction").save_pretrained(draft.folder / "scheduler")
        draft.content = {"parts": {"unet": "made by hand"}}
    return training


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_every_kernel_of_attention_trains_alike(regular: GpuTraining, backend: str) -> None:
    """In bf16, within the bound between engines of that which torch chooses; and it resumes to the
    bit. cuDNN's is not deterministic, and torch refuses it where algorithms have to be."""
    if ON_CPU and backend not in ("MATH", "FLASH_ATTENTION"):
        pytest.skip("the CPU has no such kernel")
    values = {"mixed_precision": "bf16", "save_every": 2, "keep": 9}
    whole = regular.run("whole", "torch", 6, **values)

    def run(name: str, until: int) -> list[float]:
        regular.phase(name, "torch", until, **values)
        join_ranks(regular.start_job(name, 1, train_with_attention, backend), regular.output)
        return regular.losses(name)

    losses = run("at once", 6)
    apart = deviation(losses, whole)
    print(f"{backend}: {apart:.1e}")
    assert apart <= ROUNDED["bf16"]
    run("parts", 4)
    assert run("parts", 6) == losses
    assert regular.hashes("parts", 6) == regular.hashes("at once", 6)


def test_a_compiled_training_is_close_and_resumes_to_the_bit(regular: GpuTraining) -> None:
    """inductor's kernels on the device: losses within the rounding of bf16, a resume, which
    compiles them again, to the bit."""
    values = {"mixed_precision": "bf16", "save_every": 2, "keep": 9}
    plain = regular.run("plain", "torch", 4, **values)
    compiled = {**values, "dynamo_backend": "eager" if ON_CPU else "inductor"}
    whole = regular.run("whole", "torch", 4, **compiled)
    assert deviation(whole, plain) <= ROUNDED["bf16"]
    regular.run("parts", "torch", 2, **compiled)
    assert regular.run("parts", "torch", 4, **compiled) == whole
    assert regular.hashes("parts", 4) == regular.hashes("whole", 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_staged_copies_of_device_tensors_are_equal(dtype: torch.dtype) -> None:
    """Of every shape, though what is copied is overwritten at once."""
    tensors = [
        (torch.arange(n, dtype=torch.float64) % 251).to(dtype).to(DEVICE)
        for n in (1, 7, 4096, 2**20 + 3)
    ]
    expected = [tensor.cpu().clone() for tensor in tensors]
    staging = Staging(sum(map(staged_bytes, tensors)))
    copies: list[Any] = []
    for tensor in tensors:
        copies.append(staging.copy(tensor))
        tensor.zero_()
    for copy, own in zip(copies, expected, strict=True):
        assert copy is not None
        assert torch.equal(copy.cpu(), own)


@pytest.mark.parametrize("preset", ["torch", "zero2", "zero3"])
def test_saving_at_every_step_saves_that_step(training: GpuTraining, preset: str) -> None:
    """What the writing thread copies while the next steps run is the step's own: every checkpoint
    has the bits of a training that ended there."""
    made = {"mixed_precision": "bf16", "lr_scheduler_steps": 6}
    training.run("every", preset, 6, save_every=1, keep=9, **made)
    for step in (2, 3, 5):
        training.run(f"to-{step}", preset, step, **made)
        assert training.hashes("every", step) == training.hashes(f"to-{step}", step)


@pytest.mark.parametrize("family", ["causal_lm", "seq2seq_lm"])
def test_language_models_train_on_the_device(server: Any, tmp_path: Path, family: str) -> None:
    """Packed or padded rows: finite losses, the same bits after a resume; two engines alike."""
    from tests.training.inputs import text_inputs

    training = GpuTraining(tmp_path, text_inputs(family, tmp_path / "inputs", holdout=4), server)
    rows = artifact.read(training.cache, "cache").content["epoch_size"]
    values = {"family": family, "objective": {}, "epoch_size": rows}
    training.environment = FP32
    plain = training.assert_resumes("torch", 2, 4, **values)
    other = training.run("offload", "zero2_offload", 4, **values)
    assert deviation(other, plain) <= 1e-5


@pytest.mark.parametrize("preset", ["torch", "zero2_offload", "zero3_offload"])
def test_adapters_train_on_the_device(training: GpuTraining, preset: str) -> None:
    """LoRA with dropout in bf16 resumes to the bit, and trains nothing but the adapter."""
    lora = {"rank": 3, "alpha": 4.0, "dropout": 0.1, "target_modules": ["to_q", "to_v"]}
    training.assert_resumes(preset, 2, 4, lora=lora, mixed_precision="bf16")
    assert all(".lora_" in name for name in training.checkpoint("whole", 4).names)
