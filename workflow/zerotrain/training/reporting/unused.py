"""Trained parameters that the loss does not depend on: found at the first step, and reported.

DDP waits for the gradient of each parameter unless it searches, at every step, for parameters
without one. The search costs time, so it is enabled only if the first step has such parameters;
that step is then repeated.
"""

from __future__ import annotations

import re

from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zerotrain.config.families import FAMILIES
from zerotrain.config.suggestions import join_first
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training import ranks
from zerotrain.training.engines.engine import Engine
from zerotrain.training.engines.torch_engine import look_for_unused
from zerotrain.training.reporting.log import Log

NAMED = 5
"""Number of parameters that a message names."""
WRAPPED = "module."
"""Prefix of parameter names in a model wrapped by DDP or DeepSpeed."""


class UnusedParameters:
    """Detector for the first step of a start: a parameter without a gradient would only decay.

    The engines' gradient tensors are never None, so hooks detect the gradients. They exist for one
    step; later steps have no overhead.
    """

    def __init__(self, engine: Engine) -> None:
        self._model = engine.model
        self._waiting: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        for wrapped, parameter in engine.model.named_parameters():
            name = wrapped.removeprefix(WRAPPED)
            if name in engine.shapes:
                self._waiting.add(name)
                hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, name=name: self._waiting.discard(name)
                )
                self._hooks.append(hook)

    def report(self, phase: ResolvedPhase, log: Log) -> bool:
        """Report the parameters without a gradient; every process calls this at the same step.

        Returns:
            Whether DDP's search was off and is now on: the gradients are cleared, and the step must
            be repeated.
        """
        for hook in self._hooks:
            hook.remove()
        names = sorted({name for waiting in ranks.gather(self._waiting) for name in waiting})
        if not names or phase.launch.find_unused_parameters:
            return False
        again = isinstance(self._model, DistributedDataParallel)
        if isinstance(self._model, DistributedDataParallel):
            look_for_unused(self._model)
        looks = "; DDP looks for them at every step" if again else ""
        if _is_expected(names, phase.family):
            log.say(
                f"phase {phase.phase}: {len(names)} parameters of the last block's text stream get "
                f"no gradient, as in every {phase.family} model{looks}"
            )
            return again
        log.say(
            f"phase {phase.phase}: the loss does not depend on {len(names)} of the trained "
            f"parameters: {join_first(names, NAMED)}{looks}; weight decay alone changes them "
            "(name them in frozen_parameters, or set launch.find_unused_parameters: true)"
        )
        return again


def _is_expected(names: list[str], family: str) -> bool:
    """Return whether they are those of one block that the family's model never uses."""
    kind = FAMILIES.get(family)
    if kind is None or not kind.no_gradient:
        return False
    matches = [re.search(kind.no_gradient, name) for name in names]
    return all(matches) and len({re.findall(r"\d+", name)[0] for name in names}) == 1
