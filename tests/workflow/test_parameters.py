"""No value of the configuration is read by a stage and unseen by its rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from zerotrain.config import RunConfig
from zerotrain.config.agreement import AVERAGE_KEYS
from zerotrain.config.read import parse_config
from zerotrain.families import FLOW_MATCHING
from zerotrain.sources import source_files

OTHER_VALUES: dict[str, Any] = {
    "run": "other",
    "seed": 2,
    "base": "sdxl",
    "family": "sd3",
    "revision": "main",
    "prediction_type": "epsilon",
    "vae": "identity",
    "rescale_betas_zero_snr": True,
    "resume_from_checkpoint": "sdxl",
    "frozen_parameters": ["bias"],
    "trainable_parameters": ["bias"],
    "lora": {"rank": 4},
    "peft": {"peft_type": "LOHA"},
    "data.name": "shared",
    "data.source": "digits",
    "data.images": "more",
    "data.follow_symlinks": True,
    "data.metadata": "captions.csv",
    "data.caption_extension": ".caption",
    "data.path": "rows.jsonl",
    "data.format": "chat",
    "data.subset": "en",
    "data.hub_split": "test",
    "data.prompt_column": "question",
    "data.response_column": "answer",
    "data.prompt_template": "{question}?",
    "data.label_names": ["no", "yes"],
    "data.repeats": 2,
    "data.max_pixels": 1024 * 1024,
    "data.holdout": 0.5,
    "data.max_bad_samples": 1,
    "cache.shard_size": 2048,
    "cache.batch_size": 2,
    "cache.dtype": "bf16",
    "cache.max_sequence_length": 64,
    "train.resolution": 128,
    "train.max_length": 64,
    "train.packing": True,
    "train.global_batch_size": 2,
    "train.gradient_accumulation_steps": 2,
    "train.gradient_checkpointing": True,
    "train.param_groups": [{"parameters": ["bias"], "adam_weight_decay": 0.0}],
    "train.learning_rate": 1e-4,
    "train.lr_scheduler": "cosine",
    "train.lr_scheduler_args": {"power": 2.0},
    "train.optimizer": "sgd",
    "train.optimizer_args": {"momentum": 0.9},
    "train.lr_warmup_steps": 5,
    "train.lr_warmup_ratio": 0.1,
    "train.lr_scheduler_steps": 1000,
    "train.adam_beta1": 0.8,
    "train.adam_beta2": 0.99,
    "train.adam_epsilon": 1e-6,
    "train.adam_weight_decay": 0.0,
    "train.no_decay_norm_bias": True,
    "train.max_grad_norm": 0.5,
    "train.nan_action": "skip",
    "train.snr_gamma": 5.0,
    "train.noise_offset": 0.05,
    "train.weighting_scheme": "mode",
    "train.logit_mean": 0.5,
    "train.logit_std": 0.5,
    "train.mode_scale": 0.8,
    "train.flow_shift": 3.0,
    "train.caption_dropout_probability": 0.2,
    "train.use_ema": True,
    "train.ema_decay": 0.99,
    "train.ema_update_interval": 2,
    "train.ema_device": "cpu",
    "train.save_every": 50,
    "train.keep": 3,
    "train.keep_every": 100,
    "train.disk_low_threshold": "1 GiB",
    "train.log_every": 1,
    "train.report_to": ["tensorboard", "wandb"],
    "train.tracker_project_name": "digits",
    "train.tracker_run_name": "first",
    "launch.preset": "zero2_offload",
    "launch.num_processes": 2,
    "launch.machines": 2,
    "launch.processes_per_machine": 2,
    "launch.mixed_precision": "bf16",
    "launch.allow_tf32": True,
    "launch.full_determinism": False,
    "launch.dynamo_backend": "eager",
    "launch.dynamo_mode": "max-autotune",
    "launch.find_unused_parameters": True,
    "launch.num_cpu_threads_per_process": 2,
    "launch.offload_optimizer": "cpu",
    "launch.offload_param": "cpu",
    "launch.offload_path": "swap",
    "launch.scratch": "$TMPDIR",
    "launch.partition_activations": True,
    "launch.cpu_checkpointing": True,
    "launch.contiguous_memory_optimization": True,
    "launch.fp16.loss_scale": 128,
    "launch.fp16.initial_scale_power": 8,
    "launch.fp16.loss_scale_window": 100,
    "launch.fp16.hysteresis": 2,
    "launch.fp16.min_loss_scale": 2,
    "launch.zero3_init": True,
    "launch.main_process_port": 29501,
    "launch.ddp_timeout": 600,
    "launch.device_memory": "24 GiB",
    "launch.deepspeed": {"communication_data_type": "fp32"},
    "launch.accelerate": {"debug": True},
    "validation": {"prompts": ["a cat"]},
    "export.dtype": "bf16",
    "evaluate.prompts": ["a cat"],
    "evaluate.images_per_prompt": 2,
    "evaluate.num_inference_steps": 10,
    "evaluate.guidance_scale": 1.0,
    "evaluate.scheduler": "ddim",
    "evaluate.batch_size": 4,
    "evaluate.max_samples": 16,
    "evaluate.max_new_tokens": 16,
    "evaluate.judge": "nearest_neighbour",
}
"""Another valid value for every key."""

WITHOUT_EFFECT = {
    "data.num_workers": "more threads give the same manifest",
    "train.flux_guidance_value": "another family's key: refused",
}

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

NEEDED_WITH = {
    **{f"data.{key}": TEXT for key in ("path", "format", "subset", "hub_split")},
    **{f"data.{key}": COLUMNS for key in ("prompt_column", "response_column", "label_names")},
    "data.prompt_template": {**TEXT, "data.response_column": "told"},
    **{f"train.{key}": TEXT for key in ("max_length", "packing")},
    "data.source": {"data.images": None},
    "evaluate.judge": {"data.holdout": 0.5},
    "train.lr_scheduler_args": {"train.lr_scheduler": "polynomial"},
    "train.optimizer_args": {"train.optimizer": "sgd"},
    "launch.preset": {"phases.0.launch": None, "phases.1.launch": None},
    "train.gradient_accumulation_steps": {"train.global_batch_size": 2},
    "launch.num_processes": {"train.global_batch_size": 2},
    "launch.machines": {"launch.num_processes": 2, "train.global_batch_size": 2},
    "launch.processes_per_machine": {"train.global_batch_size": 2},
    "launch.dynamo_mode": {"launch.dynamo_backend": "inductor"},
    "launch.device_memory": {
        "launch.preset": "auto",
        "phases.0.launch": None,
        "phases.1.launch": None,
    },
    "launch.offload_path": {
        "launch.preset": "zero3_nvme",
        "phases.0.launch": None,
        "phases.1.launch": None,
    },
    "cache.max_sequence_length": {"family": "sd3"},
    **{f"train.{key}": {"train.use_ema": True} for key in AVERAGE_KEYS},
    "vae": {"family": "flux"},
    **{f"train.{key}": {"family": "sd3"} for key in FLOW_MATCHING},
    "train.mode_scale": {"family": "sd3", "train.weighting_scheme": "mode"},
    **{f"evaluate.{key}": TEXT for key in ("max_samples", "max_new_tokens")},
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
    "frozen_parameters": "render_launch",
    "resume_from_checkpoint": "import_checkpoint",
    "seed": "render_launch",
    "family": "build_base",
    "base": "build_base",
    "revision": "build_base",
    "prediction_type": "build_base",
    "vae": "build_base",
    "rescale_betas_zero_snr": "build_base",
    "run": "build_base",
}
"""The rule that has to run again for a key of this section, with what follows from it."""


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the configuration but those of phases, which are those of train and launch."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{prefix}{name}.")
        elif name != "phases":
            yield prefix + name


def test_parameters_list_is_complete():
    """Every key of the configuration stands in the lists of this test, which are its promise."""
    assert sorted(leaves(RunConfig)) == sorted([*OTHER_VALUES, *WITHOUT_EFFECT])


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


@pytest.fixture(scope="module")
def base_run(_built) -> Any:
    """A project in which everything has been made; these tests make nothing in it."""
    project = _built("nano")
    (project.folder / "captions.csv").write_text("file_name,text\ncat.png,a cat\n")
    (project.folder / "more").mkdir()
    (project.folder / "more" / "cow.png").write_bytes(b"pixels of a cow")
    for name in ("talk.jsonl", "rows.jsonl"):
        (project.folder / name).write_text('{"asked": "How are you?", "told": "Well."}\n')
    yield project
    assert project.planned("train") == {}


@pytest.mark.slow
@pytest.mark.parametrize("key", OTHER_VALUES)
def test_parameters_changed_value_reruns_its_stage(base_run, key):
    """Each key of the configuration, changed, reruns at least the stage that reads it first and the
    report at the end. The exceptions are listed with their reasons."""
    text = (base_run.folder / "config/config.yaml").read_text()
    config = yaml.safe_load(text)
    for other, value in NEEDED_WITH.get(key, {}).items():
        put(config, other, value)
    without = parse_config(_copy(config), "without") if key not in NEEDED_WITH else None
    put(config, key, OTHER_VALUES[key])
    assert parse_config(_copy(config), key) != without
    (base_run.folder / "changed.yaml").write_text(yaml.safe_dump(config))
    planned = base_run.planned("train", "--configfile", "changed.yaml")
    assert {FIRST_JOB[key.partition(".")[0]], "report"} <= set(planned)


def _copy(config: dict[str, Any]) -> dict[str, Any]:
    return yaml.safe_load(yaml.safe_dump(config))


STAGES = ("prepare_dataset", "build_base", "import_checkpoint", "cache_latents", "render_launch",
          "export_weights", "evaluate", "report")  # fmt: skip

REACHES_BY_INPUTS = {
    "build_base": {
        "data": "images are read through the dataset's manifest, which names their hashes",
        "family": "its module is an input",
        "phases": "the first resolution is the parameter `resolution`",
        "launch": "the parameter num_cpu_threads_per_process",
    },
    "cache_latents": {
        "data": "images are read through the dataset's manifest, which names their hashes",
        "family": "its module is an input",
        "launch": "the parameter num_cpu_threads_per_process",
        "peft": "the length of a trained prompt is the parameter `virtual_tokens`",
        "phases": "whether rows are packed is the parameter `packing`",
    },
    "import_checkpoint": {
        "cache": "the length of prompts is noted beside weights, which this stage does not write",
        "export": "the type of weights, which this stage does not write",
        "family": "its module is an input",
        "phases": "of the first the parameters `batch`, `param_groups`, `no_decay_norm_bias` and "
        "`allow`; its rates and decays tell groups apart that have them in `param_groups`",
    },
    "render_launch": {"run": "is part of every path"},
    "export_weights": {
        "cache": "captions of another length are another cache, from which another training comes",
        "family": "its module is an input",
    },
    "evaluate": {
        "cache": "captions of another length are another cache, which is an input",
        "data": "images are read through the dataset's manifest, which names their hashes",
        "family": "its module is an input",
        "phases": "resolution and threads have made the weights",
    },
    "report": {"phases": "their names are the parameter `folders`; their evaluations are inputs"}
    | {
        name: "is shown beside the evaluations, which came after it"
        for name in ("run", "family", "base", "revision", "data", "seed", "evaluate")
    },
}
"""Sections that a stage reads without a parameter of its rule, and why that is sound."""


def sections_read(stage: str) -> set[str]:
    """The keys of RunConfig that the sources behind a stage read, from a name typed RunConfig or
    called config."""
    found = set()
    for file in source_files(f"zerotrain.stages.{stage}", *FAMILIES):
        if "/config/" in file:
            continue  # the models and their reader touch every key
        for node in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in CONFIGS:
                name = {"phase": "phases", "phase_before": "phases"}.get(node.attr, node.attr)
                found |= {name} & set(RunConfig.model_fields)
    return found


FAMILIES = ("zerotrain.families.sdxl", "zerotrain.families.sd3")
CONFIGS = ("config", "self.config", "self._config")


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_a_rule_name_what_its_stage_reads(stage):
    """A section of the configuration that a stage reads is a parameter of its rule, or is listed
    here with the way by which a change of it arrives."""
    rule = Path(f"rules/{stage}.smk").read_text().partition("    params:\n")[2]
    declared = {name for name in RunConfig.model_fields if f"        {name}=" in rule}
    assert sections_read(stage) - declared == set(REACHES_BY_INPUTS.get(stage, {}))


def test_parameters_reading_of_sources_sees_what_is_read():
    """The test above can fail: it finds what stages are known to read."""
    assert "export" in sections_read("export_weights")
    assert "cache" in sections_read("cache_latents")
    assert {"evaluate", "seed"} <= sections_read("evaluate")
