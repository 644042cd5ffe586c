"""Trained parameters that the loss does not depend on: found at the first step, and named."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training import ranks
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
        self._wrapped = isinstance(engine.model, DistributedDataParallel)
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

    def settle(self, phase: ResolvedPhase, log: Log) -> None:
        """Say which have got no gradient by now; every process calls this at the same step.

        Raises:
            PipelineError: there are some, under DDP, which would wait for them at the next step.
        """
        for hook in self._hooks:
            hook.remove()
        names = sorted({name for waiting in ranks.gather(self._waiting) for name in waiting})
        if not names or phase.find_unused_parameters:
            return
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        text = (
            f"phase {phase.phase}: the loss does not depend on {len(names)} of the trained "
            f"parameters: {', '.join(names[:NAMED])}{more}"
        )
        hint = "name them in frozen_parameters, or set launch.find_unused_parameters: true"
        if self._wrapped:
            raise PipelineError(f"{text}; DDP would wait for their gradients", hint=hint)
        log.say(f"{text}; weight decay alone changes them ({hint})")
