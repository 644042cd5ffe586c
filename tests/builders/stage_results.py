"""Runs of every stage on small inputs, and what is stored of what they make."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.builders.exports import IMPORTING_RUN
from tests.builders.phases import PRESETS, ROOT
from tests.builders.reported import RUN, launched
from tests.builders.runs import make_config
from tests.builders.stage_inputs import TEXTS, StageInputs, publish_copy, write_images
from tests.builders.states import make_position
from tests.builders.stored_results import describe
from tests.training.conftest import write_base

from zerotrain import artifact
from zerotrain.artifact import digest
from zerotrain.artifact.tensor_file import open_tensors
from zerotrain.cache.reader import Cache, TokenCache, read_cache
from zerotrain.cache.record import Prompts
from zerotrain.config.data import DataConfig
from zerotrain.config.read import parse_config
from zerotrain.config.stage_settings import (
    EvaluateSettings,
    ExportSettings,
    ImportSettings,
    LaunchSettings,
    ReportSettings,
)
from zerotrain.data.conversation import TEXTS as CONVERSATIONS
from zerotrain.data.dataset import IMAGES as PICTURES
from zerotrain.data.dataset_folder import read_bad, read_samples
from zerotrain.data.sheets import draw_grid
from zerotrain.evaluation.results import spread
from zerotrain.models.families.sdxl import FAMILY as SDXL
from zerotrain.stages.evaluate import evaluate
from zerotrain.stages.export_weights import export_weights
from zerotrain.stages.import_checkpoint import import_checkpoint
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.stages.render_launch import render_launch
from zerotrain.stages.report import report
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import TrainerState
from zerotrain.state.state import State, write_state

Tensors = Mapping[str, torch.Tensor]
GOLDEN = ROOT / "tests/golden/launch"
SHOWN = 8
"""Tensors of a model that are stored one by one."""
HEADINGS = re.compile(r"<(h[1-4])[^>]*>(.*?)</\1>", re.DOTALL)
WEIGHTS = ".safetensors"
LATENT_SCALES = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")


def summarise(tensors: Tensors, most: int = SHOWN) -> dict[str, Any]:
    """What is stored of a model: the digest of its layout, all numbers as one tensor, and some
    tensors."""
    layout = [[name, str(one.dtype), list(one.shape)] for name, one in tensors.items()]
    return {
        "count": len(tensors),
        "sha256 of names, dtypes and shapes": digest(layout),
        "together": describe(torch.cat([one.flatten() for one in tensors.values()])),
        "some": {name: describe(tensors[name]) for name in spread([*tensors], most)},
    }


def given(record: Any) -> dict[str, Any]:
    """The fields of a record that are not at their defaults, as folders hold it."""
    defaults = {one.name: one.default for one in fields(record)}
    return {name: one for name, one in asdict(record).items() if one != defaults[name]}


def read_tensors(folder: Path) -> Tensors:
    """The tensors of the safetensors files of a folder, by name."""
    held = open_tensors(sorted(folder.glob(f"*{WEIGHTS}")))
    return {name: held[name].get_tensor(name) for name in sorted(held)}


def prepare_images(made: StageInputs, folder: Path) -> dict[str, Any]:
    """Captions with spaces and without, images of several shapes, an empty one, a lone one.

    A file that is damaged in another way has a reason of Pillow's, which its next version words
    otherwise.
    """
    images = write_images(folder / "images")
    (images / "0.txt").write_text("  a house, with spaces \n")
    (images / "empty.ppm").touch()
    (images / "empty.txt").write_text("an empty house")
    (images / "2.txt").unlink()
    data = {
        "images": str(images), "holdout": 0.3, "max_bad_samples": 2, "repeats": 2,
        "aspect_buckets": {"alignment": 8}, "max_pixels": 500, "num_workers": 0,
    }  # fmt: skip
    prepare_dataset(DataConfig.model_validate(data), folder / "dataset", 16)
    return dataset_result(folder / "dataset", PICTURES)


def prepare_text(made: StageInputs, folder: Path) -> dict[str, Any]:
    """Rows of Alpaca with a system and a history, with tools, and one without an answer."""
    rows = [
        {"instruction": " Add. ", "input": "1 and 2", "output": "3\n"},
        {"instruction": "Double.", "input": 0, "output": 0, "system": "be brief",
         "history": [["a", "b"]]},
        {"instruction": "Say hi.", "input": "", "output": ""},
        *({"instruction": f"Say {n}.", "input": "", "output": str(n)} for n in range(6)),
    ]  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"source": "text", "path": str(path), "holdout": 0.3, "max_bad_samples": 1}
    prepare_dataset(DataConfig.model_validate(data), folder / "dataset")
    return dataset_result(folder / "dataset", CONVERSATIONS)


def dataset_result(folder: Path, of: Any) -> dict[str, Any]:
    """Samples in order, what is refused, counts and identity."""
    found = artifact.read(folder, "dataset")
    return {
        "samples": [given(sample) for sample in read_samples(found, of)],
        "bad": read_bad(found),
        "content": found.content,
        "files": [*found.files],
    }


def build_result(made: StageInputs, folder: Path, family: str) -> dict[str, Any]:
    """A preset's classes, scales, words and weights.

    Other files and keys are left out: a library that adds one changes no result of ours.
    """
    base = artifact.read(made.base(family).with_name("built"), "base")
    result: dict[str, Any] = {
        "content": {key: base.content[key] for key in ("family", "base", "commit")},
        "files": sorted(name for name in base.files if name.endswith(WEIGHTS)),
    }
    if family not in TEXTS:
        index = json.loads(base.path("model_index.json").read_text())
        result["parts"] = {k: v for k, v in index.items() if isinstance(v, list) and all(v)}
        scheduler = json.loads(base.path("scheduler/scheduler_config.json").read_text())
        kept = ("prediction_type", "beta_schedule", "num_train_timesteps", "shift")
        result["scheduler"] = {key: scheduler[key] for key in kept if key in scheduler}
        vae = json.loads(base.path("vae/config.json").read_text())
        result["latents"] = {key: vae[key] for key in LATENT_SCALES if vae.get(key) is not None}
    for place in sorted({base.path(name).parent for name in base.files}):
        part = place.relative_to(base.folder).as_posix()
        if (place / "tokenizer.json").exists():
            model = json.loads((place / "tokenizer.json").read_text())["model"]
            words = model["vocab"]
            result[f"words of {part}"] = [len(words), digest(words)]
        if tensors := read_tensors(place):
            result[f"weights of {part}"] = summarise(tensors)
    return result


def cache_result(made: StageInputs, folder: Path, family: str) -> dict[str, Any]:
    """The keys of every sample in order, the shards, and the tensors of every sample."""
    made.cache(family, folder / "cache")
    cache = read_cache(folder / "cache")
    found = cache.artifact
    result: dict[str, Any] = {
        "files": [name for name in found.files if name.endswith(WEIGHTS)],
        "content": found.content,
        "entries": [given(entry) for entry in cache.entries],
    }
    if isinstance(cache, TokenCache):
        rows = [cache.sample(place) for place in range(len(cache.entries))]
        result["rows"] = [{name: one.tolist() for name, one in row.items()} for row in rows]
        return result
    assert isinstance(cache, Cache)
    result["sha256 of what a training draws"] = json.loads(
        (folder / "cache" / "index.json").read_text()
    )["data_sha256"]
    samples = [cache.sample(place) for place in range(len(cache.entries))]
    result["samples"] = [{n: describe(t) for n, t in one.items()} for one in samples]
    result["mirrored"] = [
        describe(cache.sample(place, flipped=True)["latents"])
        for place in range(len(cache.entries))
        if cache.is_mirrored(place)
    ]
    result["prompt"] = {n: describe(t) for n, t in Prompts(found).tensors("boat").text.items()}
    return result


def launch_result(made: StageInputs, folder: Path, preset: str) -> dict[str, Any]:
    """What the stage writes under a preset, and digests of the golden files of its engine.

    tests/launch/test_files.py holds the resolver to the golden texts, where a diff shows them.
    """
    prepare_dataset(DataConfig(images=str(made.images), num_workers=0), folder / "dataset")
    write_base(folder / "base", (9, 15))
    config = make_config(
        data={"images": str(made.images), "num_workers": 0},
        train={"global_batch_size": 2, "resolution": 16},
        launch={"preset": preset, "num_cpu_threads_per_process": 1, "mixed_precision": "bf16"},
    )
    settings = LaunchSettings.of(config, "a")
    base = folder / "base"
    chosen = PRESETS / f"{preset}.yaml"
    render_launch(settings, folder / "dataset", chosen, base, None, folder / "launch")
    texts = {
        file.name: file.read_text().replace(str(folder), "FOLDER").replace(str(made.folder), "MADE")
        for file in sorted((folder / "launch").iterdir())
        if file.name != artifact.MANIFEST
    }
    is_torch = preset == "torch"
    golden = [one for one in sorted(GOLDEN.glob("*/*/*")) if is_torch == (one.parts[-2] == "torch")]
    return {
        "lines": {name: text.splitlines() for name, text in texts.items()},
        "sha256 of golden files": {
            file.relative_to(GOLDEN).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in golden
        },
    }


def import_result(made: StageInputs, folder: Path) -> dict[str, Any]:
    """A U-Net and its AdamW as accelerate saves them, after a step on gradients that differ."""
    write_base(folder / "base", (9, 15))
    model = SDXL.load_model(folder / "base")
    own = [*model.parameters()]
    optimizer = torch.optim.AdamW(own, lr=1e-3)
    for number, parameter in enumerate(own):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    there = folder / "there"
    there.mkdir()
    model.save_pretrained(there / "unet")
    torch.save(optimizer.state_dict(), there / "optimizer.bin")
    config = parse_config({**IMPORTING_RUN, "resume_from_checkpoint": {"folder": str(there)}}, "c")
    import_checkpoint(ImportSettings.of(config), there, folder / "base", folder / "state")
    return state_result(folder / "state")


def state_result(folder: Path) -> dict[str, Any]:
    """Position and tensors of a state."""
    state = State(folder)
    return {
        "position": position_result(state.position),
        "slots": {
            slot: summarise({name: state.tensor(name, slot) for name in state.names})
            for slot in state.slots
        },
        "files": [name for name in state.artifact.files if not name.startswith("records/")],
    }


def position_result(position: TrainerState) -> dict[str, Any]:
    """A position, without what the training ran on; names of parameters as a digest."""
    found = asdict(position)
    del found["ran_on"], found["history"]
    for group in found["param_groups"]:
        group["parameters"] = [len(group["parameters"]), digest(group["parameters"])]
    return found


def train_result(made: StageInputs, folder: Path, family: str) -> dict[str, Any]:
    """Losses, norms and rates of every step, the checkpoint's position and its tensors."""
    trained = made.training(family)
    lines = [
        json.loads(line) for line in (trained / "progress/metrics.jsonl").read_text().splitlines()
    ]
    checkpoint = Checkpoint(trained / "checkpoint")
    return {
        "log": [
            {key: line[key] for key in ("step", "samples", "loss", "grad_norm", "learning_rate")}
            for line in lines
            if "loss" in line
        ],
        "position": position_result(checkpoint.position),
        "slots": {
            slot: summarise({name: checkpoint.tensor(name, slot) for name in checkpoint.names}, 16)
            for slot in checkpoint.slots
        },
    }


