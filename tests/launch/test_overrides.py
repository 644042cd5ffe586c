"""A user's own values of DeepSpeed's and accelerate's keys: written, or refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from tests.launch.conftest import resolved

from zerotrain.errors import PipelineError


def refusal(preset: str = "zero2", **launch: Any) -> str:
    """The message that a launch gets."""
    with pytest.raises(PipelineError) as caught:
        resolved(preset, **launch)
    return str(caught.value)


def test_a_users_value_wins_and_is_tagged() -> None:
    """Beside the derived ones; number-like words are numbers."""
    own = {
        "reduce_bucket_size": "5e8",
        "overlap_comm": True,
        "offload_optimizer": {"pin_memory": False},
    }
    phase = resolved(
        "zero2_offload",
        deepspeed={"zero_optimization": own, "communication_data_type": "fp32"},
        accelerate={"enable_cpu_affinity": True},
    )
    zero = phase.derived.deepspeed["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["overlap_comm"]) == (500_000_000, True)
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert zero["allgather_bucket_size"] == 29_491_200
    assert phase.derived.accelerate["enable_cpu_affinity"] is True
    key = "deepspeed.zero_optimization.reduce_bucket_size"
    assert phase.sources[key] == ("user", "launch.deepspeed")
    assert phase.sources["deepspeed.communication_data_type"][0] == "user"
    assert phase.sources["accelerate.enable_cpu_affinity"] == ("user", "launch.accelerate")


def test_what_only_moves_memory_may_change_in_a_phase() -> None:
    """After an out of memory, smaller buckets do not set progress aside; another type does."""
    plain = resolved("zero2").numbers()
    buckets = {"zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": True}}
    assert resolved("zero2", deepspeed=buckets).numbers() == plain
    assert resolved("zero2", deepspeed={"communication_data_type": "fp32"}).numbers() != plain
    assert resolved("zero2", deepspeed={"prescale_gradients": True}).numbers() != plain


@pytest.mark.parametrize(
    ("given", "said", "hint"),
    [
        ({"train_batch_size": 4}, "its own key here", "set train.global_batch_size"),
        ({"gradient_clipping": 4}, "its own key here", "set train.max_grad_norm"),
        ({"optimizer": {"type": "Adam"}}, "its own key here", "set train.optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "its own key", "set train.lr_scheduler"),
        ({"bf16": {"enabled": True}}, "its own key here", "set launch.mixed_precision"),
        ({"bf16": {"loss_scale": 0}}, "would do nothing: a key of the fp16 section", "remove"),
        ({"bf16": {"check_grad_overflow": False}}, "no finite number would be made", "remove"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "the log need the norm", "remove"),
        ({"zero_optimization": {"stage": 3}}, "its own key here", "set launch.preset"),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "its own key here", "set launch.offload_param",
        ),
        (
            {"zero_optimization": {"round_robin_gradients": True}},
            "is not possible: under it DeepSpeed names other parameters' moments", "remove",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "auto"}},
            "nothing is left open in a launch file", "give a value",
        ),
        (
            {"zero_optimization": {"reduce_buckets_size": 5}},
            "unknown key ", "zero_optimization.reduce_bucket_size",
        ),
        (
            {"reduce_bucket_size": 5},
            "unknown key ", "zero_optimization.reduce_bucket_size",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "large"}},
            "'large' is no value for it", "it takes a whole number from 0",
        ),
        ({"prescale_gradients": 1}, "1 is no value for it", "it takes true or false"),
        ({"communication_data_type": "fp8"}, "is no value for it", "it takes fp32, fp16, bf16"),
        ({"comms_logger": []}, "[] is no value for it", "it takes a mapping"),
        ({"quux": 5}, "unknown key quux", "docs/importing.md lists all"),
    ],
    ids=str,
)  # fmt: skip
def test_other_keys_are_refused(given: dict[str, Any], said: str, hint: str) -> None:
    """With phase, key, value, reason, and what to do instead."""
    text = refusal(deepspeed=given)
    assert text.startswith("ERROR: phase a: launch.deepspeed")
    assert said in text
    assert hint in text


def test_harmless_values_are_taken_without_a_word() -> None:
    """What a file says of a thing that is off, is off."""
    given = {"zero_optimization": {"round_robin_gradients": False, "zero_quantized_weights": False}}
    assert (
        resolved("zero2", deepspeed=given).derived.deepspeed == resolved("zero2").derived.deepspeed
    )


def test_plain_torch_has_no_deepspeed_file() -> None:
    """Values for it would be lost."""
    text = refusal("torch", deepspeed={"communication_data_type": "fp32"})
    assert "launch.deepspeed sets communication_data_type, but preset torch is plain" in text


@pytest.mark.parametrize(
    ("preset", "launch", "said"),
    [
        ("torch", {"offload_optimizer": "cpu"}, "offload_optimizer is cpu under plain PyTorch"),
        ("zero2", {"offload_param": "cpu"}, "offload_param is cpu under ZeRO stage 2"),
        (
            "zero1", {"offload_optimizer": "nvme", "offload_path": "/x"},
            "offload_optimizer is nvme under ZeRO stage 1, which cannot do that: it needs ZeRO "
            "stage 3",
        ),
        ("zero2", {"zero3_init": True}, "launch.zero3_init builds the model in parts"),
        ("zero2", {"cpu_checkpointing": True}, "train.gradient_checkpointing is false"),
    ],
)  # fmt: skip
def test_offload_needs_its_stage(preset: str, launch: dict[str, Any], said: str) -> None:
    """DeepSpeed would pass over it, or die of it after the model is loaded."""
    assert said in refusal(preset, **launch)


def test_offload_is_set_for_each_target() -> None:
    """The launch's word wins over the preset's."""
    phase = resolved("zero3", offload_optimizer="cpu")
    assert (phase.derived.offload_optimizer, phase.derived.offload_param) == ("cpu", "none")
    assert phase.sources["offload_optimizer"] == ("user", "")
    assert phase.sources["offload_param"] == ("derived", "preset zero3")
    zero = phase.derived.deepspeed["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in zero
    moved = resolved("zero3_nvme", offload_param="cpu")
    assert (moved.derived.offload_optimizer, moved.derived.offload_param) == ("nvme", "cpu")
    assert "nvme_path" not in moved.derived.deepspeed["zero_optimization"]["offload_param"]
