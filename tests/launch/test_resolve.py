"""A phase is resolved to numbers, each with its source, or refused with a sentence."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.builders.runs import make_run

from zerotrain.config.read import parse_config
from zerotrain.config.section import Role, keys_with
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.files import read_run_yaml, write_run_yaml
from zerotrain.launch.preset import Preset
from zerotrain.launch.resolve import LaunchSettings, phase_spans, resolve_phase
from zerotrain.launch.resolved import OWNERS, ResolvedPhase, keys_of
from zerotrain.launch.schedules import learning_rate, warmup_share, warmup_steps
from zerotrain.models.sizes import ModelSizes

TORCH = Preset("torch", "torch")
OFFLOAD = Preset("zero2_offload", "deepspeed", 2, "cpu")
ZERO3 = Preset("zero3", "deepspeed", 3)
SIZES = ModelSizes(
    everything=100_000_000, trained=90_000_000, largest=30_000_001, largest_name="up.weight",
    largest_trained=25_000_001, largest_vector=1280,
)  # fmt: skip
EPOCH = 100
TEXT_KEYS = keys_with(TrainConfig, Role.TEXT)


def raw(*phases: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A configuration of these phases."""
    return make_run(run="flowers", phases=list(phases)) | sections


def spans(*phases: dict[str, Any], **sections: Any) -> list[tuple[int, int]]:
    """First and last step of each phase, for epochs of 100 samples."""
    return list(phase_spans(parse_config(raw(*phases, **sections), "c").phases, EPOCH).values())


def resolve(
    *phases: dict[str, Any], name: str = "a", preset: Preset = TORCH, **sections: Any
) -> ResolvedPhase:
    """One of these phases, resolved."""
    settings = LaunchSettings.of(parse_config(raw(*phases, **sections), "c"), name)
    return resolve_phase(settings, preset, EPOCH, SIZES)


def resolved_text(**train: Any) -> ResolvedPhase:
    """A phase of a language model."""
    text = {"family": "causal_lm", "data": {"source": "sums"}, "train": train}
    return resolve({"name": "a", "until": 10}, **text)


def test_run_yaml_of_text_has_no_word_of_images(tmp_path: Path) -> None:
    """Nor of images any of text; what is read back is what was resolved."""
    phase = resolved_text(max_length=64)
    write_run_yaml(phase, tmp_path / "run.yaml")
    text = (tmp_path / "run.yaml").read_text()
    assert "max_length: {value: 64, source: user}" in text
    assert "packing: {value: false, source: default}" in text
    assert "training rows x repeats, from the cache's manifest" in text
    assert not {"resolution", "caption", "image"} & set(re.findall(r"[a-z]+", text))
    assert read_run_yaml(tmp_path / "run.yaml") == phase
    write_run_yaml(resolve({"name": "a", "until": 10}), tmp_path / "images.yaml")
    text = (tmp_path / "images.yaml").read_text()
    assert "resolution: {value: 1024, source: default}" in text
    assert "max_length" not in text
    assert "packing" not in text


def test_the_length_of_rows_is_one_of_the_numbers() -> None:
    """Progress under another length is another training; pixels are none of a text's numbers."""
    numbers = resolved_text(max_length=64).numbers()
    assert numbers != resolved_text(max_length=32).numbers()
    assert "resolution" not in numbers
    assert "max_length" not in resolve({"name": "a", "until": 10}).numbers()


def refusal(*phases: dict[str, Any], **sections: Any) -> str:
    """The message that these phases get."""
    with pytest.raises(PipelineError) as caught:
        resolve(*phases, **sections)
    return str(caught.value)


@pytest.mark.parametrize(
    ("until", "batch", "expected"),
    [
        (300, 4, 300),
        ("300 steps", 4, 300),
        ("3 epochs", 4, 75),
        ("3 epochs", 7, 43),  # 300 / 7 is 42.9: the last sample is seen
        ("0.5 epochs", 4, 13),
        ("0.1 epochs", 10, 1),  # 0.1 is no binary number; it is a tenth here
        ("0.07 epochs", 1, 7),
        ("5000 samples", 4, 1250),
        ("5001 samples", 4, 1251),
        ("1 sample", 64, 1),
    ],
)
def test_until_becomes_a_step(until: Any, batch: int, expected: int) -> None:
    """Steps stay; epochs and samples are divided by the global batch, rounded up."""
    assert spans({"name": "a", "until": until, "global_batch_size": batch}) == [(0, expected)]


