"""Trained parameters that the loss does not depend on: found at the first step, and named.

DDP waits for the gradient of each parameter unless it looks, at every step, for those that get
none. Looking costs time, so it starts where a first step has found some; that step is made again.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training import ranks
from zerotrain.training.ddp_buckets import look_for_unused
from zerotrain.training.engine import Engine
from zerotrain.training.log import Log

NAMED = 5
"""Parameters that a sentence names."""
WRAPPED = "module."
"""What DDP and DeepSpeed put before the names of the model that they hold."""


class UnusedParameters:
    """Watches the first step of a start: a parameter without a gradient would only decay.

    The engines keep gradients as tensors that are never None, so that a hook has to tell. It is
    there for one step; the others cost nothing.
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

    def settle(self, phase: ResolvedPhase, log: Log) -> bool:
        """Report those without a gradient by now; every process calls this at the same step.

        Returns:
            Whether DDP did not look for them, and does from now on: gradients are cleared, and the
            step has to be made again.
        """
        for hook in self._hooks:
            hook.remove()
        names = sorted({name for waiting in ranks.gather(self._waiting) for name in waiting})
        if not names or phase.find_unused_parameters:
            return False
        again = isinstance(self._model, DistributedDataParallel)
        if isinstance(self._model, DistributedDataParallel):
            look_for_unused(self._model)
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        looks = "; DDP looks for them at every step" if again else ""
        log.say(
            f"phase {phase.phase}: the loss does not depend on {len(names)} of the trained "
            f"parameters: {', '.join(names[:NAMED])}{more}{looks}; weight decay alone changes them "
            "(name them in frozen_parameters, or set launch.find_unused_parameters: true)"
        )
        return again
