"""Every optimizer on every engine: torch's own numbers, through checkpoints and switches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.matrix import export_state
from tests.training.optimizer_trials import (
    HALF,
    STEPS,
    Job,
    Model,
    batch,
    checkpoint,
    rate,
    run,
    trial_phase,
)

from zerotrain.config import optimizers
from zerotrain.errors import PipelineError
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import MASTER
from zerotrain.training.optim.optimizer import (
    Lion,
    ParamGroup,
    group_scalars,
    open_optimizers,
    set_hyperparameters,
)
from zerotrain.training.optim.prodigy import Prodigy

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {}),
    "adamw-amsgrad": ("adamw", {"amsgrad": True}),
    "adam": ("adam", {}),
    "adadelta": ("adadelta", {"rho": 0.8}),
    "adagrad": ("adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.05}),
    "adamax": ("adamax", {}),
    "asgd": ("asgd", {"t0": 2.0, "lambd": 0.1}),
    "lion": ("lion", {}),
    "nadam": ("nadam", {}),
    "radam": ("radam", {}),
    "rmsprop": ("rmsprop", {"momentum": 0.9, "centered": True}),
    "rprop": ("rprop", {}),
    "sgd": ("sgd", {}),
    "sgd-momentum": ("sgd", {"momentum": 0.9, "nesterov": True}),
}
"""On flat tensors and parts of them: under every engine."""
WHOLE = {
    "muon": ("muon", {"ns_steps": 4}),
    "adafactor": ("adafactor", {}),
    "prodigy": ("prodigy", {"d0": 1e-3, "use_bias_correction": True}),
}
"""On whole parameters: under plain PyTorch."""
EVERYWHERE = ("zero2", "zero3_offload")
LATER = ("zero1", "zero2_offload", "zero3")
DECAY = 0.1
BOUND, SLOTS_BOUND = 1e-6, 2e-6
"""Of weights, and of slots: a mean of squares has twice the relative error of a gradient."""


def slow(presets: tuple[str, ...]) -> list[Any]:
    return [pytest.param(preset, marks=pytest.mark.slow) for preset in presets]


def sampled(presets: tuple[str, ...]) -> list[Any]:
    """Without ZeRO-1 and ZeRO-3, whose optimizers are DeepSpeed's classes of ZeRO-2 and of ZeRO-3
    with offload: their numbers are compared in CI, their checkpoints in `make test-soak`."""
    return [
        pytest.param(one, marks=pytest.mark.soak if one in ("zero1", "zero3") else pytest.mark.slow)
        for one in presets
    ]


class Trials:
    """Runs of each engine, made once: whole ones, and those that continue from a middle."""

    def __init__(self, folder: Path, server: Any) -> None:
        self._folder, self._server = folder, server
        self._done: set[str] = set()

    def whole(self, preset: str, processes: int = 1) -> Path:
        """Every optimizer, without a break."""
        return self._run(f"{preset}-x{processes}", preset, processes, lambda case: None)

    def resumed(self, preset: str, processes: int = 1) -> Path:
        """From the engine's own checkpoints in the middle."""
        own = self.whole(preset, processes)
        return self._run(
            f"{preset}-x{processes}-resumed", preset, processes,
            lambda case: own / case / f"step-{HALF:08d}",
        )  # fmt: skip

    def switched(self, before: str, preset: str, processes: int = 1) -> Path:
        """From the states that another engine's checkpoints give."""
        first = self.whole(before)

        def state(case: str) -> Path:
            folder = first / case / "state"
            if not folder.exists():
                export_state(first / case / f"step-{HALF:08d}", folder)
            return folder

        return self._run(f"{before}-to-{preset}-x{processes}", preset, processes, state)

    def _run(
        self, name: str, preset: str, processes: int, start: Callable[[str], Path | None]
    ) -> Path:
        folder = self._folder / name
        if name not in self._done:
            folder.mkdir()
            cases = CASES | (WHOLE if preset == "torch" else {})
            if "to-torch" in name:
                cases = CASES
            jobs = [
                Job(case, trial_phase(o, preset, processes, **values(o, arguments)), start(case))
                for case, (o, arguments) in cases.items()
            ]
            run(jobs, folder, self._server)
            self._done.add(name)
        return folder