def test_epochs_and_samples_count_from_the_start_of_the_run() -> None:
    """Phases with batches of their own: what was seen before counts."""
    found = spans(
        {"name": "a", "until": "2 epochs", "global_batch_size": 10},
        {"name": "b", "until": "4 epochs", "global_batch_size": 40},
        {"name": "c", "until": 30, "global_batch_size": 3},
        {"name": "d", "until": "431 samples", "global_batch_size": 1},
    )
    # 20 steps of 10; 200 samples more in 5 steps of 40; 5 steps of 3, 415 samples; 16 of 1.
    assert found == [(0, 20), (20, 25), (25, 30), (30, 46)]


def test_a_phase_that_overshot_its_epochs_is_counted_as_trained() -> None:
    """43 steps of 7 are 301 samples, so the next phase begins with the 302nd."""
    found = spans(
        {"name": "a", "until": "3 epochs", "global_batch_size": 7},
        {"name": "b", "until": "303 samples", "global_batch_size": 1},
    )
    assert found == [(0, 43), (43, 45)]


def test_a_phase_that_ends_before_it_begins_is_refused() -> None:
    """Whichever phase is rendered, the message names the one that is wrong."""
    text = refusal({"name": "a", "until": 300}, {"name": "b", "until": 200})
    assert "phase b: until 200 steps is step 200, but the phase begins at step 300" in text
    assert "`until` counts from the start of the run; give a later end" in text
    text = refusal(
        {"name": "a", "until": "2 epochs", "global_batch_size": 7},
        {"name": "b", "until": "203 samples", "global_batch_size": 7},
    )
    assert "phase b: until 203 samples is step 29, but the phase begins at step 29" in text


def test_an_empty_dataset_is_refused() -> None:
    """With what can be done about it."""
    settings = LaunchSettings.of(parse_config(raw({"name": "a", "until": 1}), "c"), "a")
    with pytest.raises(PipelineError, match="no training samples") as caught:
        resolve_phase(settings, TORCH, 0)
    assert "lower data.holdout" in str(caught.value)


def test_an_unknown_phase_is_refused() -> None:
    """The phases that there are stand in the hint."""
    text = refusal({"name": "a", "until": 1}, {"name": "b", "until": 2}, name="c")
    assert "the run flowers has no phase 'c'" in text
    assert "phases: a, b" in text


@pytest.mark.parametrize(
    ("ratio", "horizon", "expected"), [(0.1, 1000, 100), (0.07, 100, 7), (0.001, 100, 1), (0, 9, 0)]
)
def test_warmup_ratio_becomes_steps(ratio: float, horizon: int, expected: int) -> None:
    """Rounded up, in decimal: 0.07 * 100 is 7.000000000000001 to a computer."""
    assert warmup_share(ratio, horizon) == expected
    phase = resolve({"name": "a", "until": horizon}, train={"lr_warmup_ratio": ratio})
    assert phase.train.lr_warmup_steps == warmup_steps(phase.train, horizon) == expected
    source, reason = phase.sources["lr_warmup_steps"]
    assert (source, reason) == ("derived", f"lr_warmup_ratio {ratio:g} of {horizon} steps")


def test_warmup_in_steps_stays_under_every_horizon() -> None:
    """Only a ratio follows the horizon."""
    steps = resolve({"name": "a", "until": 100}, train={"lr_warmup_steps": 5})
    ratio = resolve({"name": "a", "until": 100}, train={"lr_warmup_ratio": 0.05})
    assert (steps.train.lr_warmup_steps, ratio.train.lr_warmup_steps) == (5, 5)
    assert (warmup_steps(steps.train, 400), warmup_steps(ratio.train, 400)) == (5, 20)


def test_warmup_beyond_the_schedule_is_refused() -> None:
    """Both numbers and both remedies are named."""
    text = refusal({"name": "a", "until": 10}, train={"lr_warmup_steps": 11})
    assert "phase a: 11 steps of warm-up, but the schedule has 10" in text
    assert "lower lr_warmup_steps or raise lr_scheduler_steps" in text


