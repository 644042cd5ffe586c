"""Counter of the bytes of tensors, real or fake, that are alive while operations run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

aten = torch.ops.aten


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts bytes of storages and floating-point operations.

    Attributes:
        live: Bytes of the storages that operations have made and that are still alive.
        expected: Bytes that count as alive in addition.
        highest: Largest sum of both so far.
        flops: Floating-point operations so far, a multiplication and an addition as two.
        paused: Whether operations are not counted, as while another Memory counts them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.expected = 0
        self.highest = 0
        self.flops = 0
        self.paused = False
        self._known: dict[int, Any] = {}

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude these tensors, and all that share their storages."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = storage

    def ignores(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage was excluded."""
        return isinstance(self._known.get(storage._cdata), torch.UntypedStorage)

    def note(self, more: int = 0) -> None:
        """Update the highest sum as if `more` further bytes were alive at this moment."""
        self.highest = max(self.highest, self.live + self.expected + more)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.paused:
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        self.flops += _flops(func, args, kwargs, out)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def free(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, free)
        self.live += size
        self.note()


class Storages:
    """Set of storages that keeps none alive."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, int]] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        """Add a storage; it leaves the set when it is freed."""
        key = storage._cdata
        if key not in self._found:
            gone = weakref.ref(storage, lambda _: self._found.pop(key, None))
            self._found[key] = (gone, storage.nbytes())

    @property
    def nbytes(self) -> int:
        """Bytes of all storages in the set."""
        return sum(size for _, size in self._found.values())


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(x.shape for x in args[:3])))  # type: ignore[no-untyped-call]
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        shapes = (x.shape for x in args[:4])
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    count = flop_registry.get(packet)
    return int(count(*args, **kwargs, out_val=out)) if count else 0
