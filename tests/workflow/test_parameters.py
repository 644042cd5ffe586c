"""No value of the configuration is read by a stage and unseen by its rule."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from pyarrow import parquet
from pydantic import BaseModel
from tests.workflow.conftest import Project

from zerotrain.config.families import FLOW_MATCHING
from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.config.section import Role, keys_with
from zerotrain.config.stage_settings import SETTINGS
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError
from zerotrain.graph.checks import find_problems


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key and its default, but those of phases, which are those of train and launch."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{prefix}{name}.")
        elif name != "phases":
            yield prefix + name, field.default


WITHOUT_EFFECT = {
    "cache.shards": "more jobs give the same cache",
    "data.num_workers": "more threads give the same manifest",
    "train.flux_guidance_value": "another family's key: refused",
    "launch.contiguous_memory_optimization": "always refused: nothing is sharded",
}
OTHERWISE: dict[type, Callable[[Any], Any]] = {
    bool: lambda default: not default,
    int: lambda default: 2 * default or 2,
    float: lambda default: default / 2 or 0.5,
}
"""Another value than a default of this type."""
OTHER_VALUES: dict[str, Any] = {
    key: OTHERWISE[type(default)](default)
    for key, default in fields(RunConfig)
    if type(default) in OTHERWISE and key not in WITHOUT_EFFECT
} | {
    "run": "other",
    "base": "sdxl",
    "family": "sd3",
    "revision": "main",
    "base_copy": "copy",
    "prediction_type": "epsilon",
    "vae": "identity",
    "resume_from_checkpoint": "sdxl",
    "base_model_precision": "nf4",
    "base_model_exclude_modules": ["conv_in"],
    "frozen_parameters": ["bias"],
    "trainable_parameters": ["bias"],
    "lora": {"rank": 4},
    "peft": {"peft_type": "LOHA"},
    "data.name": "shared",
    "data.source": "digits",
    "data.images": "more",
    "data.sources": [{"name": "more", "images": "more"}],
    "data.image_column": "picture",
    "data.caption_column": "told",
    "data.metadata": "captions.csv",
    "data.caption_extension": ".caption",
    "data.caption_strategy": "filename",
    "data.instance_prompt": "a dog",
    "data.caption_encoding": "gbk",
    "data.multiline_captions": "split",
    "data.caption_filter_list": ["blurry"],
    "data.caption_replacements": {"cat": "dog"},
    "data.caption_prefix": "sks,",
    "data.caption_suffix": "by me",
    "data.caption_separator": ";",
    "data.caption_variants": 2,
    "data.transparent_background": "#000000",
    "data.loss_mask": "alpha",
    "data.mask_images": "masks",
    "data.conditioning_images": "edges",
    "data.conditioning_columns": ["edited"],
    "data.path": "rows.jsonl",
    "data.format": "chat",
    "data.subset": "en",
    "data.hub_split": "test",
    "data.revision": "main",
    "data.prompt_column": "question",
    "data.response_column": "answer",
    "data.prompt_template": "{question}?",
    "data.label_names": ["no", "yes"],
    "data.max_pixels": 1024 * 1024,
    "data.aspect_buckets": {"alignment": 8},
    "cache.batch_size": 2,
    "cache.dtype": "bf16",
    "cache.max_sequence_length": 64,
    "train.resolution": 128,
    "train.max_length": 64,
    "train.long_captions": "chunk",
    "train.param_groups": [{"parameters": ["bias"], "adam_weight_decay": 0.0}],
    "train.learning_rate": 1e-4,
    "train.lr_scheduler": "cosine",
    "train.lr_scheduler_args": {"power": 2.0},
    "train.optimizer": "sgd",
    "train.optimizer_args": {"momentum": 0.9},
    "train.lr_warmup_ratio": 0.1,
    "train.lr_scheduler_steps": 1000,
    "train.grad_clip_method": "value",
    "train.nan_action": "skip",
    "train.on_change": "continue",
    "train.loss_type": "huber",
    "train.huber_schedule": "constant",
    "train.snr_gamma": 5.0,
    "train.weighting_scheme": "mode",
    "train.flow_shift": 3.0,
    "train.tread_config": {
        "routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]
    },
    "train.ema_device": "cpu",
    "train.save_every": 50,
    "train.keep_every": 100,
    "train.disk_low_threshold": "1 GiB",
    "train.report_to": ["tensorboard", "wandb"],
    "train.tracker_project_name": "digits",
    "train.tracker_run_name": "first",
    "launch.preset": "zero2_offload",
    "launch.processes_per_machine": 2,
    "launch.mixed_precision": "bf16",
    "launch.dynamo_backend": "eager",
    "launch.dynamo_mode": "max-autotune",
    "launch.num_cpu_threads_per_process": 2,
    "launch.offload_optimizer": "cpu",
    "launch.offload_param": "cpu",
    "launch.offload_path": "swap",
    "launch.fp16.loss_scale": 128,
    "launch.fp16.initial_scale_power": 8,
    "launch.main_process_port": 29501,
    "launch.device_memory": "24 GiB",
    "launch.host_memory": "64 GiB",
    "launch.deepspeed": {"communication_data_type": "fp32"},
    "launch.accelerate": {"debug": True},
    "validation": {"prompts": ["a cat"]},
    "export.dtype": "bf16",
    "evaluate.sizes": [[64, 32]],
    "evaluate.prompts": ["a cat"],
    "evaluate.conditioning_images": [["edges/cat.png"]],
    "evaluate.guidance_scale": 1.0,
    "evaluate.scheduler": "ddim",
    "evaluate.split": "train",
    "evaluate.judge": "nearest_neighbour",
}
"""Another valid value for every key, alone or with NEEDED_WITH; of numbers and switches by their
default, where that is valid."""

TEXT = {
    "family": "causal_lm",
    "data.images": None,
    "data.source": "text",
    "data.path": "talk.jsonl",
    "train.resolution": None,
    "evaluate.guidance_scale": None,
}
"""A run of text in place of one of images."""
COLUMNS = {**TEXT, "data.prompt_column": "asked", "data.response_column": "told"}


def preset(name: str) -> dict[str, Any]:
    """Both phases by one preset, in place of one each."""
    return {"launch.preset": name, "phases.0.launch": None, "phases.1.launch": None}


NEEDED_WITH = {
    **{f"data.{key}": TEXT for key in ("path", "format", "subset", "hub_split", "revision")},
    **{f"data.{key}": COLUMNS for key in ("prompt_column", "response_column", "label_names")},
    "data.instance_prompt": {"data.caption_strategy": "instanceprompt"},
    **{
        f"data.{key}": {"data.shuffle_caption": True} for key in ("keep_tokens", "caption_variants")
    },
    "data.conditioning_images": {"family": "flux"},
    "data.conditioning_columns": {"family": "flux", "data.metadata": "edits.jsonl"},
    "evaluate.conditioning_images": {
        "family": "flux",
        "data.conditioning_images": "edges",
        "evaluate.prompts": ["a cat"],
    },
    "data.prompt_template": {**TEXT, "data.response_column": "told"},
    **{f"train.{key}": TEXT for key in ("max_length", "packing")},
    "data.source": {"data.images": None},
    "data.sources": {"data.images": None},
    "data.folder_repeats": {"data.images": "tree"},
    **{
        f"data.{key}_column": {"data.images": "saved", "data.source": "huggingface"}
        for key in ("image", "caption")
    },
    "evaluate.judge": {"data.holdout": 0.5},
    "train.lr_scheduler_args": {"train.lr_scheduler": "polynomial"},
    "train.optimizer_args": {"train.optimizer": "sgd"},
    "revision": {"base": "someone/sdxl"},
    "launch.preset": {"phases.0.launch": None, "phases.1.launch": None},
    "train.gradient_accumulation_steps": {"train.global_batch_size": 2},
    "launch.num_processes": {"train.global_batch_size": 2},
    "launch.machines": {"launch.num_processes": 2, "train.global_batch_size": 2},
    "launch.processes_per_machine": {"train.global_batch_size": 2},
    "launch.dynamo_mode": {"launch.dynamo_backend": "inductor"},
    **{f"launch.{place}_memory": preset("auto") for place in ("device", "host")},
    "launch.offload_path": preset("zero3_nvme"),
    **{f"launch.{key}": preset("zero3") for key in ("offload_param", "zero3_init")},
    **{
        f"launch.{key}": {"train.gradient_checkpointing": True}
        for key in ("partition_activations", "cpu_checkpointing")
    },
    "cache.max_sequence_length": {"family": "sd3"},
    **{f"train.{key}": {"train.use_ema": True} for key in keys_with(TrainConfig, Role.OF_EMA)},
    "vae": {"family": "flux"},
    "base_model_precision": {"lora": {"rank": 4}},
    "base_model_exclude_modules": {"lora": {"rank": 4}, "base_model_precision": "nf4"},
    **{f"train.{key}": {"family": "sd3"} for key in FLOW_MATCHING},
    **{f"train.huber_{key}": {"train.loss_type": "huber"} for key in ("c", "schedule")},
    "train.mode_scale": {"family": "sd3", "train.weighting_scheme": "mode"},
    "train.precondition_outputs": {"family": "sd3"},
    "train.tread_config": {"family": "sd3"},
    **{f"evaluate.{key}": TEXT for key in ("max_samples", "max_new_tokens", "split")},
    **{key: {"launch.mixed_precision": "fp16"} for key in OTHER_VALUES if ".fp16." in key},
}
"""Other keys without which the value would not be valid, or would be overridden."""

FIRST_JOB = {
    "data": "prepare_dataset",
    "cache": "cache_latents",
    "train": "render_launch",
    "launch": "render_launch",
    "validation": "render_launch",
    "export": "export_weights",
    "evaluate": "evaluate",
    "lora": "render_launch",
    "peft": "render_launch",
    "trainable_parameters": "render_launch",
    "base_model_precision": "render_launch",
    "base_model_exclude_modules": "render_launch",
    "frozen_parameters": "render_launch",
    "resume_from_checkpoint": "import_checkpoint",
    "seed": "render_launch",
    "family": "build_base",
    "base": "build_base",
    "revision": "build_base",
    "base_copy": "build_base",
    "prediction_type": "build_base",
    "vae": "build_base",
    "rescale_betas_zero_snr": "build_base",
    "run": "build_base",
}
"""The rule that has to run again for a key of this section, with what follows from it."""

ALONE = {
    "run": "not made yet",
    "family": "family sdxl -> sd3",
    "resume_from_checkpoint": "not made yet",
    "data.name": "not made yet",
    "train.resolution": "train.resolution 64 -> 128",
}
"""Keys that are part of paths, and the whole reason of their first stage: each has its own plan."""


def test_parameters_list_is_complete():
    """Every key of the configuration stands in the lists of this test, which are its promise."""
    assert sorted(key for key, _ in fields(RunConfig)) == sorted([*OTHER_VALUES, *WITHOUT_EFFECT])


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, or remove it where the value is None."""
    *sections, last = (int(part) if part.isdigit() else part for part in key.split("."))
    node: Any = config
    for section in sections:
        node = node[section] if isinstance(section, int) else node.setdefault(section, {})
    if value is None:
        node.pop(last)
    else:
        node[last] = value


