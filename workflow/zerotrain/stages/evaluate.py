"""evaluate: what the weights of a phase make, and how well.

It reads weights and state, never a checkpoint. A grid of samples, prompt accuracy by the judge,
loss on held-out samples, the loss curve, and what the training used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain import artifact
from zerotrain.artifact import RECORDS, write_json
from zerotrain.cache import read_cache
from zerotrain.config import RunConfig
from zerotrain.data.crop import crop_and_resize
from zerotrain.data.dataset import Dataset, read_dataset
from zerotrain.data.source import open_source
from zerotrain.errors import PipelineError
from zerotrain.evaluation.grid import draw_grid
from zerotrain.evaluation.holdout_loss import holdout_loss
from zerotrain.evaluation.learning_rate_curve import draw_learning_rate
from zerotrain.evaluation.loss_curve import draw_curve, phase_spans, read_log, write_csv
from zerotrain.families import load_family
from zerotrain.judge import Judge
from zerotrain.machine.device import device_type
from zerotrain.state import State
from zerotrain.training.draws import IMAGE_SEEDS, generator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    from PIL.Image import Image

KIND = "evaluation"
MOST_PROMPTS = 10
"""Captions that become prompts where the configuration names none."""


def evaluate(
    config: RunConfig,
    phase: str,
    dataset: Path,
    cache: Path,
    weights: Path,
    state: Path,
    output: Path,
    metrics: Path,
) -> None:
    """Publish the evaluation of a phase and write its metrics.

    Args:
        config: The run's configuration.
        phase: The phase's name.
        dataset: Folder of the dataset.
        cache: Folder of the phase's cache.
        weights: Folder of the phase's weights.
        state: Folder of the phase's state, for its log and resources.
        output: Folder to publish: grid.png, samples/, loss.csv, loss.png,
            learning_rate.png.
        metrics: JSON file to write.

    Raises:
        PipelineError: an input is not whole, or the judge has no image or knows none of the
            prompts.
    """
    threads = config.phase(phase).launch.num_cpu_threads_per_process
    torch.set_num_threads(threads or os.cpu_count() or 1)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    device = device_type()
    samples = read_dataset(dataset)
    parents = {
        "dataset": samples.artifact,
        "cache": artifact.read(cache, "cache"),
        "weights": artifact.read(weights, "weights"),
    }
    trained = State(state)
    parents["state"] = trained.artifact
    log = read_log(trained.artifact.path(f"{RECORDS}training_log.jsonl"))
    prompts = config.evaluate.prompts or _captions(samples)[:MOST_PROMPTS]
    _check_judge(config, samples, prompts)
    rows = _sample(config, phase, prompts, weights, device)
    found = {
        **_judge(config, phase, samples, prompts, rows),
        "val_loss": _holdout_loss(config, cache, weights, device),
        "train_loss": _mean_loss(log),
        "step": trained.position.step,
        "samples": trained.position.samples,
        **json.loads(trained.artifact.path(f"{RECORDS}resources.json").read_text()),
    }
    with artifact.publish(output, KIND, parents=parents) as draft:
        draw_grid(prompts, rows).save(draft.folder / "grid.png")
        (draft.folder / "samples").mkdir()
        for number, row in enumerate(rows):
            for column, image in enumerate(row):
                image.save(draft.folder / "samples" / f"{number:02d}-{column:02d}.png")
        write_csv(log, draft.folder / "loss.csv")
        draw_curve(log, draft.folder / "loss.png")
        draw_learning_rate(log, draft.folder / "learning_rate.png")
        draft.content = {
            "phase": phase,
            "prompts": prompts,
            "evaluate": config.evaluate.model_dump(mode="json"),
        }
    _write(metrics, {key: value for key, value in found.items() if value is not None})
    print(
        f"{phase}: "
        + ", ".join(f"{key} {value:.4g}" for key, value in found.items() if value is not None)
        + f"\n  grid     {output / 'grid.png'}\n  metrics  {metrics}\n  weights  {weights}"
    )


def _captions(dataset: Dataset) -> list[str]:
    """Distinct captions in the dataset's order."""
    return list(dict.fromkeys(sample.caption for sample in dataset.samples))


def _check_judge(config: RunConfig, dataset: Dataset, prompts: list[str]) -> None:
    """Refuse, before any image is made, what the judge could not judge."""
    if config.evaluate.judge == "none":
        return
    known = {sample.caption for sample in dataset.split("holdout")}
    if not known:
        raise PipelineError(
            f"evaluate.judge: {config.evaluate.judge} learns from held-out images, and "
            f"data.holdout: {config.data.holdout:g} keeps no image",
            hint="raise data.holdout, or set evaluate.judge to none",
        )
    if not known.intersection(prompts):
        raise PipelineError(
            f"evaluate.judge: none of the prompts is a held-out caption: {'; '.join(prompts[:3])}",
            hint="set evaluate.prompts to captions of the dataset, or evaluate.judge to none",
        )


def _sample(
    config: RunConfig, phase: str, prompts: list[str], weights: Path, device: str
) -> list[list[Image]]:
    """A row of images for each prompt. Seeds are the same for every phase, so rows compare."""
    count = config.evaluate.images_per_prompt
    places = [(number, column) for number in range(len(prompts)) for column in range(count)]
    images = load_family(config.family).sample(
        weights,
        [prompts[number] for number, _ in places],
        [int(generator(config.seed, IMAGE_SEEDS, *place).integers(2**63)) for place in places],
        config.evaluate,
        resolution=config.phase(phase).train.resolution,
        device=device,
        max_sequence_length=config.cache.max_sequence_length,
    )
    return [images[start : start + count] for start in range(0, len(images), count)]


def _judge(
    config: RunConfig, phase: str, dataset: Dataset, prompts: list[str], rows: list[list[Image]]
) -> dict[str, float]:
    """Accuracy of the samples by a judge of the held-out images, and its own on the others."""
    if config.evaluate.judge == "none":
        return {}
    resolution = config.phase(phase).train.resolution
    source = open_source(config.data)

    def crops(split: Literal["train", "holdout"]) -> Iterator[Image]:
        for sample in dataset.split(split):
            image = source.image_of(sample.file, sample.image_sha256)
            yield crop_and_resize(image, sample.crop, resolution)

    def captions(split: Literal["train", "holdout"]) -> list[str]:
        return [sample.caption for sample in dataset.split(split)]

    judge = Judge(crops("holdout"), captions("holdout"))
    known = [(p, image) for p, row in zip(prompts, rows, strict=True) for image in row]
    known = [(prompt, image) for prompt, image in known if prompt in judge.captions]
    return {
        "prompt_accuracy": judge.accuracy([image for _, image in known], [p for p, _ in known]),
        "judge_accuracy": judge.accuracy(crops("train"), captions("train")),
    }


def _holdout_loss(config: RunConfig, cache: Path, weights: Path, device: str) -> float | None:
    family = load_family(config.family)
    denoiser = family.load_trained(weights).to(device)
    opened = read_cache(cache, verify=False)
    return holdout_loss(
        denoiser, family.objective(weights), opened, config.seed, torch.device(device)
    )


def _mean_loss(log: list[dict[str, Any]]) -> float | None:
    """Mean logged loss over the last tenth of the phase, or its last line."""
    if not log:
        return None
    phase, first, last = phase_spans(log)[-1]
    end = [
        line for line in log if line["phase"] == phase and line["step"] > last - (last - first) / 10
    ]
    return float(sum(line["loss"] for line in end) / len(end))


def _write(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new-{os.getpid()}")
    write_json(new, value)
    new.replace(path)
