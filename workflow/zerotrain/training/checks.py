"""Checks of a training's steps: losses that are not finite, buffers, unused parameters.

Every engine skips an update if the norm of its gradients is not finite, as fp16's loss scale
requires; so a loss that is not finite only has to produce such gradients.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zerotrain.config.families import FAMILIES
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.quantized_linear import QuantizedLinear
from zerotrain.training import ranks
from zerotrain.training.batches import ReadAhead
from zerotrain.training.engines.engine import Engine
from zerotrain.training.engines.torch_engine import look_for_unused
from zerotrain.training.reporting.log import Log

MOST_IN_A_ROW = 10
"""More skipped updates in a row are not due to bad samples: the training has diverged."""
NAMED_SAMPLES = 8
"""Most samples that a message names."""
HINT = (
    "look at these samples; lower learning_rate, or a fixed fp16.loss_scale, or set max_grad_norm; "
    "nan_action: skip leaves such an update out; training continues from the newest checkpoint "
    "before it"
)

Losses = list[tuple[int, torch.Tensor]]
"""For each micro batch of a step: the number of its first sample, and its samples' losses [B]."""


def nan_gradients_if_not_finite(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, bit for bit, but with NaN in every gradient if it is not finite.

    The exchange of gradients then spreads one process's NaN to all, so that they agree without
    further communication. Otherwise a loss of inf may have finite gradients, or none for some
    weights.
    """
    return loss * (1 + 0 * loss.detach())


class SkippedSteps:
    """A phase's handling of skipped updates: it reports them and counts those in a row."""

    def __init__(self, phase: ResolvedPhase, batches: ReadAhead, log: Log) -> None:
        self._phase, self._batches, self._log = phase, batches, log
        self._in_a_row = 0

    def reset(self) -> None:
        """Restart the count after an update that was made."""
        self._in_a_row = 0

    def check_and_report(self, what: str, value: float, step: int, losses: Losses) -> None:
        """Report the samples at fault; every process calls this at the same step.

        Args:
            what: The quantity that is not finite.
            value: Its value.
            step: The step, counted from 1.
            losses: This process's losses of the step.

        Raises:
            PipelineError: nan_action is stop, or too many updates were skipped in a row.
        """
        text = f"phase {self._phase.phase}: the {what} of step {step} is {value}"
        text += f"; {self._name_samples(losses)}"
        if self._phase.train.nan_action == "stop":
            raise PipelineError(text, hint=HINT)
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise PipelineError(
                f"{text}; the {MOST_IN_A_ROW} updates before it were left out, too",
                hint="the training has diverged: lower learning_rate, or a fixed fp16.loss_scale, "
                "or set max_grad_norm, and continue from a checkpoint before it",
            )
        self._log.say(f"{text}; this update is left out (nan_action: skip)")

    def _name_samples(self, losses: Losses) -> str:
        """Name the samples with losses that are not finite, or all of the step if none is such."""
        own = [
            (first + i, finite)
            for first, part in losses
            for i, finite in enumerate(torch.isfinite(part).tolist())
        ]
        every = sorted(pair for held in ranks.gather(own) for pair in held)
        spoilt = [position for position, finite in every if not finite]
        which = spoilt or [position for position, _ in every]
        names = list(dict.fromkeys(self._batches.name(position) for position in which))
        listed = join_first(names, NAMED_SAMPLES)
        return f"the loss is not finite for {listed}" if spoilt else f"its samples: {listed}"


NAMED = 5
"""Most buffers or parameters that a message names."""
WRAPPED = "module."
"""Prefix that DDP and DeepSpeed add to the names in a wrapped model."""
LARGE = 2**20
"""Bytes above which a buffer is hashed again only if its count of writes changed. Batch
normalization does not count its writes, but its statistics are one number per channel; tables of
positions may have 200 MiB."""
Mark = tuple[int, int]
"""A tensor's id and its count of writes."""


class Buffers:
    """The buffers at the start of a training, and their hashes.

    Checkpoints and states hold no buffers. BatchNorm's running statistics and the tables of dynamic
    RoPE carry history: a resume or a switch would silently reset them to the base's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        buffers = dict(_buffers(model))
        self.names = sorted(buffers)
        self._digests = {name: compute_digest(one) for name, one in buffers.items()}
        # A tensor that is kept alive has a unique id.
        self._seen = buffers
        self._marks = {name: _mark(one) for name, one in buffers.items()}

    def list_changed(self) -> list[str]:
        """Return the names of the buffers that changed in this process since the start."""
        names = []
        for name, one in _buffers(self._model):
            mark = _mark(one)
            if one.nbytes > LARGE and self._marks.get(name) == mark:
                continue
            if compute_digest(one) != self._digests.get(name):
                names.append(name)
            self._seen[name], self._marks[name] = one, mark
        return sorted(names)

    def check_unchanged(self, phase: ResolvedPhase) -> None:
        """Raise if training changed a buffer; every process calls this at the same step.

        Raises:
            PipelineError: buffers changed; the message names them.
        """
        if not self.names:
            return
        names = sorted({name for changed in ranks.gather(self.list_changed()) for name in changed})
        if not names:
            return
        raise PipelineError(
            f"phase {phase.phase}: training changes {len(names)} buffer{'s' * (len(names) > 1)} of "
            f"the model: {join_first(names, NAMED)}; no checkpoint holds buffers, so a "
            "resume or a switch would begin with the base's",
            hint="choose a base without running statistics (GroupNorm or LayerNorm in place of "
            "BatchNorm); where it is a rotary embedding's inv_freq, give the base's config.json "
            "another rope_type than dynamic, such as yarn or linear",
        )


def compute_digest(buffer: torch.Tensor) -> str:
    """Return the sha256 of a buffer's bytes."""
    values = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().data).hexdigest()


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that may carry history, by their names in the model itself."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            continue  # codes of frozen weights, as large as the model; nothing writes them
        if _depends_on_batch(module):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{path}.{name}".lstrip(".").removeprefix(WRAPPED), buffer


def _depends_on_batch(module: torch.nn.Module) -> bool:
    """Return whether each forward pass chooses the module's table by its batch alone (longrope)."""
    kind = getattr(module, "rope_type", None)
    kinds = list(kind.values()) if isinstance(kind, dict) else [kind]
    return "longrope" in kinds and "dynamic" not in kinds


def _mark(buffer: torch.Tensor) -> Mark:
    return id(buffer), buffer._version


class UnusedParameters:
    """Detector for the first step of a start: a parameter without a gradient would only decay.

    DDP waits for the gradient of each parameter unless it searches, at every step, for parameters
    without one. The search costs time, so it is enabled only if the first step has such parameters;
    that step is then repeated.

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