def test_a_warmup_and_a_decay_beyond_the_schedule_are_refused() -> None:
    """Unless the length of the stable part is given, which ends the schedule by itself."""
    train: dict[str, Any] = {
        "lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 3,
        "lr_scheduler_args": {"num_decay_steps": 8},
    }  # fmt: skip
    text = refusal({"name": "a", "until": 10}, train=train)
    assert "phase a: 3 steps of warm-up and 8 of decay" in text
    assert "but the schedule has 10" in text
    assert resolve({"name": "a", "until": 11}, train=train).derived.lr_scheduler_steps == 11
    train["lr_scheduler_args"]["num_stable_steps"] = 5
    assert resolve({"name": "a", "until": 10}, train=train).derived.lr_scheduler_steps == 10


@pytest.mark.parametrize(
    ("preset", "train", "message"),
    [
        (TORCH, {}, "preset torch has offload_optimizer none: it saves host memory"),
        (OFFLOAD, {"optimizer": "lion"}, "optimizer lion keeps its states in float32"),
        (OFFLOAD, {"optimizer_args": {"amsgrad": True}}, "optimizer adamw keeps its states in"),
    ],
)
def test_bf16_states_need_an_offloaded_adam(preset: Preset, train: Any, message: str) -> None:
    phase = {"name": "a", "until": 10}
    launch = {"bf16_optimizer_states": True}
    assert message in refusal(phase, preset=preset, train=train, launch=launch)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr": 1e-6}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 8}),
        ("sine", {"half_period_steps": 7}),
    ],
)
def test_a_switch_keeps_the_schedule(name: str, args: dict[str, Any]) -> None:
    """Every step has the same rate in both phases, and so with a longer run."""
    train = {"lr_scheduler": name, "lr_scheduler_args": args, "learning_rate": 1e-4}
    before = {"name": "a", "until": 10, "launch": {"preset": "torch"}}
    after = {"name": "b", "until": 20, "launch": {"preset": "zero2_offload"}}
    first = resolve(before, after, train=train)
    second = resolve(before, after, train=train, name="b", preset=OFFLOAD)
    longer = resolve(before, after | {"until": 30}, train=train, name="b", preset=OFFLOAD)
    assert (second.derived.engine, longer.derived.until_step) == ("deepspeed", 30)
    for step in range(30):
        rate = learning_rate(first.train, step, 20)
        assert (
            rate == learning_rate(second.train, step, 20) == learning_rate(longer.train, step, 20)
        )


def test_horizon_is_the_last_until_or_the_users() -> None:
    """And it says which: a derived one is kept when `until` is raised."""
    phases = ({"name": "a", "until": 10}, {"name": "b", "until": 30})
    derived = resolve(*phases)
    assert derived.derived.lr_scheduler_steps == 30
    source, reason = derived.sources["lr_scheduler_steps"]
    assert source == "derived"
    assert "until of the last phase (b); training keeps the horizon it began with" in reason
    users = resolve(*phases, train={"lr_scheduler_steps": 50})
    assert (users.derived.lr_scheduler_steps, users.sources["lr_scheduler_steps"][0]) == (
        50,
        "user",
    )


def test_sources_say_user_default_or_derived() -> None:
    """For every value of run.yaml; a value of the run's `train` is the user's in each phase."""
    phase = resolve(
        {"name": "a", "until": "2 epochs", "learning_rate": 1e-4, "launch": "zero2_offload"},
        train={"global_batch_size": 8, "gradient_accumulation_steps": 4},
        preset=OFFLOAD,
    )
    quantization = ("base_model_precision", "base_model_exclude_modules")
    others = {"accelerate", "deepspeed", "objective", "validation", "tread_config"}
    names = phase.values().keys() - {
        *others,
        *TEXT_KEYS,
        *quantization,
    }
    names |= {f"objective.{key}" for key in ("snr_gamma", "noise_offset")}
    found = {name: phase.sources[name][0] for name in names}
    assert set(found.values()) == {"user", "default", "derived"}
    assert {name for name, source in found.items() if source == "user"} == {
        "run", "phase", "preset", "until_step", "global_batch_size", "gradient_accumulation_steps",
        "learning_rate",
    }  # fmt: skip
    assert (phase.derived.engine, phase.derived.zero_stage, phase.derived.offload_optimizer) == (
        "deepspeed",
        2,
        "cpu",
    )
    assert (phase.derived.micro_batch_size, phase.derived.until_step) == (2, 25)
    reason = "global batch 8 / 4 accumulations / 1 process"
    assert phase.sources["micro_batch_size"] == ("derived", reason)
    assert phase.sources["until_step"] == ("user", "until: 2 epochs")