def values(optimizer: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The part of a phase that an optimizer is."""
    return {"optimizer_args": arguments, "adam_beta2": 0.99}


@pytest.fixture(scope="session")
def trials(tmp_path_factory, server) -> Trials:
    return Trials(tmp_path_factory.mktemp("optimizers"), server)


def apart(found: Checkpoint, expected: Checkpoint, slots: list[str]) -> float:
    """Largest difference of the weights and of slots, relative to the largest element of each."""
    largest = 0.0
    for name in expected.names:
        for slot in slots:
            shape = optimizers.slot_shape(expected.position.optimizer, slot, expected.shapes[name])
            if shape is not None:
                a, b = found.tensor(name, slot), expected.tensor(name, slot)
                assert a.shape == torch.Size(shape)
                largest = max(largest, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)))
    return largest


def direct(optimizer: str, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same training by torch's own class, parameter by parameter, without an engine.

    The fused classes alone step a flat copy of each group: they round the last elements of a tensor
    otherwise than the rest.
    """
    model = Model()
    named = dict(model.named_parameters())
    biases = [p for n, p in named.items() if "bias" in n]
    others = [p for n, p in named.items() if "bias" not in n]
    phase = trial_phase(optimizer, "torch", **values(optimizer, arguments))
    table, _ = optimizers.find(optimizer)
    own = {key: tuple(v) if isinstance(v, list) else v for key, v in arguments.items()}
    if table.adam_keys and optimizer != "muon":
        own |= {"betas": (0.9, 0.99), "eps": 1e-8}
    decays = [{"weight_decay": d} if table.weight_decay is not None else {} for d in (0.0, DECAY)]
    groups: list[dict[str, Any]] = [
        {"params": biases, "share": 0.5, **decays[0]}, {"params": others, "share": 1.0, **decays[1]}
    ]  # fmt: skip
    fused = optimizer in ("adam", "adamw")
    flats = [Flat(group["params"]) for group in groups] if fused else []
    if optimizer == "muon":
        matrices = [p for p in others if p.ndim == 2]
        kernels = {**groups[1], "params": [p for p in others if p.ndim != 2]}
        adam = torch.optim.AdamW([groups[0], kernels], lr=0.0, betas=(0.9, 0.99), fused=True)
        made = [adam, torch.optim.Muon([{**groups[1], "params": matrices}], **own)]
    elif optimizer == "lion":
        made = [Lion(groups)]
    elif optimizer == "prodigy":
        made = [Prodigy(groups, **own)]
    elif fused:
        groups = [{**g, "params": [f.weights]} for g, f in zip(groups, flats, strict=True)]
        made = [getattr(torch.optim, table.title)(groups, **own, fused=True)]
    else:
        # Rprop looks at the first rate alone.
        groups = [{**group, "lr": group["share"] * rate(0)} for group in groups]
        made = [getattr(torch.optim, table.title)(groups, **own, foreach=False)]
    assert phase.train.adam_weight_decay == DECAY
    for step in range(STEPS):
        inputs, targets = batch(step)
        model.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        for flat in flats:
            flat.take_gradients()
        for one in made:
            for group in one.param_groups:
                group["lr"] = group["share"] * rate(step)
            one.step()
        for flat in flats:
            flat.give_weights()
    return {name: parameter.detach() for name, parameter in named.items()}


class Flat:
    """A copy of parameters in one tensor of an even length."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.weights = torch.nn.Parameter(self._flat([p.data for p in parameters]))

    def take_gradients(self) -> None:
        self.weights.grad = self._flat([p.grad for p in self._parameters])

    def give_weights(self) -> None:
        rest = self.weights.data
        for parameter in self._parameters:
            own, rest = rest[: parameter.numel()], rest[parameter.numel() :]
            parameter.data.copy_(own.view_as(parameter))

    @staticmethod
    def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.nn.functional.pad(joined, (0, joined.numel() % 2))


@pytest.mark.parametrize("case", [*CASES, *WHOLE])
def test_torch_engine_gives_the_bits_of_torch(trials, case):
    """Flat tensors and groups change nothing: the weights are those of torch's class itself."""
    found = checkpoint(trials.whole("torch"), case)
    expected = direct(*(CASES | WHOLE)[case])
    start = dict(Model().named_parameters())
    for name, weights in expected.items():
        assert not torch.equal(weights, start[name])
        assert torch.equal(found.tensor(name, MASTER), weights), name


@pytest.mark.parametrize("preset", [*EVERYWHERE, *slow(LATER)])
@pytest.mark.parametrize("case", CASES)
def test_zero_gives_the_numbers_of_torch(trials, case, preset):
    """Each stage, with the optimizer on the device or on the CPU: weights and every slot."""
    expected = checkpoint(trials.whole("torch"), case)
    found = checkpoint(trials.whole(preset), case)
    optimizer, arguments = CASES[case]
    slots = optimizers.slots(optimizer, arguments)
    assert found.slots == expected.slots == [MASTER, *slots]
    assert apart(found, expected, [MASTER]) <= BOUND
    assert apart(found, expected, slots) <= SLOTS_BOUND
    assert found.position.optimizer_step == STEPS
    for one, other in zip(found.position.param_groups, expected.position.param_groups, strict=True):
        assert one == other


@pytest.mark.parametrize(
    ("case", "preset"),
    [(case, "torch") for case in [*CASES, *WHOLE]]
    + [(case, preset) for preset in EVERYWHERE for case in CASES]
    + [
        pytest.param(case, *one.values, marks=one.marks) for one in sampled(LATER) for case in CASES
    ],
)
def test_resume_is_exact(trials, case, preset):
    """From a checkpoint in the middle: the same bits in weights, slots and numbers at the end."""
    whole, resumed = (checkpoint(f(preset), case) for f in (trials.whole, trials.resumed))
    assert apart(resumed, whole, whole.slots) == 0.0
    assert resumed.position.param_groups == whole.position.param_groups
    assert resumed.position.optimizer_step == whole.position.optimizer_step == STEPS


@pytest.mark.parametrize(
    ("before", "after"),
    [("torch", "zero2"), ("zero3_offload", "torch"),
     *(pytest.param("torch", *one.values, marks=one.marks) for one in sampled(LATER)),
     pytest.param("torch", "zero3_offload", marks=pytest.mark.slow),
     # What these export is held to torch's by test_zero_gives_the_numbers_of_torch.
     *(pytest.param(preset, "torch", marks=pytest.mark.soak) for preset in (*LATER, "zero2"))],
)  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_switch_keeps_everything(trials, case, before, after):
    """Half under one engine, half under another: the end is that of plain PyTorch."""
    expected = checkpoint(trials.whole("torch"), case)
    found = checkpoint(trials.switched(before, after), case)
    assert apart(found, expected, [MASTER]) <= BOUND
    assert apart(found, expected, expected.slots) <= SLOTS_BOUND
    assert found.position.optimizer_step == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", "zero2", "zero3_offload"])
@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_numbers_of_one(trials, case, preset):
    """But for the order in which gradients are added."""
    expected = checkpoint(trials.whole("torch"), case)
    found = checkpoint(trials.whole(preset, 2), case)
    assert apart(found, expected, expected.slots) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    [*(pytest.param(one, marks=pytest.mark.soak) for one in ("torch", "zero2")), "zero3_offload"],
)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_continue_from_the_state_of_one(trials, case, preset):
    """Each takes its share of every slot; under one process each engine takes over all of them."""
    expected = checkpoint(trials.whole("torch"), case)
    found = checkpoint(trials.switched("torch", preset, 2), case)
    assert apart(found, expected, expected.slots) <= 1e-5


