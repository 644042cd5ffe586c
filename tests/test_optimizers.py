"""The table of optimizers: complete, and every refusal in a sentence."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.pages.tables import optimizers_tables, replace_generated

from zerotrain.config import optimizers
from zerotrain.config.optimizer_arguments import read_optimizer_args
from zerotrain.training.optim.optimizer import Lion
from zerotrain.training.optim.prodigy import Prodigy

ROOT = Path(__file__).parents[1]
CLASSES = {
    name: found
    for name, found in vars(torch.optim).items()
    if inspect.isclass(found)
    and issubclass(found, torch.optim.Optimizer)
    and found is not torch.optim.Optimizer
}


def test_every_class_of_torch_is_in_the_table() -> None:
    """And every name of DeepSpeed's, and three of other packages."""
    titles = {optimizer.title for optimizer in optimizers.TABLE}
    assert titles >= CLASSES.keys()
    assert titles >= set(optimizers.DEEPSPEED_NAMES)
    others = {"AdamW8bit", "CPUOffloadOptimizer", "Prodigy"}
    assert titles == {*CLASSES, *optimizers.DEEPSPEED_NAMES, *others}


@pytest.mark.parametrize(
    "optimizer", [o for o in optimizers.TABLE if not (o.refused or o.packages)]
)
def test_arguments_are_those_of_the_class(optimizer: optimizers.Optimizer) -> None:
    """With its own defaults, so that what is left out means what torch says."""
    cls = {"Lion": Lion, "Prodigy": Prodigy}.get(optimizer.title) or CLASSES[optimizer.title]
    found = {
        name: parameter.default
        for name, parameter in inspect.signature(cls).parameters.items()
        if name not in ("params", "lr", *optimizers.ENGINES_OWN)
    }
    decay = found.pop("weight_decay", None)
    assert found == dict(optimizer.arguments)
    assert decay == optimizer.weight_decay


@pytest.mark.parametrize(
    ("name", "expected"),
    [("AdamW", "adamw"), ("ADAM_W", "adamw"), ("one-bit-adam", "onebitadam"), ("lion", "lion"),
     ("torch.optim.RMSprop", "rmsprop"), ("zero_one_adam", "zerooneadam"), ("MuSGD", "musgd")],
)  # fmt: skip
def test_names_are_taken_in_any_case(name: str, expected: str) -> None:
    """Also with - and _."""
    found, reason = optimizers.find(name)
    assert (found.name, reason) == (expected, "")


@pytest.mark.parametrize("name", ["cpuadam", "FusedAdam", "DeepSpeedCPUAdam"])
def test_implementations_are_imported_as_what_they_compute(name: str) -> None:
    """An implementation follows from the launch; the name says so."""
    found, reason = optimizers.find(name)
    assert found.name == "adamw"
    assert reason == f"{name} is AdamW; where it is stepped, and how, follows the launch"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    """Never replaced in silence."""
    with pytest.raises(ValueError, match="'adamq' is not known; nearest: Adam"):
        optimizers.find("adamq")
    with pytest.raises(ValueError, match=r"known: AdamW, AdamW8bit, Adam, .*Lion"):
        optimizers.find("zzz")


def test_deepspeeds_adam_is_adamw() -> None:
    """Unless its file says otherwise; ours is torch's."""
    found, reason = optimizers.deepspeed_meaning("Adam")
    assert found.name == "adamw"
    assert "adam_w_mode" in reason
    assert optimizers.deepspeed_meaning("Adam", adam_w_mode=False)[0].name == "adam"
    assert optimizers.deepspeed_meaning("AdamW", adam_w_mode=False)[0].name == "adamw"
    assert optimizers.deepspeed_meaning("SGD") == (optimizers.find("sgd")[0], "")


def test_what_cannot_work_says_why_and_what_does() -> None:
    """Every refused name has a reason and an optimizer that works everywhere."""
    for optimizer in optimizers.TABLE:
        text, hint = optimizers.refusal(
            optimizer.name, {}, engine="torch", offload_optimizer="none"
        )
        assert bool(text) == bool(optimizer.refused)
        instead, _ = optimizers.find(optimizer.instead)
        assert not instead.refused
        assert not instead.whole
        if text:
            assert f"optimizer: {instead.name}" in hint


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_whole_matrices_are_plain_pytorchs(name: str) -> None:
    """Under ZeRO they are refused, with both ways out."""
    text, hint = optimizers.refusal(name, {}, engine="deepspeed", offload_optimizer="none")
    assert "needs each parameter whole" in text
    assert hint.endswith("or launch: torch")


