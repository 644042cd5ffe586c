"""Gradient checkpointing changes what is kept, and no number."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import checkpointing
from tests.builders.processes import start_ranks
from tests.training.tiny_models import MODELS, WAYS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training.setup import build_engine


class HostMemory:
    """Stands in for DeepSpeed's copies to host memory, which want a GPU."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def offload_input(self, tensor: torch.Tensor) -> int:
        self.held.append(tensor.clone())
        return len(self.held) - 1

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.held)

    def restore_input(self, token: int) -> torch.Tensor:
        return self.held[token]


@pytest.fixture
def host_memory() -> HostMemory:
    return HostMemory()


@pytest.fixture(params=list(WAYS))
def way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, host_memory: HostMemory
) -> str:
    """Each function that recomputes a block."""
    if request.param == "deepspeed on cpu":
        monkeypatch.setattr(checkpointing, "CPU_CHECKPOINT", True)
        monkeypatch.setattr(checkpointing, "_get_cpu_offload_engine", lambda: host_memory)
    return request.param


def gradients(name: str, adapter: bool, way: str | None) -> dict[str, torch.Tensor]:
    """The gradients of a tiny model, recomputed in this way."""
    tiny = MODELS[name]
    model = tiny.make(adapter=adapter)
    if way:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=WAYS[way])
    torch.manual_seed(5)
    tiny.loss(model, torch.device("cpu")).backward()
    # A transformer's last block may have parameters that no output depends on.
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_without(name, adapter, way):
    """Bit by bit through torch; through DeepSpeed but for rounding, since it adds up within a block
    before it adds up over blocks. With dropout, for both libraries' models; also of an adapter's
    first block, whose inputs require no gradient, and across a U-Net's skip connections."""
    expected = gradients(name, adapter, None)
    found = gradients(name, adapter, way)
    assert expected.keys() <= found.keys()
    # DeepSpeed gives zeros to parameters of a last block that no output depends on.
    assert not any(found[n].any() for n in found.keys() - expected.keys())
    bound = 1e-6 if way.startswith("deepspeed") else 0
    for parameter, gradient in expected.items():
        apart = (found[parameter] - gradient).abs().max()
        assert apart <= bound * gradient.abs().max() + bound * 1e-3, parameter
    if adapter:
        assert all(".lora_" in n for n in found)


class Made(TorchDispatchMode):
    """Remembers every storage that is made under it, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages.setdefault(StorageWeakRef(storage), storage.nbytes())
        return outputs

    def alive(self) -> int:
        """Bytes that are still held."""
        return sum(nbytes for ref, nbytes in self._storages.items() if not ref.expired())


def held_after_forward(name: str, way: str | None) -> int:
    """Bytes that a forward pass leaves held for the backward pass, and what else it caches."""
    model = MODELS[name].make(adapter=False)
    if way:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=WAYS[way])
    with Made() as made:
        loss = MODELS[name].loss(model, torch.device("cpu"))
    assert loss.requires_grad
    return made.alive()


@pytest.mark.parametrize("name", MODELS)
def test_less_is_kept(name, way, host_memory):
    """What is held when the forward pass is over falls by more than all but the blocks hold;
    DeepSpeed's function holds no more than torch's, and less once inputs are in host memory: no
    other reference holds them."""
    found = held_after_forward(name, way) - host_memory.nbytes
    if way == "torch":
        assert found < 0.75 * held_after_forward(name, None)
    else:
        host_memory.held.clear()
        plain = held_after_forward(name, "torch")
        assert found < plain if way == "deepspeed on cpu" else found == plain


def _train_twice(phase: ResolvedPhase, launch: Path, some: Models, answers: Any) -> None:
    """In a process of its own: losses and gradient norms of tiny models under the phase's engine,
    without and with checkpointing."""
    for name, adapter in some:
        found: list[list[float]] = []
        for checkpointed in (False, True):
            own = phase.with_values(gradient_checkpointing=checkpointed)
            model = MODELS[name].make(adapter=adapter)
            engine = build_engine(model, own, launch, exact=True)
            found.append([])
            for step in range(2):
                torch.manual_seed(step)
                with engine.micro_batch(last=True):
                    loss = MODELS[name].loss(engine.model, engine.device)
                    engine.backward(loss)
                found[-1] += [loss.item(), engine.step(1e-3)]
        answers.put(((name, adapter), *found))


Models = list[tuple[str, bool]]
EVERY: Models = [(name, adapter) for name in MODELS for adapter in (False, True)]
SOME: Models = [("unet", True), ("sd3", False)]
BF16 = {"mixed_precision": "bf16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "changes", "some"),
    [("torch", BF16, SOME), ("zero3_offload", {}, SOME), ("zero2", BF16, EVERY)],
)
def test_every_preset_trains_as_without(training, server, preset, changes, some):
    """The same bits through torch, within rounding through DeepSpeed."""
    phase = training.phase("a", preset, 2, gradient_checkpointing=True, **changes)
    answers = server.Queue()
    words = (phase, training.folder / "a" / "launch", some, answers)
    (process,) = start_ranks(server.Process, _train_twice, 1, *words)
    apart = {}
    for _ in some:
        which, expected, found = answers.get(timeout=100)
        apart[which] = max(abs(f - e) / e for f, e in zip(found, expected, strict=True))
    process.join()
    print(preset, changes, apart)
    rounding = 2e-3 if phase.launch.mixed_precision == "bf16" else 1e-6
    assert max(apart.values()) <= (0 if preset == "torch" else rounding)


def test_a_block_is_computed_again_as_it_was(way):
    """The same random numbers, under autocast where it was, with numbers, None, keywords and
    tensors in containers; what it gives comes in the same form, also an input given back."""
    seen = []

    def block(x, number, nothing, pair, *, scale):
        assert (number, nothing) == (3, None)
        noise = torch.nn.functional.dropout(x) @ pair[0]
        seen.append(noise)
        return {"first": noise * scale, "second": (x, None)}

    x, factor, scale = (torch.rand(4, 4).requires_grad_() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        bound = partial(block, scale=scale)  # as transformers gives keyword arguments
        found = WAYS[way](bound, x * 1, 3, None, (factor * 1, 2))
    torch.rand(1)
    assert found["second"][1] is None
    (found["first"].float().sum() + found["second"][0].sum()).backward()
    before, again = seen
    assert before.dtype == again.dtype == torch.bfloat16
    assert torch.equal(before, again)
    assert scale.grad.any()
    assert factor.grad.any()
    assert x.grad.ge(1).all()