def test_threads_are_the_users_or_those_of_the_machine_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine that renders has no say in them."""
    users = resolve({"name": "a", "until": 1}, launch={"num_cpu_threads_per_process": 3})
    assert users.launch.num_cpu_threads_per_process == 3
    found = resolve({"name": "a", "until": 1})
    assert found.launch.num_cpu_threads_per_process is None
    why = "cores of the machine that trains / 1 process"
    assert found.sources["num_cpu_threads_per_process"] == ("default", why)
    monkeypatch.setattr(os, "cpu_count", lambda: 977)
    assert resolve({"name": "a", "until": 1}) == found
    assert "977" not in str(found)


def test_processes_of_several_machines() -> None:
    """Their product, or their share; threads are those of one machine's cores; and one machine with
    as many processes computes the same numbers."""
    launch = {"machines": 2, "processes_per_machine": 4}
    train = {"global_batch_size": 8}
    phase = resolve({"name": "a", "until": 1}, launch=launch, train=train)
    assert (phase.launch.machines, phase.processes_per_machine, phase.launch.num_processes) == (
        2,
        4,
        8,
    )
    why = "launch.machines x launch.processes_per_machine"
    assert phase.sources["num_processes"] == ("derived", why)
    assert phase.sources["num_cpu_threads_per_process"][1].endswith("/ 4 processes")
    share = resolve(
        {"name": "a", "until": 1},
        launch={"machines": 2, "num_processes": 8, "num_cpu_threads_per_process": 1},
        train=train,
    )
    assert (share.processes_per_machine, share.sources["num_processes"][0]) == (4, "user")
    alone = resolve(
        {"name": "a", "until": 1},
        launch={"num_processes": 8, "num_cpu_threads_per_process": 1},
        train=train,
    )
    assert share.numbers() == alone.numbers()


def test_numbers_do_not_follow_until() -> None:
    """Raising the end, appending a phase, renaming, logging and saving otherwise: no number of a
    phase depends on it, with a warm-up ratio neither."""
    train = {"lr_warmup_ratio": 0.1, "lr_scheduler": "cosine"}
    before = resolve({"name": "a", "until": 100}, train=train)
    after = resolve(
        {
            "name": "b",
            "until": 200,
            "save_every": 7,
            "keep": 1,
            "log_every": 3,
            "keep_every": 50,
            "disk_low_threshold": "1 GiB",
            "nan_action": "skip",
            "report_to": "none",
        },
        {"name": "c", "until": 400},
        name="b",
        train=train,
        validation={"prompts": ["a cat"]},
        run="renamed",
    )
    assert after.derived.lr_scheduler_steps != before.derived.lr_scheduler_steps
    assert after.train.lr_warmup_steps != before.train.lr_warmup_steps
    assert after.numbers() == before.numbers()


def test_an_interval_that_no_step_reaches_is_refused() -> None:
    """Of an end in samples, whose step is known here; the value and the key are named, and the last
    step; a time, the default, and the last step itself are not refused."""
    batch = {"global_batch_size": 2}
    with pytest.raises(PipelineError) as caught:
        resolve({"name": "a", "until": "200 samples"}, train={"save_every": 101, **batch})
    assert "phase a: save_every 101, but the run ends at step 100 (until of a)" in str(caught.value)
    assert "give at most 100" in caught.value.hint
    later = {"name": "b", "until": 300}
    assert (
        resolve({"name": "a", "until": 100}, later, train={"save_every": 101}).train.save_every
        == 101
    )
    assert resolve({"name": "a", "until": 100}, train={"save_every": 100}).train.save_every == 100
    assert (
        resolve({"name": "a", "until": 1}, train={"save_every": "2 h"}).train.save_every
        == "120 min"
    )
    assert resolve({"name": "a", "until": 1}).train.save_every == 500


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"train": {"gradient_checkpointing": True}}, "gradient_checkpointing"),
        ({"train": {"gradient_accumulation_steps": 2}}, "gradient_accumulation_steps"),
        ({"launch": {"allow_tf32": True}}, "allow_tf32"),
        ({"launch": {"full_determinism": False}}, "full_determinism"),
        ({"launch": {"dynamo_backend": "INDUCTOR"}}, "dynamo_mode"),
        ({"launch": {"num_cpu_threads_per_process": 99}}, None),
    ],
    ids=str,
)
def test_what_only_rounds_differently_is_no_part_of_what_is_trained(
    change: dict[str, Any], key: str | None
) -> None:
    """It is recorded apart, so that a change of it discards nothing."""
    train = {"global_batch_size": 4}
    plain = resolve({"name": "a", "until": 100}, train=train)
    other = resolve(
        {"name": "a", "until": 100},
        train=train | change.get("train", {}),
        launch=change.get("launch", {}),
    )
    assert other.numbers() == plain.numbers()
    if key:
        assert other.rounding().get(key) != plain.rounding().get(key)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"train": {"learning_rate": 1e-4}},
        {"train": {"global_batch_size": 2}},
        {"train": {"snr_gamma": 5}},
        {"train": {"noise_offset": 0.05}},
        {"train": {"use_ema": True}},
        {"train": {"lr_warmup_ratio": 0.1}},
        {"train": {"lr_warmup_steps": 2}},
        {"train": {"no_decay_norm_bias": True}},
        {"train": {"grad_clip_method": "value"}},
        {"launch": {"bf16_optimizer_states": True}, "preset": OFFLOAD},
        {"lora": {}, "base_model_precision": "nf4"},
        {"lora": {}, "base_model_precision": "int2-quanto"},
        {"launch": {"mixed_precision": "bf16"}},
        {"preset": OFFLOAD},
    ],
    ids=str,
)
def test_numbers_follow_what_matters(change: dict[str, Any]) -> None:
    """What changes a step sets progress aside."""
    assert resolve({"name": "a", "until": 100}, **change).numbers() != (
        resolve({"name": "a", "until": 100}).numbers()
    )


def test_a_quantized_base_is_part_of_the_numbers_and_of_run_yaml_where_there_is_one() -> None:
    """What was trained before there was such a key continues; ZeRO 3 is refused."""
    phase = {"name": "a", "until": 100}
    plain = resolve(phase, lora={})
    packed = resolve(phase, lora={}, base_model_precision="nf4", base_model_exclude_modules=["x"])
    added = {"base_model_precision": "nf4", "base_model_exclude_modules": ["x"]}
    assert packed.numbers() == plain.numbers() | added
    names = [{name for name, *_ in one.explain()} for one in (plain, packed)]
    assert names[1] - names[0] == added.keys()
    with pytest.raises(PipelineError, match="nf4, but preset zero3 is ZeRO 3, which would keep"):
        resolve(phase, lora={}, base_model_precision="nf4", preset=ZERO3)


def test_token_routes_are_numbers_where_they_are_given(tmp_path: Path) -> None:
    """run.yaml has them as they were resolved, and no word of them without."""
    routes = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}
    phase = resolve({"name": "a", "until": 1}, family="flux", train={"tread_config": routes})
    assert phase.numbers()["tread_config"] == routes
    write_run_yaml(phase, tmp_path / "run.yaml")
    assert read_run_yaml(tmp_path / "run.yaml") == phase
    write_run_yaml(resolve({"name": "a", "until": 1}, family="flux"), tmp_path / "plain.yaml")
    assert "tread" not in (tmp_path / "plain.yaml").read_text()


def test_numbers_leave_a_new_horizon_to_the_steps_from_there_on() -> None:
    """A user who sets or changes lr_scheduler_steps keeps what is trained."""
    phase = {"name": "a", "until": 100}
    set_by_user = resolve(phase, train={"lr_scheduler_steps": 500})
    assert set_by_user.derived.lr_scheduler_steps == 500
    assert set_by_user.numbers() == resolve(phase).numbers()


def test_numbers_leave_out_only_what_is_known_to_be_harmless() -> None:
    """A key that is added later counts."""
    found = resolve({"name": "a", "until": 100}, launch={"mixed_precision": "fp16"})
    names = set(OWNERS)
    assert names - set(found.numbers()) == {
        "run", "phase", "preset", "until_step", "lr_scheduler_steps", "save_every", "keep",
        "keep_every", "disk_low_threshold", "log_every", "offload_path", "allow",
        "main_process_port", "ddp_timeout", "accelerate", "deepspeed", "partition_activations",
        "machines", "cpu_checkpointing",
        "contiguous_memory_optimization", "zero3_init", *TEXT_KEYS, "use_ema",
        *keys_of(Role.OF_EMA), "find_unused_parameters", *keys_of(Role.ROUNDING),
        "num_cpu_threads_per_process", "lock_lease", "on_change", "nan_action",
        "report_to", "tracker_project_name", "tracker_run_name",
        "validation",
    }  # fmt: skip
    assert "fp16" not in resolve({"name": "a", "until": 100}).numbers()
    chunked = resolve({"name": "a", "until": 100}, train={"long_captions": "chunk"})
    assert chunked.numbers()["long_captions"] == "chunk"


SCHEDULE = {
    "lr_scheduler": "warmupdecaylr",
    "lr_scheduler_args": {"warmup_max_lr": 1e-4, "warmup_type": "linear"},
}


def test_deepspeeds_names_stand_under_our_own_keys_with_their_sources() -> None:
    """A peak, a warm-up and a horizon are reported in one place; the rest has a source each."""
    phase = resolve({"name": "a", "until": 2000}, train=SCHEDULE)
    assert (phase.train.lr_scheduler, phase.train.learning_rate) == ("WarmupDecayLR", 1e-4)
    assert (phase.train.lr_warmup_steps, phase.derived.lr_scheduler_steps) == (1000, 2000)
    assert phase.train.lr_scheduler_args == {"warmup_min_lr": 0.0, "warmup_type": "linear"}
    assert phase.sources["learning_rate"] == ("user", "lr_scheduler_args.warmup_max_lr")
    source, reason = phase.sources["lr_warmup_steps"]
    assert (source, reason) == ("default", "WarmupDecayLR's warmup_num_steps, as DeepSpeed has it")
    assert phase.sources["lr_scheduler_steps"][0] == "derived"
    assert phase.sources["lr_scheduler_args.warmup_type"] == ("user", "")
    assert phase.sources["lr_scheduler_args.warmup_min_lr"] == ("default", "")


def test_our_own_keys_say_it_for_deepspeeds_schedules_too() -> None:
    """Each wins over DeepSpeed's default, and is the user's."""
    own = {"learning_rate": 3e-4, "lr_scheduler_steps": 500, "lr_warmup_steps": 20}
    phase = resolve({"name": "a", "until": 100}, train={"lr_scheduler": "WarmupCosineLR", **own})
    assert {key: phase.values()[key] for key in own} == own
    assert {phase.sources[key] for key in own} == {("user", "")}
    share = {"lr_scheduler": "WarmupLR", "lr_warmup_ratio": 0.1}
    assert resolve({"name": "a", "until": 100}, train=share).train.lr_warmup_steps == 10
    test = resolve({"name": "a", "until": 100}, train={"lr_scheduler": "LRRangeTest"})
    assert test.train.learning_rate == 1e-3
    test = {"lr_scheduler": "LRRangeTest", "learning_rate": 1e-6}
    assert resolve({"name": "a", "until": 100}, train=test).train.learning_rate == 1e-6


def test_a_total_that_the_user_gives_is_the_users_horizon() -> None:
    """So that it is taken at once, as lr_scheduler_steps is, and not kept from before."""
    args = {"total_num_steps": 1500, "warmup_num_steps": 30}
    train = {"lr_scheduler": "WarmupDecayLR", "lr_scheduler_args": args}
    phase = resolve({"name": "a", "until": 100}, train=train)
    assert (phase.train.lr_warmup_steps, phase.derived.lr_scheduler_steps) == (30, 1500)
    assert phase.sources["lr_scheduler_steps"] == ("user", "lr_scheduler_args.total_num_steps")


def test_an_argument_whose_default_is_another_says_so() -> None:
    train = {
        "lr_scheduler": "OneCycle",
        "lr_scheduler_args": {"cycle_min_lr": 0, "cycle_first_step_size": 7},
    }
    phase = resolve({"name": "a", "until": 100}, train=train)
    assert phase.train.lr_scheduler_args["cycle_second_step_size"] == 7
    source = phase.sources["lr_scheduler_args.cycle_second_step_size"]
    assert source == ("derived", "cycle_first_step_size")


def test_an_impossible_schedule_is_refused() -> None:
    """With DeepSpeed's names, too, where they can be changed."""
    text = refusal({"name": "a", "until": 300}, train=SCHEDULE)
    assert "phase a: 1000 steps of warm-up, but the schedule has 300" in text
    assert "lower lr_warmup_steps (lr_scheduler_args.warmup_num_steps) or raise" in text
    assert "lr_scheduler_steps (lr_scheduler_args.total_num_steps)" in text
    args = {"cycle_min_lr": 0, "cycle_first_step_size": 10, "decay_step_size": 10,
            "decay_mom_rate": 0.1}  # fmt: skip
    train = {"lr_scheduler": "OneCycle", "lr_scheduler_args": args}
    assert resolve({"name": "a", "until": 31}, train=train)
    text = refusal({"name": "a", "until": 40}, train=train)
    assert "decay_mom_rate 0.1 lets the first beta grow to 1.071 by step 40" in text