def test_a_disk_holds_the_state_of_plain_adam_alone() -> None:
    """What the numeric check of the disk does not cover is refused."""
    for name, arguments in (("lion", {}), ("adamw", {"amsgrad": True})):
        text, _ = optimizers.refusal(name, arguments, engine="deepspeed", offload_optimizer="nvme")
        assert "is checked for plain AdamW and Adam alone" in text
    assert optimizers.refusal("adam", {}, engine="deepspeed", offload_optimizer="nvme") == ("", "")


@pytest.mark.parametrize(
    ("name", "arguments", "given", "message"),
    [
        ("sgd", {"momentun": 0.9}, {}, "SGD has no such argument; did you mean momentum"),
        ("sgd", {"xyz": 1}, {}, "its optimizer_args are momentum, dampening"),
        ("sgd", {"momentum": "much"}, {}, "optimizer_args.momentum: SGD requires a number"),
        ("sgd", {"momentum": True}, {}, "SGD requires a number, not True"),
        ("sgd", {"momentum": float("nan")}, {}, "SGD requires a number, not nan"),
        ("sgd", {"nesterov": 1}, {}, "SGD requires true or false, not 1"),
        ("lion", {"betas": 0.9}, {}, "Lion requires a list of 2 numbers"),
        ("muon", {"ns_steps": 4.5}, {}, "Muon requires a whole number"),
        ("muon", {"adjust_lr_fn": 3}, {}, "Muon requires text"),
        ("adamw", {"lr": 1e-3}, {}, "the rate is `learning_rate`"),
        ("adamw", {"fused": True}, {}, "the engine chooses the implementation"),
        ("adamw", {"betas": [0.9, 0.95]}, {"adam_beta1": 0.9}, "adam_beta1 and optimizer_args"),
        ("sgd", {"weight_decay": 0.1}, {"adam_weight_decay": 0.1}, "adam_weight_decay and opt"),
        ("sgd", {}, {"adam_beta1": 0.9}, "adam_beta1 means nothing to SGD"),
        ("lion", {}, {"adam_epsilon": 1e-8}, "adam_epsilon means nothing to Lion"),
        ("rprop", {}, {"adam_weight_decay": 0.1}, "Rprop has no weight decay"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(name, arguments, given, message) -> None:
    """With the nearest name, the kind that is wanted, or the key that is right."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_optimizer_args(optimizers.find(name)[0], arguments, given)
    assert message in str(caught.value)


def test_arguments_with_a_key_of_their_own_move_there() -> None:
    """The same value has one place, whichever way it came."""
    adamw, muon, lion = (optimizers.find(name)[0] for name in ("adamw", "muon", "lion"))
    found = {"betas": ["0.9", 0.95], "eps": "1e-6", "weight_decay": 0.1, "amsgrad": True}
    assert read_optimizer_args(adamw, found, {}) == (
        {"amsgrad": True},
        {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "adam_weight_decay": 0.1},
    )
    # Muon's own epsilon is none of the AdamW's beside it.
    assert read_optimizer_args(muon, {"eps": 1e-5}, {"adam_epsilon": 1e-8}) == ({"eps": 1e-5}, {})
    assert read_optimizer_args(lion, {"betas": [0.95, 0.98]}, {}) == ({"betas": [0.95, 0.98]}, {})


def test_only_adams_continue_each_other() -> None:
    """Slots of one name are not one thing: NAdam's moments are not Adam's."""
    names = [optimizer.name for optimizer in optimizers.TABLE]
    pairs = {(a, b) for a, b in itertools.permutations(names, 2) if optimizers.continues(a, b)}
    assert pairs == set(itertools.permutations(("adam", "adamw", "adamw8bit"), 2))


def test_what_a_schedule_of_the_momentum_changes() -> None:
    """The first beta, or a momentum that is there."""
    assert optimizers.first_beta("adamw", {}) == "betas"
    assert optimizers.first_beta("sgd", {"momentum": 0.9}) == "momentum"
    assert optimizers.first_beta("sgd", {}) == ""
    assert optimizers.first_beta("muon", {}) == "momentum"
    assert optimizers.first_beta("adagrad", {}) == ""


def test_the_page_is_current(generated: Callable[[Path, str], None]) -> None:
    """docs/optimizers.md is what the table gives."""
    path = ROOT / "docs" / "optimizers.md"
    generated(path, replace_generated(path.read_text(), "optimizers", optimizers_tables()))