def test_a_switch_without_the_scalars_would_be_noticed(trials):
    """NAdam's product of momenta and ASGD's rate and weight are numbers in addition to the
    slots."""
    for case, keys in (("nadam", {"mu_product"}), ("asgd", {"eta", "mu"})):
        found = checkpoint(trials.whole("torch"), case, HALF)
        fresh = {"mu_product": 1.0, "eta": 1e-2, "mu": 1.0}
        for group in found.position.param_groups:
            assert group["scalars"].keys() == keys
            assert all(value != fresh[key] for key, value in group["scalars"].items())


@pytest.mark.parametrize(
    "optimizer", [o.name for o in optimizers.TABLE if not (o.refused or o.packages)]
)
def test_the_table_knows_the_slots(optimizer):
    """What the class truly keeps after a step, of a matrix and of a vector."""
    table, _ = optimizers.find(optimizer)
    set_all = {key: 0.5 for key in ("momentum",)} | {"amsgrad": True, "centered": True}
    for arguments in ({}, {k: v for k, v in set_all.items() if k in table.arguments}):
        phase = trial_phase(optimizer, "torch", **values(optimizer, arguments))
        shapes = ((3, 2), (4,), (2, 3, 2, 2))
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        group = ParamGroup(["a", "b"], 1e-2, 0.0)
        made = open_optimizers(phase, [group], [parameters])
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for one in made:
            one.step()
        for parameter in parameters:
            state = next((o.state[parameter] for o in made if parameter in o.state), {})
            named = {
                slot: optimizers.slot_shape(optimizer, slot, list(parameter.shape))
                for slot in optimizers.slots(optimizer, arguments)
            }
            kept = {k: list(v.shape) for k, v in state.items() if v.numel() > 1}
            assert kept == {slot: shape for slot, shape in named.items() if shape is not None}
            assert state.keys() - kept.keys() <= {"step", *table.scalars}
            assert set(table.scalars) <= state.keys()


