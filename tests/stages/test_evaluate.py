"""evaluate: metrics and pictures of a model that learned nothing, on a few images."""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from PIL import Image
from tests.builders.images import make_image_config, prepare_inputs
from tests.builders.states import make_position

from zerotrain import artifact, cli
from zerotrain.artifact import link_or_copy
from zerotrain.cache.reader import read_cache
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.evaluation import images
from zerotrain.models.families import pipelines
from zerotrain.models.families.sdxl import FAMILY
from zerotrain.stages.evaluate import EvaluateSettings, evaluate, finite
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.state.state import write_state
from zerotrain.training.reporting import holdout_loss as holdout_loss_module
from zerotrain.training.reporting.holdout_loss import TIMESTEPS, HeldOutImages, holdout_loss

LOG = [
    {"phase": "only", "step": step, "samples": 4 * step, "loss": 1 / step, "seconds": 1.0}
    | {"learning_rate": 1e-3, "grad_norm": 1.0}
    for step in range(1, 21)
]
MEMORY = ("begin", "end_minus_begin", "peak_minus_begin", "total_peak")
RESOURCES = {"train_seconds": 12.5, "peak_host_bytes": 3, "peak_device_bytes": 0}


def config_of(
    folder: Path, train: Mapping[str, float] = MappingProxyType({}), **evaluation: object
) -> RunConfig:
    """A run on the images in a folder."""
    few = {"images_per_prompt": 2, "num_inference_steps": 2, "judge": "nearest_neighbour"}
    return make_image_config(
        folder / "images", data={"holdout": 0.5}, train=train, run="houses",
        phases=[{"name": "only", "until": 20}], evaluate=few | evaluation,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything up to the weights and the state of a phase; the weights are the base's."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "images").mkdir()
    for number in range(24):
        name = ("dark", "bright")[number % 2]
        level = 200 * (number % 2) + number
        Image.new("RGB", (16, 16), (level,) * 3).save(folder / "images" / f"{number:02d}.png")
        (folder / "images" / f"{number:02d}.txt").write_text(f"a {name} wall")
    prepare_inputs(config_of(folder), folder)
    base = artifact.read(folder / "base", "base")
    with artifact.publish(folder / "weights", "weights") as draft:
        for name in base.files:
            link_or_copy(base.path(name), draft.folder / name)
    publish_state(folder / "state", resources=RESOURCES)
    return folder


def publish_state(folder: Path, resources: dict[str, object] | None) -> None:
    position = make_position(20, run="houses", phase="only")
    with artifact.publish(folder, "state") as draft:
        write_state(draft.folder, position, {}, [], lambda name, slot: pytest.fail("no tensors"))
        (draft.folder / "records").mkdir()
        log = "".join(json.dumps(line) + "\n" for line in LOG)
        (draft.folder / "records" / "metrics.jsonl").write_text(log)
        if resources is not None:
            (draft.folder / "records" / "resources.json").write_text(json.dumps(resources))


def run_stage(folder: Path, name: str, **evaluation: object) -> dict[str, object]:
    """Evaluate into a folder of that name; returns the metrics."""
    evaluate(
        EvaluateSettings.of(config_of(folder, **evaluation), "only"),
        folder / "dataset",
        folder / "cache",
        folder / "weights",
        folder / "state",
        folder / name,
        folder / f"{name}.json",
    )
    metrics: dict[str, object] = json.loads((folder / f"{name}.json").read_text())
    return metrics


def without_memory(metrics: dict[str, object]) -> dict[str, object]:
    """What equal weights give equal numbers of."""
    return {name: value for name, value in metrics.items() if not name.startswith("eval_")}


def test_metrics_say_what_was_measured_and_used(run, capsys):
    """The keys of the contract; an untrained model predicts no velocity, so its loss is about 1."""
    metrics = run_stage(run, "evaluation")
    assert metrics.keys() == {
        *("prompt_accuracy", "judge_accuracy", "val_loss", "train_loss", "step", "samples"),
        *("train_seconds", "peak_host_bytes", "peak_device_bytes"),
        *(f"eval_{kind}_{name}_bytes" for kind in ("host", "device") for name in MEMORY),
    }
    begin, more = metrics["eval_host_begin_bytes"], metrics["eval_host_peak_minus_begin_bytes"]
    assert metrics["eval_host_total_peak_bytes"] == begin + more
    assert begin > 2**20
    assert metrics["judge_accuracy"] == 1.0
    assert metrics["prompt_accuracy"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert metrics["train_loss"] == pytest.approx((1 / 19 + 1 / 20) / 2)
    assert (metrics["step"], metrics["samples"], metrics["train_seconds"]) == (20, 80, 12.5)
    assert 0.5 < metrics["val_loss"] < 2
    assert str(run / "weights") in capsys.readouterr().err
    found = artifact.read(run / "evaluation", "evaluation")
    samples = {f"samples/{row:02d}-{column:02d}.png" for row in range(2) for column in range(2)}
    records = {"records/memory.csv", "records/metrics.json"}
    assert found.path("records/metrics.json").read_bytes() == (run / "evaluation.json").read_bytes()
    curves = {"loss.csv", "metrics.csv", "loss.png", "learning_rate.png"}
    assert found.files.keys() == {"grid.png", *curves, *samples, *records}
    assert found.content["prompts"] == ["a dark wall", "a bright wall"]


def test_a_state_without_its_resources_is_evaluated(run, tmp_path, capsys):
    """A damaged record is removed when a training resumes; what it held is left out."""
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "state")
    publish_state(tmp_path / "state", resources=None)
    assert "train_seconds" not in run_stage(tmp_path, "alone")
    said = capsys.readouterr().out
    assert "train_seconds" not in said
    assert ", step 20, samples 80\n" in said


@pytest.mark.slow
def test_an_evaluation_can_be_repeated_bit_for_bit(run):
    """Equal weights give equal images and equal numbers, in batches of any size."""
    first = run_stage(run, "first")
    assert without_memory(run_stage(run, "second")) == without_memory(first)
    assert (
        artifact.read(run / "first", "evaluation").identity
        == artifact.read(run / "second", "evaluation").identity
    )


def test_a_limit_of_memory_is_a_sentence(run):
    """Where the weights are loaded; the evaluation of before stays."""
    before = run_stage(run, "limited", judge="none", prompts=["a dark wall"])
    whole = artifact.read(run / "limited", "evaluation").identity
    code, said = evaluate_without_memory_for_weights(run)
    assert code == 2, said
    assert "ERROR: memory is used up, or limited: " in said
    assert "Hint: see `ulimit -v`" in said
    assert artifact.read(run / "limited", "evaluation").identity == whole
    assert json.loads((run / "limited.json").read_text()) == before


def evaluate_without_memory_for_weights(run: Path) -> tuple[int, str]:
    """Evaluate in a fork that may take one more megabyte of address space once it loads weights of
    eight; exit code of the command line, and what it prints."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115
        signal.alarm(60)
        torch.set_num_threads(1)  # the parent's threads have not come along
        load = pipelines.from_pretrained

        def load_limited(*words: Any, **options: Any) -> Any:
            gc.collect()  # earlier weights, whose place these would take
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limit = pages * resource.getpagesize() + 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            return load(*words, **options)

        pipelines.from_pretrained = load_limited
        cli.command_line = lambda words: lambda: run_stage(run, "limited", judge="none")
        code: Any = 1
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as stream:
        said = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def test_without_a_judge_nothing_is_judged(run):
    metrics = run_stage(run, "unjudged", judge="none")
    assert "prompt_accuracy" not in metrics
    assert "judge_accuracy" not in metrics


def test_further_sizes_have_grids_of_their_own(run):
    """Next to that of squares, which stays as it is."""
    run_stage(run, "squares", judge="none", prompts=["a boat"])
    run_stage(run, "sizes", judge="none", prompts=["a boat"], sizes=[[24, 16], [16, 32]])
    plain, found = (artifact.read(run / name, "evaluation") for name in ("squares", "sizes"))
    for size in ((24, 16), (16, 32)):
        name = f"{size[0]}x{size[1]}"
        assert Image.open(found.path(f"samples-{name}/00-01.png")).size == size
        assert Image.open(found.path(f"grid-{name}.png")).height > 16
    images = {
        name for name in plain.files if name.endswith(".png") and name[:4] in ("grid", "samp")
    }
    assert {name: plain.files[name] for name in images} == {n: found.files[n] for n in images}


@pytest.fixture
def no_sampling(monkeypatch) -> None:
    """What is refused is refused before any image is made."""
    monkeypatch.setattr(type(FAMILY), "draw", lambda *_, **__: pytest.fail("it sampled"))


@pytest.mark.usefixtures("no_sampling")
def test_prompts_that_no_judge_knows_are_refused(run):
    with pytest.raises(PipelineError, match="none of the prompts is a held-out caption: a boat"):
        run_stage(run, "refused", prompts=["a boat"])
    assert not (run / "refused").exists()


@pytest.mark.usefixtures("no_sampling")
def test_a_judge_without_held_out_images_is_refused(run):
    config = config_of(run)
    config = config.model_copy(update={"data": config.data.model_copy(update={"holdout": 0.0001})})
    prepare_dataset(config.data, run / "all_trained")
    folders = [run / name for name in ("all_trained", "cache", "weights", "state")]
    with pytest.raises(PipelineError) as caught:
        evaluate(EvaluateSettings.of(config, "only"), *folders, run / "empty", run / "empty.json")
    assert caught.value.what == (
        "evaluate.judge: nearest_neighbour learns from held-out images, and data.holdout: 0.0001 "
        "keeps no image"
    )
    assert caught.value.hint == "raise data.holdout, or set evaluate.judge to none"
    assert not (run / "empty").exists()


@pytest.mark.slow
def test_the_held_out_loss_sees_held_out_samples_at_fixed_noise(run):
    """Another seed gives other noise; evaluate.batch_size changes the last bits at most."""
    import torch

    cache = read_cache(run / "cache")
    denoiser, objective = FAMILY.load_model(run / "base"), FAMILY.objective(run / "base")

    held_out = [
        cache.sample(i) for i, entry in enumerate(cache.entries) if entry.split == "holdout"
    ]
    found = HeldOutImages(cache, 0)
    assert len(found) == TIMESTEPS * len(held_out)
    for place in range(len(found)):
        latents = found[place]["latents"]
        assert any(torch.equal(latents, sample["latents"]) for sample in held_out)

    def loss(seed: int, batch_size: int = 8) -> float:
        device = torch.device("cpu")
        samples = HeldOutImages(cache, seed)
        return holdout_loss(denoiser, objective, samples, device, samples.batches(batch_size))

    assert loss(0) == loss(0)
    assert loss(0) == pytest.approx(loss(0, 3), rel=1e-6)
    assert loss(0) != loss(1)


def test_the_held_out_loss_gives_the_model_what_training_gives_it(run, monkeypatch):
    """Of the keys of the loss nothing: phases of other losses are compared."""
    given = []
    plain = FAMILY.objective(run / "weights")
    monkeypatch.setattr(holdout_loss_module, "CONDITIONS", ("noise_offset",))
    monkeypatch.setattr(
        type(FAMILY), "objective", lambda _, weights, settings: given.append(settings) or plain
    )
    config = config_of(run, {"noise_offset": 0.5, "snr_gamma": 5.0})
    settings = EvaluateSettings.of(config, "only")
    assert images._holdout_loss(settings, run / "cache", run / "weights", "cpu") > 0
    assert given == [{"noise_offset": 0.5}]


def test_without_held_out_samples_no_model_is_loaded(run, monkeypatch):
    monkeypatch.setattr(images, "HeldOutImages", lambda *_: [])
    monkeypatch.setattr(type(FAMILY), "load_trained", lambda *_: pytest.fail("it was loaded"))
    settings = EvaluateSettings.of(config_of(run), "only")
    found = images._holdout_loss(settings, run / "cache", run / "weights", "cpu")
    assert found is None


@pytest.mark.parametrize(
    ("value", "written"), [(1.5, 1.5), (math.nan, None), (math.inf, None), (3, 3), ("a", "a")]
)
def test_what_is_no_finite_number_is_null(value, written):
    """metrics.json is JSON for every reader."""
    assert finite(value) == written
