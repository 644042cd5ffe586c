"""DeepSpeed's zero_optimization section, derived from the model: buckets, prefetch, buffers.

DeepSpeed's own defaults (buckets of 5e8 elements, 1e9 live parameters) suit models that fill
clusters; on one small GPU they cost gigabytes without a benefit. Meaning of the keys:
https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training

Page-locked host memory has the requested size. torch rounds such allocations up to powers of two
and keeps freed ones, so that small ones are reused (ATen/core/CachingHostAllocator.h). An offloaded
optimizer's buffers are large and live as long as the training: 9.6 GiB would take 16 GiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from zerotrain.launch.resolved import ResolvedPhase, Settings
from zerotrain.models.sizes import ModelSizes

SMALL_BUCKET, LARGE_BUCKET = 20_000_000, 50_000_000
"""Elements. Smaller buckets make collectives slow; larger ones do not make them faster."""
LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP = 100_000_000
"""Elements of a sub-group with swapped states, which needs three float32 buffers of this size."""
BUFFERS = {"offload_optimizer": 4, "offload_param": 5}
"""DeepSpeed's default numbers of buffers."""


def zero_optimization(
    stage: int,
    offload_optimizer: str,
    offload_param: str,
    offload_path: str | None,
    num_processes: int,
    sizes: ModelSizes,
) -> Settings:
    """Return every value of the section; sizes are in elements, as in DeepSpeed."""
    bucket = min(max(sizes.largest_trained, SMALL_BUCKET), LARGE_BUCKET, sizes.trained)
    bucket += bucket % 2  # DeepSpeed's stages 1 and 2 need an even bucket size
    why = (
        f"the largest trained parameter ({_count(sizes.largest_trained)} elements) within "
        f"{_count(SMALL_BUCKET)} and {_count(LARGE_BUCKET)}, at most the whole "
        f"({_count(sizes.trained)}); DeepSpeed's default is 500 M"
    )
    settings: Settings = {
        "stage": (stage, "derived", "the preset's"),
        "contiguous_gradients": (True, "default", "keeps gradients from fragmenting the memory"),
        "overlap_comm": (
            False,
            "default",
            "overlapping holds two buckets; one process has nothing to overlap",
        ),
        "reduce_bucket_size": (bucket, "derived", why),
    }
    if stage < 3:
        settings["allgather_bucket_size"] = (bucket, "derived", why)
        settings["round_robin_gradients"] = (
            False,
            "default",
            "with it DeepSpeed names other parameters' moments, and no checkpoint would be right",
        )
    else:
        settings |= _stage3(offload_optimizer, offload_param, bucket, sizes)
    for target, device in (
        ("offload_optimizer", offload_optimizer),
        ("offload_param", offload_param),
    ):
        if device != "none":
            settings |= _offload(target, device, offload_path, num_processes, sizes)
    return settings


def _stage3(offload_optimizer: str, offload_param: str, bucket: int, sizes: ModelSizes) -> Settings:
    prefetch = min(max(sizes.largest, SMALL_BUCKET), LARGE_BUCKET, sizes.everything)
    live = min(LIVE_PARAMETERS, sizes.everything)
    live_reason = f"at most {_count(LIVE_PARAMETERS)} elements of {_count(sizes.everything)}"
    if offload_param != "none":
        live = min(2 * (prefetch + sizes.largest), sizes.everything)
        live_reason = (
            f"twice a prefetch and the largest parameter ({sizes.largest_name}, "
            f"{_count(sizes.largest)}): weights leave the GPU as soon as they are used"
        )
    group = min(SUB_GROUP if offload_optimizer == "nvme" else LIVE_PARAMETERS, sizes.trained)
    return {
        "stage3_prefetch_bucket_size": (
            prefetch,
            "derived",
            f"the largest parameter ({sizes.largest_name}, {_count(sizes.largest)} elements) "
            f"within {_count(SMALL_BUCKET)} and {_count(LARGE_BUCKET)}, at most the whole",
        ),
        "stage3_param_persistence_threshold": (
            sizes.largest_vector + 1,
            "derived",
            "norms and biases stay on every process: the largest has "
            f"{_count(sizes.largest_vector)} elements",
        ),
        "stage3_max_live_parameters": (live, "derived", live_reason),
        "stage3_max_reuse_distance": (live, "derived", live_reason),
        "sub_group_size": (
            max(group, sizes.largest_trained),
            "derived",
            "states are swapped a group at a time, which holds the largest parameter"
            if offload_optimizer == "nvme"
            else f"at most {_count(LIVE_PARAMETERS)} of {_count(sizes.trained)} elements at a time",
        ),
        "stage3_gather_16bit_weights_on_model_save": (
            False,
            "default",
            "weights leave through export_weights, which gathers nothing",
        ),
    }


def _offload(
    target: str, device: str, path: str | None, num_processes: int, sizes: ModelSizes
) -> Settings:
    settings: Settings = {
        f"{target}.device": (device, "derived", f"launch.{target}"),
        f"{target}.pin_memory": (True, "default", "transfers are faster from page-locked memory"),
    }
    if device != "nvme":
        return settings
    settings[f"{target}.nvme_path"] = (path, "derived", "launch.offload_path")
    count = BUFFERS[target]
    if target == "offload_param":
        part = math.ceil(sizes.largest / num_processes)
        settings[f"{target}.buffer_size"] = (
            part,
            "derived",
            f"a process's part of the largest parameter ({sizes.largest_name}, "
            f"{_count(sizes.largest)} elements)",
        )
        prefetch = min(max(sizes.largest, SMALL_BUCKET), LARGE_BUCKET, sizes.everything)
        count = max(count, math.ceil(prefetch / sizes.largest) + 1)
        reason = "those of one prefetch and the one in use, at least DeepSpeed's own number"
        settings[f"{target}.buffer_count"] = (count, "derived", reason)
        return settings
    settings[f"{target}.buffer_count"] = (
        count,
        "derived",
        "master weight, gradient and Adam's two moments of a sub-group",
    )
    return settings


def _count(elements: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if elements >= size:
            return f"{elements / size:.3g} {unit}"
    return f"{elements:,}"


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