def test_lion_is_the_papers():
    """Algorithm 2 of Chen et al. (2023), written out in float64."""
    torch.manual_seed(0)
    weights, gradients = torch.randn(11).double(), torch.randn(5, 11).double()
    lion_weights = torch.nn.Parameter(weights.clone())
    lion = Lion([lion_weights], lr=0.1, betas=(0.8, 0.95), weight_decay=0.3)
    momentum = torch.zeros(11).double()
    for gradient in gradients:
        lion_weights.grad = gradient.clone()
        lion.step()
        update = torch.sign(0.8 * momentum + 0.2 * gradient)
        weights = weights - 0.1 * (update + 0.3 * weights)
        momentum = 0.95 * momentum + 0.05 * gradient
    torch.testing.assert_close(lion_weights.detach(), weights, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("optimizer", "arguments", "key", "expected"),
    [("adamw", {}, "betas", (0.7, 0.99)), ("sgd", {"momentum": 0.9}, "momentum", 0.7)],
)
def test_a_schedule_may_change_the_first_beta_or_the_momentum(optimizer, arguments, key, expected):
    """For the coming step; None leaves it."""
    phase = trial_phase(optimizer, "torch", **values(optimizer, arguments))
    groups = [ParamGroup(["a"], 1e-2, 0.0), ParamGroup(["b"], 5e-3, 0.0)]
    (made,) = open_optimizers(phase, groups, [[torch.nn.Parameter(torch.ones(2))] for _ in groups])
    before = made.param_groups[0][key]
    set_hyperparameters(made.param_groups, groups, phase, 1e-3, None)
    assert [g["lr"] for g in made.param_groups] == [1e-3, 5e-4]
    assert made.param_groups[0][key] == before
    set_hyperparameters(made.param_groups, groups, phase, 1e-3, 0.7)
    assert [g[key] for g in made.param_groups] == [expected, expected]


def test_a_momentum_that_is_not_there_is_refused():
    """A cycled momentum means nothing to SGD without one."""
    phase = trial_phase("sgd", "torch")
    groups = [ParamGroup(["a"], 1e-2, 0.0)]
    (made,) = open_optimizers(phase, groups, [[torch.nn.Parameter(torch.ones(2))]])
    with pytest.raises(PipelineError, match="sgd has none"):
        set_hyperparameters(made.param_groups, groups, phase, 1e-3, 0.7)


def test_a_value_that_the_class_refuses_is_reported_in_a_sentence():
    """torch looks at what the table cannot."""
    phase = trial_phase("sgd", "torch", optimizer_args={"nesterov": True})
    with pytest.raises(PipelineError, match="Nesterov momentum requires"):
        open_optimizers(
            phase, [ParamGroup(["a"], 1e-2, 0.0)], [[torch.nn.Parameter(torch.ones(2))]]
        )


def test_groups_that_join_keep_their_numbers_or_are_refused():
    """Numbers follow the parameters; where they differ inside a group nothing is guessed."""
    phase = trial_phase("asgd", "torch")
    saved = [{"parameters": ["a"], "scalars": {"eta": 0.1}},
             {"parameters": ["b", "c"], "scalars": {"eta": 0.2}}]  # fmt: skip
    split = [ParamGroup(["c"], 1e-2, 0.0), ParamGroup(["b"], 1e-2, 0.0)]
    assert group_scalars(phase, split, saved) == [{"eta": 0.2}, {"eta": 0.2}]
    with pytest.raises(PipelineError, match="other values of eta"):
        group_scalars(phase, [ParamGroup(["a", "b"], 1e-2, 0.0)], saved)
