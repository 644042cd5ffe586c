"""A check that training does not change a model's buffers: checkpoints and states hold none.

BatchNorm's running statistics and the tables of dynamic RoPE carry history. A resume or a switch
would silently reset them to the base's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.quantized_linear import QuantizedLinear
from zerotrain.training import ranks

NAMED = 5
"""Most buffers that a message names."""
WRAPPED = "module."
"""Prefix that DDP and DeepSpeed add to the names in a wrapped model."""
LARGE = 2**20
"""Bytes above which a buffer is hashed again only if its count of writes changed. Batch
normalization does not count its writes, but its statistics are one number per channel; tables of
positions may have 200 MiB."""
Mark = tuple[int, int]
"""A tensor's id and its count of writes."""


class Buffers:
    """The buffers at the start of a training, and their hashes."""

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