def export_result(made: StageInputs, folder: Path, family: str) -> dict[str, Any]:
    """Names and dtypes of the weights, and the state, of the short training."""
    trained = made.training(family)
    dtype = "bf16" if family in TEXTS else "fp32"
    own = {"data": {"source": "sums"}} if family in TEXTS else {}
    config = make_config(family=family, export={"dtype": dtype}, **own)
    export_weights(
        ExportSettings.of(config), trained / "checkpoint", trained / "base", folder / "weights",
        folder / "state",
    )  # fmt: skip
    weights = artifact.read(folder / "weights", "weights")
    part = folder / "weights" / ("" if family in TEXTS else "unet")
    return {
        "weights": {
            "files": sorted(name for name in weights.files if name.endswith(WEIGHTS)),
            "content": {k: v for k, v in weights.content.items() if k != "parts"},
            "tensors": summarise(read_tensors(part)),
        },
        "state": state_result(folder / "state"),
    }


def evaluate_result(made: StageInputs, folder: Path, family: str) -> dict[str, Any]:
    """Metrics of the base, as if a training had ended with it, and what it makes."""
    base = artifact.read(made.base(family), "base")
    publish_copy(base, folder / "weights", "weights", {})
    log = [
        {"phase": "a", "step": step, "samples": 4 * step, "loss": 1 / step, "seconds": 1.0}
        | {"learning_rate": 1e-3, "grad_norm": 1.0}
        for step in range(1, 21)
    ]
    with artifact.publish(folder / "state", "state") as draft:
        position = make_position(20, run="r", phase="a")
        write_state(draft.folder, position, {}, [], lambda name, slot: torch.zeros(0))
        (draft.folder / "records").mkdir()
        lines = "".join(f"{json.dumps(line)}\n" for line in log)
        (draft.folder / "records/metrics.jsonl").write_text(lines)
    evaluate(
        EvaluateSettings.of(made.config(family), "a"), made.dataset(family),
        made.cache(family, folder / "cache"), folder / "weights", folder / "state",
        folder / "evaluation", folder / "metrics.json",
    )  # fmt: skip
    evaluation = artifact.read(folder / "evaluation", "evaluation")
    metrics = json.loads((folder / "metrics.json").read_text())
    names = [name for name in evaluation.files if not name.startswith(("answers", "records/"))]
    result: dict[str, Any] = {
        "metrics": {k: v for k, v in metrics.items() if not k.startswith("eval_")},
        "files": sorted(names),
        "prompts": evaluation.content["prompts"],
        "loss.csv": evaluation.path("loss.csv").read_text().splitlines()[:3],
    }
    if family in TEXTS:
        answers = evaluation.path("answers.jsonl").read_text().splitlines()
        return result | {"answers": [json.loads(line) for line in answers]}
    pictures = sorted(name for name in evaluation.files if name.startswith("samples/"))
    return result | {"mean pixels": {name: _mean(evaluation.path(name)) for name in pictures}}


