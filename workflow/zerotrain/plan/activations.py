"""What a micro batch takes besides parameters, gradients and optimizer: bytes and operations.

A forward and a backward pass run on fake tensors (torch's FakeTensorMode), which have shapes, types
and lifetimes but no bytes. The blocks that gradient checkpointing would recompute are cut out: each
distinct one is traced by itself, once, forwards and backwards, and stands for all its like. The
passes over the rest of the model then need little time, whatever the depth.

Two simplifications, both upwards: an output of the last block that nobody uses counts as used
(Qwen-Image's text stream, one of 60 blocks), and blocks are recomputed to their end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zerotrain.plan.forward import Loss, Shape, loss_of
from zerotrain.plan.gpu_operations import GpuOperations
from zerotrain.plan.memory import Memory, Storages
from zerotrain.plan.model import TrainedModel

Mode = Literal["plain", "checkpointed", "on_host"]
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Activations:
    """What one micro batch takes on a process's device, in bytes; parameters are not counted.

    A peak is the most that is alive at any moment of a forward and backward pass: what is saved for
    the backward pass, what operations hold meanwhile, and one parameter's gradient at a time.

    Attributes:
        saved: Saved for the backward pass without checkpointing.
        peak: The peak without checkpointing.
        checkpointed: Saved with gradient checkpointing: the blocks' inputs, and what is saved
            outside of the blocks.
        peak_checkpointed: The peak with gradient checkpointing.
        on_device: Saved on the device where the blocks' inputs go to the host.
        on_host: The copies of the blocks' inputs on the host (DeepSpeed's cpu_checkpointing).
        peak_on_host: The peak on the device where the blocks' inputs go to the host.
        blocks: How many blocks are checkpointed.
        batch: Samples of the micro batch.
        forward_flops: Operations of the forward pass, a multiply-add as two.
        backward_flops: Operations of the backward pass, without any recomputation.
        recomputed_flops: Operations that checkpointing adds.
    """

    saved: int
    peak: int
    checkpointed: int
    peak_checkpointed: int
    on_device: int
    on_host: int
    peak_on_host: int
    blocks: int
    batch: int
    forward_flops: int
    backward_flops: int
    recomputed_flops: int

    def flops_per_sample(self, checkpointing: bool) -> float:
        """Operations of training on one sample."""
        more = self.recomputed_flops if checkpointing else 0
        return (self.forward_flops + self.backward_flops + more) / self.batch


def trace_activations(
    model: TrainedModel,
    shape: Shape,
    *,
    mixed_precision: str = "no",
    autocast: bool = False,
    device: str = "cuda",
) -> Activations:
    """Trace a training step of one micro batch.

    Args:
        model: The run's model.
        shape: The micro batch.
        mixed_precision: `no`, `bf16` or `fp16`.
        autocast: Weights are float32 and are cast as they are used (plain PyTorch); otherwise
            weights have the type of mixed_precision (DeepSpeed).
        device: The type of device; on `cpu` attention and autocast differ from a GPU's.

    Raises:
        PipelineError: the model cannot take such a batch.
    """
    dtype = torch.float32 if autocast else DTYPES[mixed_precision]
    cast = DTYPES[mixed_precision] if autocast and mixed_precision != "no" else None
    with FakeTensorMode(), _on_cpu(model.module, dtype), contextlib.ExitStack() as stack:
        if device != "cpu":
            stack.enter_context(GpuOperations())
        loss = loss_of(model.module, model.architecture, shape, dtype)
        trace = _Trace(model.module, cast)
        plain = trace.run(loss, "plain")
        checkpointed = trace.run(loss, "checkpointed")
        on_host = trace.run(loss, "on_host")
    return Activations(
        saved=plain.saved,
        peak=plain.peak,
        checkpointed=checkpointed.saved,
        peak_checkpointed=checkpointed.peak,
        on_device=on_host.saved,
        on_host=on_host.host,
        peak_on_host=on_host.peak,
        blocks=plain.blocks,
        batch=shape.batch,
        forward_flops=plain.forward_flops,
        backward_flops=plain.backward_flops,
        recomputed_flops=plain.block_flops,
    )


@dataclass(frozen=True)
class _Tensor:
    """The look of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Such a tensor, no view to autograd, that keeps a whole storage alive."""
        return whole.view(self.dtype).as_strided(self.shape, self.stride, 0).data


@dataclass(frozen=True)
class _Input:
    """An output that is one of the inputs."""

    index: int


@dataclass(frozen=True)
class _Block:
    """A block that checkpointing recomputes.

    Attributes:
        outputs: The leaves of its output, tensors as _Tensor or _Input.
        spec: How the leaves make its output.
        storages: Which storage each output tensor lies in.
        sizes: Bytes of those storages.
        saved: Bytes that its operations save, without its inputs and outputs.
        saved_inputs: Which of its input tensors they save.
        saved_outputs: Which of its output tensors they save.
        held: Bytes alive after its forward pass, without inputs and outputs.
        casts: Bytes of its weights in autocast's type, alive until the model's forward pass ends.
        forward_peak: Most bytes alive in its forward pass, with its outputs.
        recomputed_peak: The same where nothing is saved.
        backward_peak: The same in its backward pass, with what is saved and without the gradients
            of its outputs.
        forward_flops: Operations of its forward pass.
        backward_flops: Operations of its backward pass.
    """

    outputs: list[Any]
    spec: TreeSpec
    storages: list[int]
    sizes: list[int]
    saved: int
    saved_inputs: frozenset[int]
    saved_outputs: frozenset[int]
    held: int
    casts: int
    forward_peak: int
    recomputed_peak: int
    backward_peak: int
    forward_flops: int
    backward_flops: int


@dataclass
class _Pass:
    """One forward and backward pass over the model, its blocks cut out."""

    mode: Mode
    storages: Storages = field(default_factory=Storages)
    inner: int = 0
    saved: int = 0
    peak: int = 0
    host: int = 0
    blocks: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    block_flops: int = 0


class _Trace:
    """Passes over a model of fake tensors on CPU."""

    def __init__(self, model: torch.nn.Module, cast: torch.dtype | None) -> None:
        self._model = model
        self._cast = cast
        self._known: dict[Any, _Block] = {}
        self._names: dict[int, Any] = {}
        self.memory = Memory()
        self.now = _Pass("plain")

    def run(self, loss: Loss, mode: Mode) -> _Pass:
        """One pass."""
        self.now = _Pass(mode)
        memory = self.memory = Memory()
        self._ignore_parameters(memory)
        forward = self._model.forward
        if self._cast is not None:
            self._model.forward = torch.autocast("cpu", self._cast)(forward)
        hooks = [
            parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
            for parameter in self._model.parameters()
            if parameter.requires_grad
        ]
        try:
            with memory, _blocks_through(self._model, self.block):
                with saved_tensors_hooks(self._save, lambda tensor: tensor):
                    found = loss()
                if mode == "plain":
                    self.now.forward_flops += memory.flops
                else:
                    memory.note()
                    memory.expected = 0  # autocast has dropped its casts
                self.now.saved = self.now.storages.nbytes + self.now.inner
                memory.flops = 0
                found.backward()  # type: ignore[no-untyped-call]
                self.now.backward_flops += memory.flops
        finally:
            self._model.forward = forward
            for hook in hooks:
                hook.remove()
        self.now.peak = memory.highest
        return self.now

    def _ignore_parameters(self, memory: Memory) -> None:
        memory.ignore(tensors_of(self._model))

    def block(self, function: Any, *args: Any) -> Any:
        """What a model calls in place of a block; see enable_gradient_checkpointing."""
        bound = isinstance(function, partial)
        module = function.args[0] if bound else function
        leaves, spec = tree_flatten((args, function.keywords if bound else {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        positional = len([x for x in tree_flatten(args)[0] if isinstance(x, torch.Tensor)])
        key = (self._name(module), spec, _looks(leaves))
        if key not in self._known:
            self.memory.paused = True
            self._known[key] = self._measure(function, leaves, spec, bound)
            self.memory.paused = False
        block = self._known[key]
        trained = any(isinstance(x, _Tensor) and x.requires_grad for x in block.outputs)
        start = torch.empty(0, requires_grad=trained)
        outputs = iter(_Cut.apply(self, block, positional, start, *tensors))  # type: ignore[no-untyped-call]
        whole = [
            next(outputs)
            if isinstance(x, _Tensor)
            else tensors[x.index]
            if isinstance(x, _Input)
            else x
            for x in block.outputs
        ]
        return tree_unflatten(whole, block.spec)

    def enter(
        self, block: _Block, positional: int, tensors: tuple[torch.Tensor, ...]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A block's forward pass: what it holds of its inputs, and its outputs."""
        now, memory = self.now, self.memory
        now.blocks += 1
        now.forward_flops += block.forward_flops
        now.backward_flops += block.backward_flops
        if any(isinstance(x, _Tensor) and x.requires_grad for x in block.outputs):
            now.block_flops += block.forward_flops
        if now.mode == "plain":
            memory.note(block.forward_peak)
            memory.expected += block.held
            now.inner += block.saved
            held = [x for i, x in enumerate(tensors) if i in block.saved_inputs]
        else:
            memory.note(block.recomputed_peak)
            memory.expected += block.casts
            held = list(tensors if now.mode == "checkpointed" else tensors[positional:])
        looks = [x for x in block.outputs if isinstance(x, _Tensor)]
        wholes = [torch.empty(size, dtype=torch.uint8) for size in block.sizes]
        outputs = [
            look.within(wholes[place]) for look, place in zip(looks, block.storages, strict=True)
        ]
        if now.mode == "plain":
            held += [x for i, x in enumerate(outputs) if i in block.saved_outputs]
        if now.mode == "on_host":
            now.host += sum(x.nbytes for x in tensors[:positional])
        for tensor in held:
            if not memory.ignores(tensor.untyped_storage()):
                now.storages.add(tensor.untyped_storage())
        return held, outputs

    def leave(self, block: _Block, fetched: int) -> None:
        """A block's backward pass."""
        if self.now.mode == "plain":
            self.memory.expected -= block.held
        more = fetched if self.now.mode == "on_host" else 0
        self.memory.note(block.backward_peak + more)

    def _measure(self, function: Any, leaves: list[Any], spec: TreeSpec, bound: bool) -> _Block:
        """Trace a block by itself."""
        memory = Memory()
        self._ignore_parameters(memory)
        own = [_like(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        given_inputs = [x for x in own if isinstance(x, torch.Tensor)]
        inputs = {x.untyped_storage()._cdata: i for i, x in reversed(list(enumerate(given_inputs)))}
        saved: dict[int, torch.UntypedStorage] = {}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if not memory.ignores(storage):
                saved[storage._cdata] = storage
            return tensor

        args, kwargs = tree_unflatten(own, spec)
        call = partial(function.func, *function.args, **kwargs) if bound else function
        torch.clear_autocast_cache()
        with memory:
            with torch.no_grad():
                call(*args)
            recomputed_peak = memory.highest
            torch.clear_autocast_cache()
            memory.highest = memory.live
            memory.flops = 0
            with torch.enable_grad(), saved_tensors_hooks(save, lambda tensor: tensor):
                result = call(*args)
            forward_peak, forward_flops = memory.highest, memory.flops
            flat, out_spec = tree_flatten(result)
            looks = [_Tensor.of(x) if isinstance(x, torch.Tensor) else x for x in flat]
            for place, x in enumerate(flat):
                index = inputs.get(x.untyped_storage()._cdata) if looks[place] is not x else None
                if index is not None and _Tensor.of(given_inputs[index]) == looks[place]:
                    looks[place] = _Input(index)
            tensors = [x for x, look in zip(flat, looks, strict=True) if isinstance(look, _Tensor)]
            outputs = {x.untyped_storage()._cdata: i for i, x in enumerate(tensors)}
            places = list(outputs)
            sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
            made = sum(size for key, size in sizes.items() if key not in inputs)
            storages = [places.index(x.untyped_storage()._cdata) for x in tensors]
            held = memory.live - made
            inner = {k: s for k, s in saved.items() if k not in inputs and k not in outputs}
            inner_bytes = sum(s.nbytes() for s in inner.values())
            saved_inputs = frozenset(inputs[key] for key in saved if key in inputs)
            saved_outputs = frozenset(
                outputs[key] for key in saved if key in outputs and key not in inputs
            )
            saved.clear()
            inner.clear()
            before, memory.flops = memory.live, 0
            ends = [get_gradient_edge(x) for x in tensors if x.requires_grad]
            gradients = [torch.empty_like(x) for x in tensors if x.requires_grad]
            given = memory.live - before
            del result, flat, tensors, own, given_inputs, args, kwargs, call
            memory.highest = memory.live
            if ends:
                with torch.autocast("cpu", enabled=False):
                    torch.autograd.backward(ends, gradients)
            backward_peak, backward_flops = memory.highest - given, memory.flops
            del ends, gradients
        casts = memory.live
        torch.clear_autocast_cache()
        return _Block(
            looks, out_spec, storages, [sizes[key] for key in places], inner_bytes, saved_inputs,
            saved_outputs, held, casts - memory.live, forward_peak, recomputed_peak, backward_peak,
            forward_flops, backward_flops,
        )  # fmt: skip

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not self.memory.ignores(storage):
            self.now.storages.add(storage)
        return tensor

    def _name(self, module: torch.nn.Module) -> Any:
        """What tells blocks of different kinds apart."""
        if id(module) not in self._names:
            parameters = tuple(
                (name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()
            )
            self._names[id(module)] = (type(module), str(module), parameters)
        return self._names[id(module)]


class _Cut(torch.autograd.Function):
    """Stands for a block in the passes over the whole model."""

    @staticmethod
    def forward(
        ctx: Any, trace: _Trace, block: _Block, positional: int, start: Any, *inputs: Any
    ) -> Any:
        ctx.trace, ctx.block = trace, block
        ctx.inputs = [_Tensor.of(x) for x in inputs]
        ctx.fetched = sum(x.nbytes for x in inputs[:positional])
        ctx.held, outputs = trace.enter(block, positional, inputs)
        looks = [x for x in block.outputs if isinstance(x, _Tensor)]
        ctx.mark_non_differentiable(
            *(x for x, look in zip(outputs, looks, strict=True) if not look.requires_grad)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.trace.leave(ctx.block, ctx.fetched)
        ctx.held = None
        return (
            None, None, None, None,
            *(
                look.empty() if needed else None
                for look, needed in zip(ctx.inputs, ctx.needs_input_grad[4:], strict=True)
            ),
        )  # fmt: skip


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's storage as the end of its graph; no leaf, whose casts autocast would keep."""
    start = tensor.detach().requires_grad_(tensor.requires_grad)
    return start.view_as(start)


def _looks(leaves: list[Any]) -> tuple[Any, ...]:
    """What tells the arguments of blocks apart: looks, values, and which share a storage."""
    first: dict[int, int] = {}
    found: list[Any] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            place = first.setdefault(leaf.untyped_storage()._cdata, index)
            found.append((_Tensor.of(leaf), place))
        else:
            found.append(repr(leaf))
    return tuple(found)


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and tables of a model."""
    return [
        value
        for module in model.modules()
        for values in (module._parameters, module._buffers, vars(module))
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


@contextlib.contextmanager
def _blocks_through(model: torch.nn.Module, function: Any) -> Iterator[None]:
    """Let a model of diffusers or transformers hand its checkpointed blocks to a function."""
    whole: Any = model
    whole._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    try:
        yield
    finally:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                vars(module)["gradient_checkpointing"] = False


@contextlib.contextmanager
def _on_cpu(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give a meta model fake tensors of this type on CPU; afterwards its own again."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            found = torch.empty(tensor.shape, dtype=kind)
            if isinstance(tensor, torch.nn.Parameter):
                found = torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
            made[id(tensor)] = found
        return made[id(tensor)]

    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        holders: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
        for values in holders:
            tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
            if tensors:
                kept.append((values, tensors))
    for values, tensors in kept:
        values.update({name: fake(tensor) for name, tensor in tensors.items()})
    try:
        yield
    finally:
        for values, tensors in kept:
            values.update(tensors)
