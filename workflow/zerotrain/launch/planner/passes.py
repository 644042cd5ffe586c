"""Passes over a model of fake tensors, in which each distinct block is traced once, by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zerotrain.launch.planner.memory import Memory, Storages


@dataclass(frozen=True)
class TensorMetadata:
    """Metadata of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMetadata:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return such a tensor, not a view for autograd, that keeps a whole storage alive."""
        return whole.view(self.dtype).as_strided(self.shape, self.stride, 0).data


@dataclass(frozen=True)
class SameInput:
    """Output that is one of the inputs."""

    index: int


@dataclass(frozen=True)
class BlockTrace:
    """Block that checkpointing recomputes.

    Attributes:
        outputs: Leaves of its output, with tensors as TensorMetadata or SameInput.
        spec: Tree structure of its output.
        storages: Storage of each output tensor.
        sizes: Bytes of those storages.
        saved: Bytes saved by its operations, without its inputs and outputs.
        saved_inputs: Input tensors that they save.
        saved_outputs: Output tensors that they save.
        held: Bytes alive after its forward pass, without inputs and outputs.
        casts: Bytes of its weights in autocast's type, alive until the model's forward pass ends.
        forward_peak: Peak bytes of its forward pass, with its outputs.
        recomputed_peak: The same if nothing is saved.
        backward_peak: Peak bytes of its backward pass, with the saved tensors and without the
            gradients of its outputs.
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


def detach_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a non-leaf tensor with the same storage that ends the graph; autocast would keep a
    leaf's casts."""
    start = tensor.detach().requires_grad_(tensor.requires_grad)
    return start.view_as(start)


def block_key(leaves: list[Any]) -> tuple[Any, ...]:
    """Return a key for the arguments of blocks: metadata, values, and shared storages."""
    first: dict[int, int] = {}
    key: list[Any] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            place = first.setdefault(leaf.untyped_storage()._cdata, index)
            key.append((TensorMetadata.of(leaf), place))
        else:
            key.append(repr(leaf))
    return tuple(key)


Loss = Callable[[], torch.Tensor]
"""Function that runs the model once and returns the scalar loss."""
Mode = Literal["plain", "checkpointed", "on_host"]


@dataclass
class Pass:
    """Forward and backward pass over the model without its blocks."""

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


