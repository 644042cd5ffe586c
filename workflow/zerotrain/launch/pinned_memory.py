"""Page-locked host memory of the requested size, not rounded up to a power of two.

torch rounds page-locked allocations up to powers of two and keeps freed ones, so that small ones
are reused (ATen/core/CachingHostAllocator.h). An offloaded optimizer's buffers are large and live
as long as the training: 9.6 GiB would take 16 GiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version

from zerotrain.launch.resolved import ResolvedPhase

LIMIT_MIB = 16
LIMIT = LIMIT_MIB * 2**20
"""Bytes above which an allocation is neither rounded nor kept. Most batches are smaller: each step
allocates them again, and locking pages takes time. Activations on the host are only page-locked
under plain PyTorch (zerotrain/training/engines/gradient_checkpointing.py), which keeps torch's
default."""
KEY = "pinned_max_cached_size_mb"
"""torch's setting. `pinned_max_round_threshold_mb` alone does not suffice: a kept block that was
not rounded could be given to a larger request."""
KNOWN_SINCE = (2, 13)
"""The first version of torch with this setting; earlier ones refuse a name that they lack."""
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def allocator_settings(phase: ResolvedPhase, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that sets the limit, merged with the user's setting.

    Empty if nothing is offloaded, if torch is too old for it, or if the user's own value has the
    key.
    """
    offloads = {phase.derived.offload_optimizer, phase.derived.offload_param}
    return limit(environment) if offloads != {"none"} else {}


def limit(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable for a process that offloads, as `allocator_settings`."""
    if tuple(int(number) for number in version("torch").split(".")[:2]) < KNOWN_SINCE:
        return {}
    name = next((name for name in VARIABLES if environment.get(name)), VARIABLES[0])
    own = environment.get(name, "")
    if KEY in own:
        return {}
    return {name: ",".join(filter(None, [own, f"{KEY}:{LIMIT_MIB}"]))}


def rounding(sizes: Iterable[int]) -> int:
    """Return the bytes that page-locked tensors of these sizes take beyond their own."""
    return sum((1 << (size - 1).bit_length()) - size for size in sizes if 0 < size <= LIMIT)


def cached_bytes(sizes: Iterable[int]) -> int:
    """Return the page-locked bytes that freed tensors of these sizes keep for reuse."""
    small = [size for size in sizes if size <= LIMIT]
    return sum(small) + rounding(small)
