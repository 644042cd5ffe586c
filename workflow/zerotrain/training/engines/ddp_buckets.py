"""Gradient buckets of DDP that are the same from the first step of every start.

DDP rebuilds its buckets after the first backward of a start, in the order in which gradients
arrived. Three or more processes add a gradient in an order that depends on its place in its bucket,
so the first step of a resumed training would differ from that of an uninterrupted one.
"""

from __future__ import annotations

import os
from typing import Any

FROM_THE_END = "DDP_SET_LAST_BUCKET_CAP"


def fix_buckets(model: Any) -> None:
    """Give a DistributedDataParallel its final buckets before its first forward pass.

    They are the buckets of find_unused_parameters: the parameters in their order, the last bucket
    first, so that it is sent while backward computes the others.
    """
    if model.find_unused_parameters:
        return
    # With this set, torch cuts the reversed order from its end, just as it cuts the plain order.
    os.environ[FROM_THE_END] = "1"
    model.reducer._remove_autograd_hooks()
    parameters, sparse = model._build_params_for_reducer()
    parameters, sparse = parameters[::-1], sparse[::-1]
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    model.reducer._push_all_rebuilt_params()


def look_for_unused(model: Any) -> None:
    """Make a DistributedDataParallel find unused parameters, as if it was built that way.

    The result of its last backward pass is discarded: gradients are set to zero, and no process
    waits for another.
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
