"""Images of prompts while training: those that the saved weights make of these seeds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.builders.phases import SEED
from tests.training.conftest import Training, trained_model
from tests.training.inputs import PROMPTS, SIDE
from tests.training.measures import SETTINGS
from tests.training.saving_trials import Log

from zerotrain.config.models import EvaluateConfig
from zerotrain.data.draws import IMAGE_SEEDS, generator
from zerotrain.models.families import load_family
from zerotrain.training.reporting.decode_samples import list_undecoded
from zerotrain.training.reporting.samples import LatentSampler

GRID: dict[str, Any] = {
    **SETTINGS, "eval_steps": 2, "prompts": list(PROMPTS), "images_per_prompt": 2,
    "num_inference_steps": 3, "guidance_scale": 3.0, "scheduler": "default", "decode": "inline",
}  # fmt: skip
VALUES: dict[str, Any] = {"resolution": SIDE, "epoch_size": 12, "global_batch_size": 4}


def evaluated(
    training: Training, family: str, step: int, device: str = "cpu"
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each image that `evaluate` draws with the weights of a checkpoint, and its latents."""
    chosen: Any = load_family(family)
    folder = training.rolling("p", step)
    model = trained_model(family, training.base, folder)
    pipeline = chosen.load_pipeline(training.base, device, **{chosen.trained_part: model})
    values = EvaluateConfig(num_inference_steps=3, guidance_scale=3.0, batch_size=1)
    for place in [(number, column) for number in range(2) for column in range(2)]:
        prompt = PROMPTS[place[0]]
        seed = int(generator(SEED, IMAGE_SEEDS, *place).integers(2**63))
        (image,) = chosen.draw(pipeline, [prompt], [seed], values, resolution=SIDE)
        latents = pipeline(
            prompt=[prompt], height=SIDE, width=SIDE, num_inference_steps=3,
            generator=[torch.Generator("cpu").manual_seed(seed)], output_type="latent",
            **chosen.sampling_arguments(pipeline, values, None),
        ).images  # fmt: skip
        yield image, latents


def sampler(folder: Path) -> tuple[Any, Log]:
    """A sampler that only writes, and what it says."""
    made, log = LatentSampler.__new__(LatentSampler), Log()
    made.__dict__ |= {
        "_folder": folder, "_log": log, "_prompts": ["a"], "_columns": 1, "_decode": "process",
        "_process": None, "_family": SimpleNamespace(name="sdxl"), "_base": folder,
    }  # fmt: skip
    return made, log


def test_images_that_cannot_be_written_end_no_training(tmp_path):
    """A disk that takes no latents: it is reported, and the step's checkpoint is still to come."""
    made, log = sampler(tmp_path / "gone")
    made._write(3, torch.zeros(1, 2, 3, 4))
    [said] = log.said
    assert "step-00000003.safetensors: not written" in said


ORPHAN = """
import os, sys
from pathlib import Path
from tests.training.test_samples import sampler
from zerotrain.training.reporting import samples
samples.PROGRAM = "slow_decoder"
made, _ = sampler(Path(sys.argv[1]))
made._start_decoding()
print(made._process.pid, flush=True)
os._exit(1)
"""
SLOW_DECODER = """
import time
from zerotrain.training.reporting import decode_samples
decode_samples.decode = lambda *_: time.sleep(600)
decode_samples.main()
"""


@pytest.mark.slow
def test_what_decodes_ends_with_its_training(tmp_path):
    """A killed training leaves no process that would decode next to the next start's."""
    (tmp_path / "step-00000001.safetensors").touch()
    (tmp_path / "slow_decoder.py").write_text(SLOW_DECODER)
    words = [sys.executable, "-c", ORPHAN, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as training:
        assert training.stdout is not None
        process = psutil.Process(int(training.stdout.readline()))
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(60)
    assert not process.is_running()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "preset", "processes"), [("sdxl", "torch", 1), ("sd3", "zero3", 2)]
)
def test_samples_are_those_of_the_saved_weights(
    family, preset, processes, image_inputs, server, tmp_path
):
    """Within a level of 255, though no encoder was loaded; and the trained weights are the same."""
    training = Training(tmp_path, image_inputs(family), server)
    values = {**VALUES, "family": family, "objective": {}, "num_processes": processes}
    training.run("plain", preset, 3, **values)
    decode = "process" if family == "sdxl" else "inline"
    training.run("p", preset, 3, **values, validation={**GRID, "decode": decode})
    assert training.hashes("p", 3) == training.hashes("plain", 3)
    samples = training.progress("p") / "samples"
    assert not list_undecoded(samples)
    found = sorted(samples.glob("step-*.png"))
    assert [path.stem for path in found] == ["step-00000000", "step-00000002", "step-00000003"]
    sampled = load_file(samples / "step-00000003.safetensors")["latents"]
    shape = sampled.shape[1:]
    for place, (image, latents) in enumerate(evaluated(training, family, 3)):
        expected = load_family(family).unpacked(latents, shape)[0]  # type: ignore[union-attr]
        torch.testing.assert_close(sampled[place], expected, rtol=1e-4, atol=1e-5)
        file = samples / "step-00000003" / f"{place // 2:02d}-{place % 2:02d}.png"
        own = np.asarray(Image.open(file)).astype(int)
        assert np.abs(own - np.asarray(image).astype(int)).max() <= 1
    assert (sampled[0] - sampled[2]).abs().max() > 1e-3  # the prompts differ, and so do the images
    first, last = (load_file(samples / f"{path.stem}.safetensors") for path in found[::2])
    assert not torch.equal(first["latents"], last["latents"])