def _mean(file: Path) -> float:
    """One number of an image: single pixels are rounded to whole numbers."""
    with Image.open(file) as image:
        return float(np.asarray(image.convert("RGB"), dtype=np.float64).mean())


def report_result(made: StageInputs, folder: Path) -> dict[str, Any]:
    """The files and headings of a page about two phases of a run."""
    config = parse_config(RUN, "test")
    phases = [folder / "plain", folder / "offload"]
    for number, phase in enumerate(phases):
        launched(phase, config)
        with artifact.publish(phase / "evaluation", "evaluation") as draft:
            for name in ("loss", "learning_rate"):
                Image.new("RGB", (8, 8), "red").save(draft.folder / f"{name}.png")
            rows = [[Image.new("RGB", (8, 8), "blue")] * 2]
            draw_grid(["a red house"], rows).save(draft.folder / "grid.png")
            draft.content = {"prompts": ["a red house"]}
        measured = {"prompt_accuracy": 0.5 + number / 4, "step": 3 + 4 * number}
        (phase / "metrics.json").write_text(json.dumps(measured))
    report(ReportSettings.of(config), phases, folder / "report")
    found = artifact.read(folder / "report", "report")
    page = found.path("index.html").read_text()
    return {
        "files": [*found.files],
        "content": found.content,
        "headings": [[kind, text] for kind, text in HEADINGS.findall(page)],
        "pictures": page.count("data:image/png;base64,"),
    }
