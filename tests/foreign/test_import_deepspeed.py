"""Checkpoints that DeepSpeed's engine really wrote, of every stage, world size and precision."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.foreign.maker import STEPS

from zerotrain.errors import PipelineError
from zerotrain.state.external import ExternalCheckpoint, open_external

BF16_OPTIMIZER = {
    "precision": "bf16",
    "config": {"data_types": {"grad_accum_dtype": "fp32"}},
    "beyond_zero_to_fp32": True,
}
"""DeepSpeed's BF16_Optimizer: zero_to_fp32 says that it is no ZeRO checkpoint."""

SPLIT = {"sub_group_size": 20}
"""Stage 3 in several sub-groups for each param group."""

MADE = [
    pytest.param(1, 1, {}, id="zero1"),
    pytest.param(2, 1, {"offload": True}, id="zero2-offload"),
    pytest.param(2, 1, {"precision": "fp16"}, id="zero2-fp16"),
    pytest.param(3, 1, {"precision": "bf16"}, id="zero3-bf16"),
    pytest.param(1, 1, BF16_OPTIMIZER, id="zero1-bf16-fp32-gradients"),
    pytest.param(2, 2, {}, id="zero2-two-ranks"),
    pytest.param(3, 2, SPLIT, id="zero3-two-ranks-sub-groups"),
]  # fmt: skip
TRAINED = {"first.bias", "first.weight", "last.bias", "last.weight", "embed.weight"}


def read(folder: Path) -> tuple[ExternalCheckpoint, dict[str, Any]]:
    """The checkpoint as read, and what its maker's engine held."""
    expected = torch.load(folder / "expected.pt", weights_only=False)
    return open_external(folder / "checkpoint"), expected


@pytest.fixture
def copy(made: Any, tmp_path: Path) -> Any:
    """A copy of a checkpoint that may be damaged, and its tag folder."""

    def make(stage: int, world: int = 1) -> Path:
        options = {"groups": 1} if world == 1 else SPLIT if stage == 3 else {}
        shutil.copytree(made(stage, world, **options) / "checkpoint", tmp_path / "copy")
        return tmp_path / "copy"

    return make


@pytest.mark.parametrize(("stage", "world", "options"), MADE)
def test_every_tensor_is_the_live_engines_bit_for_bit(
    made: Any, stage: int, world: int, options: dict[str, Any]
) -> None:
    """Weights and moments equal what safe_get_* gathered, the weights zero_to_fp32's too."""
    found, expected = read(made(stage, world, **options))
    assert set(found.names) == TRAINED
    assert found.slots == ["master", "exp_avg", "exp_avg_sq"]
    for name in found.names:
        for slot in found.slots:
            tensor = found.tensor(name, slot)
            assert tensor.dtype == torch.float32
            assert not tensor.requires_grad
            assert torch.equal(tensor, expected["live"][name][slot]), (name, slot)
        if expected["fp32"]:
            assert torch.equal(found.tensor(name, "master"), expected["fp32"][name])
        assert found.tensor(name, "exp_avg").abs().sum() > 0
    assert found.tied == {"head.weight": "embed.weight"}
    assert found.frozen == {"frozen.weight": [3, 9], "frozen.bias": [3]}
    for name in found.frozen:
        if name in expected["fp32"]:  # zero_to_fp32 loses them at stage 1
            assert torch.equal(found.frozen_tensor(name), expected["fp32"][name])
        assert found.frozen_tensor(name).abs().sum() > 0
    assert found.lost == []


@pytest.mark.slow
def test_shuffled_groups_are_read_in_their_own_order(made: Any) -> None:
    """round_robin_gradients reorders the flat groups and changes no number of a training.

    DeepSpeed's own param_slice_mappings, and with them safe_get_* and ds_to_universal, keep the
    model's order and give other parameters' values there.
    """
    shuffled = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    found, expected = read(made(2, 2, config=shuffled))
    plain, _ = read(made(2, 2))
    assert found.names != plain.names
    for name in plain.names:
        assert torch.equal(found.tensor(name, "master"), expected["fp32"][name])
        for slot in plain.slots:
            assert torch.equal(found.tensor(name, slot), plain.tensor(name, slot)), (name, slot)


