"""DDP sums gradients in buckets; here they are the same from the first step of every start.

DDP cuts them anew after the first backward of a start, by the order in which gradients came. Three
or more processes add a gradient in an order that depends on its place in its bucket, so a resumed
training would differ in its first step from one that was never interrupted.
"""

from __future__ import annotations

import os
from typing import Any

FROM_THE_END = "DDP_SET_LAST_BUCKET_CAP"


def fix_buckets(model: Any) -> None:
    """Give a DistributedDataParallel, before its first forward, the buckets that it keeps.

    They are those that find_unused_parameters has at any time: of the parameters in their order,
    the last bucket first, so that they are sent while backward computes the others.
    """
    if model.find_unused_parameters:
        return
    # Under it torch cuts the reversed order from its end, as it cuts the order otherwise.
    os.environ[FROM_THE_END] = "1"
    model.reducer._remove_autograd_hooks()
    parameters, sparse = model._build_params_for_reducer()
    parameters, sparse = parameters[::-1], sparse[::-1]
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    model.reducer._push_all_rebuilt_params()


def look_for_unused(model: Any) -> None:
    """Let a DistributedDataParallel look for parameters without a gradient, as if told at first.

    What its last backward left is dropped: gradients are zero, and no process waits for others.
    """
    os.environ.pop(FROM_THE_END, None)
    model.reducer._remove_autograd_hooks()
    model.find_unused_parameters = True
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()