class Plans:
    """Dry runs of configurations in which as many keys are changed as are valid together."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._config = yaml.safe_load((project.folder / "config/config.yaml").read_text())
        self._lines: dict[str, list[str]] = {}
        self._batches: list[list[str]] = []
        for key in OTHER_VALUES:
            self._add(key)

    def lines(self, key: str) -> list[str]:
        """The lines of the dry run in which this key is changed."""
        if key not in self._lines:
            batch = next(batch for batch in self._batches if key in batch)
            (self._project.folder / "changed.yaml").write_text(yaml.safe_dump(self._changed(batch)))
            code, said = self._project.forked("-n", "train", "--configfile", "changed.yaml")
            assert code == 0, f"{batch}: {said}"
            self._lines |= dict.fromkeys(batch, said.splitlines())
        return self._lines[key]

    def _add(self, key: str) -> None:
        """Put a key into the first batch with which it is valid, or into one of its own."""
        fitting = (one for one in self._batches if key not in ALONE and self._fits([*one, key]))
        found = next(fitting, None)
        if found is None:
            self._batches.append([key])
        else:
            found.append(key)

    def _fits(self, batch: list[str]) -> bool:
        if ALONE.keys() & batch:
            return False
        values = [(other, value) for key in batch for other, value in settings(key).items()]
        if any(dict(values)[other] != value for other, value in values):
            return False
        try:
            return not find_problems(parse_config(self._changed(batch), "changed"))
        except PipelineError:
            return False

    def _changed(self, batch: list[str]) -> dict[str, Any]:
        config = _copy(self._config)
        for other, value in {k: v for key in batch for k, v in settings(key).items()}.items():
            put(config, other, value)
        return config


def settings(key: str) -> dict[str, Any]:
    """What is set in order to change a key."""
    return NEEDED_WITH.get(key, {}) | {key: OTHER_VALUES[key]}


@pytest.fixture(scope="module")
def plans(_built, tmp_path_factory) -> Iterator[Plans]:
    """Of a project in which everything has been made; these tests make nothing in it."""
    project = _built("nano").copy_to(tmp_path_factory.mktemp("plans") / "project")
    folder = project.folder
    for line in ("SHOWN = 4", "WIDTH = 40"):  # each changed key is to be seen
        project.edit("workflow/zerotrain/artifact/recipe.py", line, f"{line}000")
    (folder / "captions.csv").write_text("file_name,text\ncat.png,a cat\ndog.png,a dog\n")
    for name in ("cat", "dog"):
        (folder / "photos" / f"{name}.caption").write_text(f"a small {name}\n")
    (folder / "more").mkdir()
    (folder / "more" / "cow.png").write_bytes(b"pixels of a cow")
    (folder / "more" / "cow.txt").write_text("a cow\n")
    row = {"picture": {"bytes": b"pixels of a cow", "path": None}, "told": "a cow", "text": "x"}
    (folder / "saved").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "saved" / "rows.parquet")
    (folder / "tree/2_cow").mkdir(parents=True)
    (folder / "tree/2_cow/cow.png").write_bytes(b"pixels of a cow")
    for inner in ("edges", "masks"):
        (folder / inner).mkdir()
    for name in ("cat", "dog"):
        (folder / "edges" / f"{name}.png").write_bytes(b"edges")
        (folder / "masks" / f"{name}.png").write_bytes(b"a mask")
        row = f'{{"file_name": "{name}.png", "text": "a", "edited": "{name}.png"}}\n'
        project.append("edits.jsonl", row)
    for name in ("talk.jsonl", "rows.jsonl"):
        (folder / name).write_text('{"asked": "How are you?", "told": "Well."}\n')
    with contextlib.chdir(folder):
        found = Plans(project)
    yield found
    assert project.planned("train") == {}


@pytest.mark.slow
@pytest.mark.parametrize("key", OTHER_VALUES)
def test_parameters_changed_value_reruns_its_stage(plans, key):
    """Each key of the configuration, changed, is a reason why the stage that reads it first runs,
    and the report at the end runs, too. The exceptions are listed with their reasons."""
    first = FIRST_JOB[key.partition(".")[0]]
    lines = plans.lines(key)
    reasons = [line.partition(": ")[2] for line in lines if line.startswith(f"{first} ")]
    named = {change.split()[0] for reason in reasons for change in reason.split("; ")}
    expected = reasons[:1] == [ALONE[key]] if key in ALONE else is_named(key, named)
    assert expected, "\n".join(lines)
    assert any(line.startswith("report ") for line in lines)


def is_named(key: str, named: set[str]) -> bool:
    """Whether a key, or one inside its value, stands among those that are named."""
    return any(one == key or one.startswith(f"{key}.") for one in named)


def _copy(config: dict[str, Any]) -> dict[str, Any]:
    return yaml.safe_load(yaml.safe_dump(config))


@pytest.mark.parametrize(
    "rule", [one for one in SETTINGS if one not in ("prepare_dataset", "train_phase")]
)
def test_parameters_of_a_rule_are_what_its_stage_takes(rule):
    """A stage takes the settings that are its rule's input, and nothing else of the configuration;
    prepare_dataset takes `data`, and train_phase launch files."""
    text = Path(f"rules/{rule}.smk").read_text(encoding="utf-8")
    assert "--settings {input.settings:q}" in text
    assert ("--config" in text) == (rule == "report")  # which names the file, and plans with it
    stage = getattr(importlib.import_module(f"zerotrain.stages.{rule}"), rule)
    first, *others = inspect.get_annotations(stage).values()
    assert first == SETTINGS[rule].__name__
    paths = {"Path", "Path | None", "list[Path]", "Sequence[Path]"}
    # What the planner reads renders the launch, whose change runs all that the report is about.
    planned = {"Mapping[str, PlannedRun] | None"} if rule == "report" else set()
    assert {*others} <= {*paths, *planned, "KeyRange", "int", "bool", "None", "Recipe | None"}