@pytest.mark.parametrize(("stage", "world", "options"), MADE)
def test_the_position_says_where_the_training_stood(
    made: Any, stage: int, world: int, options: dict[str, Any]
) -> None:
    """Steps, samples, groups with names and hyper-parameters, and what made it."""
    position = open_external(made(stage, world, **options) / "checkpoint").position
    assert (position.step, position.optimizer_step) == (STEPS, STEPS)
    assert position.samples == STEPS * 2 * world
    assert position.optimizer == "adamw"
    decayed, plain = position.param_groups
    assert sorted(decayed.pop("parameters")) == ["embed.weight", "first.weight", "last.weight"]
    assert sorted(plain.pop("parameters")) == ["first.bias", "last.bias"]
    assert decayed == {"lr": 2e-2, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    assert plain == {"lr": 1e-2, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.0}
    engine = position.engine
    assert (engine["engine"], engine["zero_stage"]) == ("deepspeed", stage)
    assert engine["world_size"] == world
    assert engine["mixed_precision"] == options.get("precision", "no")
    assert engine["offload_optimizer"] == ("cpu" if options.get("offload") else "none")
    fp16 = options.get("precision") == "fp16"
    kept = {"scale": 256.0, "good_steps": STEPS, "hysteresis": 2}
    assert position.loss_scale == (kept if fp16 else None)


def test_an_empty_latest_means_the_only_tag(copy: Any) -> None:
    """A kill while DeepSpeed rewrites `latest` leaves it empty; the tag is taken all the same."""
    folder = copy(2)
    (folder / "latest").write_text("")
    assert open_external(folder).folder == folder / "global_step3"
    (folder / "latest").unlink()
    assert open_external(folder).position.step == STEPS
    assert open_external(folder / "global_step3").position.step == STEPS


def test_several_tags_without_latest_are_named(copy: Any) -> None:
    """Which one is meant is the user's to say."""
    folder = copy(2)
    (folder / "latest").write_text("")
    shutil.copytree(folder / "global_step3", folder / "global_step9")
    with pytest.raises(PipelineError, match="global_step3, global_step9"):
        open_external(folder)
    (folder / "latest").write_text("global_step4")
    with pytest.raises(PipelineError, match="names 'global_step4'"):
        open_external(folder)


def test_an_elastic_checkpoint_is_read(copy: Any) -> None:
    """Its moments have no padding and its groups no learning rates, which is reported."""
    path = copy(2) / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    before = open_external(path.parent)
    moments = {name: before.tensor(name, "exp_avg").clone() for name in before.names}
    document = torch.load(path, weights_only=False)
    optimizer = document["optimizer_state_dict"]
    lean = len(optimizer["single_partition_of_fp32_groups"][0])
    state = optimizer["base_optimizer_state"]["state"][0]
    optimizer["base_optimizer_state"] = [{k: v[:lean] if v.dim() else v for k, v in state.items()}]
    torch.save(document, path)
    found = open_external(path.parent)
    for name, moment in moments.items():
        assert torch.equal(found.tensor(name, "exp_avg"), moment)
    assert found.position.param_groups == []
    assert "elastic" in found.lost[0]


def test_a_model_file_of_another_save_is_refused(copy: Any) -> None:
    """One process: the model file is new, the optimizer's is old, and the weights show it."""
    path = copy(2) / "global_step3" / "mp_rank_00_model_states.pt"
    document = torch.load(path, weights_only=False)
    document["global_steps"] = 8
    torch.save(document, path)
    kept = open_external(path.parent)  # equal weights: one save, whose optimizer began anew
    assert (kept.position.step, kept.position.optimizer_step) == (8, 3)
    assert "8 updates, the optimizer 3" in kept.lost[0]
    document["module"]["first.bias"] += 1e-3
    torch.save(document, path)
    with pytest.raises(
        PipelineError, match=r"first.bias differs from .*of step 8, the optimizer files of step 3"
    ):
        open_external(path.parent)


def test_an_unknown_layout_names_the_version(copy: Any) -> None:
    """A DeepSpeed that writes other keys is distinguished from a damaged file."""
    path = copy(2) / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    document = torch.load(path, weights_only=False)
    groups = document["optimizer_state_dict"].pop("single_partition_of_fp32_groups")
    document["optimizer_state_dict"]["future_groups"] = groups
    torch.save(document, path)
    with pytest.raises(PipelineError, match=r"DeepSpeed 0.19.8: it holds .*future_groups"):
        open_external(path.parent)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "left over"),
        (
            "zero_pp_rank_0_mp_rank_01_optim_states.pt",
            "written under model, pipeline or expert",
        ),
    ],
    ids=["of a larger world", "model parallel"],
)
def test_a_file_of_another_world_is_named(copy: Any, name: str, said: str) -> None:
    """What is left over is not mixed in; slices of a parameter are not taken for the parameter."""
    tag = copy(2) / "global_step3"
    shutil.copy(tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt", tag / name)
    with pytest.raises(PipelineError, match=f"{name}.*{said}"):
        open_external(tag)


def test_stage_0_is_read_with_the_names_of_its_shapes(made: Any) -> None:
    """Without ZeRO, DeepSpeed saves a torch optimizer, whose parameters have numbers."""
    folder = made(0, beyond_zero_to_fp32=True)
    expected = torch.load(folder / "expected.pt", weights_only=False)
    order = ["embed.weight", "first.weight", "last.weight", "first.bias", "last.bias"]
    found = open_external(folder / "checkpoint")  # every trained shape occurs once
    for name in order:
        assert torch.equal(found.tensor(name, "master"), expected["live"][name]["master"])
        assert torch.equal(found.tensor(name, "exp_avg"), expected["live"][name]["exp_avg"])
    assert found.position.optimizer_step == STEPS
    assert found.position.param_groups[1]["parameters"] == ["first.bias", "last.bias"]
    assert found.tied == {"head.weight": "embed.weight"}
    assert set(found.frozen) == {"frozen.weight", "frozen.bias"}