def test_numbers_follow_a_schedules_arguments_but_not_its_horizon() -> None:
    """As warm-up and horizon do for every schedule."""
    before = resolve({"name": "a", "until": 2000}, train=SCHEDULE)
    assert resolve({"name": "a", "until": 4000}, train=SCHEDULE).numbers() == before.numbers()
    other = {**SCHEDULE, "lr_scheduler_args": {"warmup_max_lr": 1e-4, "warmup_type": "log"}}
    assert resolve({"name": "a", "until": 2000}, train=other).numbers() != before.numbers()


def test_run_yaml_has_a_row_for_each_argument(tmp_path: Path) -> None:
    """With its source; and it comes back as it was written."""
    phase = resolve({"name": "a", "until": 2000}, train=SCHEDULE)
    write_run_yaml(phase, tmp_path / "run.yaml")
    lines = (tmp_path / "run.yaml").read_text().splitlines()
    assert "  warmup_type: {value: linear, source: user}" in lines
    assert read_run_yaml(tmp_path / "run.yaml") == phase


def test_run_yaml_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Values with their types, sources with their reasons."""
    phase = resolve(
        {"name": "a", "until": "3 epochs", "learning_rate": 1e-5, "adam_epsilon": 1e-8},
        train={"lr_warmup_ratio": 0.1},
        preset=OFFLOAD,
    )
    write_run_yaml(phase, tmp_path / "run.yaml")
    found = read_run_yaml(tmp_path / "run.yaml")
    assert found == phase
    assert {n: phase.sources[n] for n in found.sources} == found.sources
    assert phase.sources.keys() == found.sources.keys()
    assert found.numbers() == phase.numbers()
    assert {type(v) for v in found.values().values()} == {type(v) for v in phase.values().values()}


def test_validation_is_resolved_with_its_sources() -> None:
    """Defaults that depend on other keys are filled in; a phase's own values win over the run's,
    and null turns it off."""
    data = {"images": "photos", "holdout": 0.1}
    phases = (
        {"name": "a", "until": 10, "use_ema": True},
        {"name": "b", "until": 20, "validation": {"eval_steps": 3}},
        {"name": "c", "until": 30, "validation": None},
    )
    found = {
        name: resolve(*phases, name=name, data=data, validation={"batch_size": 2})
        for name in ("a", "b", "c")
    }
    first, second = found["a"].derived.validation, found["b"].derived.validation
    assert first is not None
    assert second is not None
    assert (first["metric_for_best_model"], first["max_samples"]) == ("val_loss_ema", 64)
    assert found["a"].sources["validation.metric_for_best_model"] == ("derived", "use_ema true")
    assert found["a"].sources["validation.batch_size"] == ("user", "")
    assert "decode" not in first  # no prompts, no images
    assert (second["eval_steps"], second["batch_size"]) == (3, 2)
    assert second["metric_for_best_model"] == "val_loss"
    assert found["c"].derived.validation is None


def test_validation_of_what_swaps_to_a_disk_goes_by_the_live_weights() -> None:
    """Averaged weights are not exchanged there, so nothing can be chosen by them."""
    nvme = Preset("zero3_nvme", "deepspeed", 3, "nvme", "nvme")
    phase = {
        "name": "a",
        "until": 10,
        "use_ema": True,
        "launch": {"preset": "zero3_nvme", "offload_path": "/tmp"},
    }
    data = {"images": "photos", "holdout": 0.1}
    found = resolve(phase, preset=nvme, data=data, validation={}).derived.validation
    assert found is not None
    assert found["metric_for_best_model"] == "val_loss"
    chosen = {"metric_for_best_model": "val_loss_ema"}
    with pytest.raises(PipelineError, match="averaged weights of what swaps to a disk are not"):
        resolve(phase, preset=nvme, data=data, validation=chosen)