class Trace:
    """Passes over a model of fake tensors on CPU."""

    def __init__(self, model: torch.nn.Module, cast: torch.dtype | None) -> None:
        self._model = model
        self._cast = cast
        self._known: dict[Any, BlockTrace] = {}
        self._names: dict[int, Any] = {}
        self.memory = Memory()
        self.now = Pass("plain")

    def run(self, loss: Loss, mode: Mode) -> Pass:
        """Run one pass."""
        self.now = Pass(mode)
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
                    value = loss()
                if mode == "plain":
                    self.now.forward_flops += memory.flops
                else:
                    memory.note()
                    memory.expected = 0  # autocast has freed its casts
                self.now.saved = self.now.storages.nbytes + self.now.inner
                memory.flops = 0
                value.backward()  # type: ignore[no-untyped-call]
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
        """Replace a block in the model's call; see enable_gradient_checkpointing."""
        bound = isinstance(function, partial)
        module = function.args[0] if bound else function
        leaves, spec = tree_flatten((args, function.keywords if bound else {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        positional = len([x for x in tree_flatten(args)[0] if isinstance(x, torch.Tensor)])
        key = (self._name(module), spec, block_key(leaves))
        if key not in self._known:
            self.memory.paused = True
            self._known[key] = self._measure(function, leaves, spec, bound)
            self.memory.paused = False
        block = self._known[key]
        trained = any(isinstance(x, TensorMetadata) and x.requires_grad for x in block.outputs)
        start = torch.empty(0, requires_grad=trained)
        outputs = iter(_Cut.apply(self, block, positional, start, *tensors))  # type: ignore[no-untyped-call]
        whole = [
            next(outputs)
            if isinstance(x, TensorMetadata)
            else tensors[x.index]
            if isinstance(x, SameInput)
            else x
            for x in block.outputs
        ]
        return tree_unflatten(whole, block.spec)

    def on_block_enter(
        self, block: BlockTrace, positional: int, tensors: tuple[torch.Tensor, ...]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Account for a block's forward pass; return the inputs that it holds, and its outputs."""
        now, memory = self.now, self.memory
        now.blocks += 1
        now.forward_flops += block.forward_flops
        now.backward_flops += block.backward_flops
        if any(isinstance(x, TensorMetadata) and x.requires_grad for x in block.outputs):
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
        metadata = [x for x in block.outputs if isinstance(x, TensorMetadata)]
        wholes = [torch.empty(size, dtype=torch.uint8) for size in block.sizes]
        outputs = [
            one.within(wholes[place]) for one, place in zip(metadata, block.storages, strict=True)
        ]
        if now.mode == "plain":
            held += [x for i, x in enumerate(outputs) if i in block.saved_outputs]
        if now.mode == "on_host":
            now.host += sum(x.nbytes for x in tensors[:positional])
        for tensor in held:
            if not memory.ignores(tensor.untyped_storage()):
                now.storages.add(tensor.untyped_storage())
        return held, outputs

    def on_block_exit(self, block: BlockTrace, fetched: int) -> None:
        """Account for a block's backward pass."""
        if self.now.mode == "plain":
            self.memory.expected -= block.held
        more = fetched if self.now.mode == "on_host" else 0
        self.memory.note(block.backward_peak + more)

    def _measure(self, function: Any, leaves: list[Any], spec: TreeSpec, bound: bool) -> BlockTrace:
        """Trace a block by itself."""
        memory = Memory()
        self._ignore_parameters(memory)
        own = [detach_like(x) if isinstance(x, torch.Tensor) else x for x in leaves]
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
            metadata = [TensorMetadata.of(x) if isinstance(x, torch.Tensor) else x for x in flat]
            for place, x in enumerate(flat):
                index = inputs.get(x.untyped_storage()._cdata) if metadata[place] is not x else None
                if index is not None and TensorMetadata.of(given_inputs[index]) == metadata[place]:
                    metadata[place] = SameInput(index)
            tensors = [
                x for x, one in zip(flat, metadata, strict=True) if isinstance(one, TensorMetadata)
            ]
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
        return BlockTrace(
            metadata, out_spec, storages, [sizes[key] for key in places], inner_bytes, saved_inputs,
            saved_outputs, held, casts - memory.live, forward_peak, recomputed_peak, backward_peak,
            forward_flops, backward_flops,
        )  # fmt: skip

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not self.memory.ignores(storage):
            self.now.storages.add(storage)
        return tensor

    def _name(self, module: torch.nn.Module) -> Any:
        """Return a key that distinguishes blocks of different kinds."""
        if id(module) not in self._names:
            parameters = tuple(
                (name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()
            )
            self._names[id(module)] = (type(module), str(module), parameters)
        return self._names[id(module)]


class _Cut(torch.autograd.Function):
    """Replacement for a block in the passes over the whole model."""

    @staticmethod
    def forward(
        ctx: Any, trace: Trace, block: BlockTrace, positional: int, start: Any, *inputs: Any
    ) -> Any:
        ctx.trace, ctx.block = trace, block
        ctx.inputs = [TensorMetadata.of(x) for x in inputs]
        ctx.fetched = sum(x.nbytes for x in inputs[:positional])
        ctx.held, outputs = trace.on_block_enter(block, positional, inputs)
        metadata = [x for x in block.outputs if isinstance(x, TensorMetadata)]
        ctx.mark_non_differentiable(
            *(x for x, one in zip(outputs, metadata, strict=True) if not one.requires_grad)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.trace.on_block_exit(ctx.block, ctx.fetched)
        ctx.held = None
        return (
            None, None, None, None,
            *(
                one.empty() if needed else None
                for one, needed in zip(ctx.inputs, ctx.needs_input_grad[4:], strict=True)
            ),
        )  # fmt: skip


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters, buffers and other tensor attributes of a model."""
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
    """Make a diffusers or transformers model pass its checkpointed blocks to a function."""
    whole: Any = model
    whole._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    try:
        yield
    finally:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                vars(module)["gradient_checkpointing"] = False
