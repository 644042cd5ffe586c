"""What to write of a denoiser: trained tensors, and the base's own where nothing was trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from zerotrain.errors import PipelineError
from zerotrain.tensor_file import open_tensors


def tensor_sources(
    model: torch.nn.Module,
    shapes: Mapping[str, list[int]],
    frozen: Callable[[str], bool],
    config: Path,
) -> dict[str, str | None]:
    """The trained tensor that fills each of the model's; None where the base's own does.

    Raises:
        PipelineError: naming the first tensor that the model or the training lacks, or whose shape
            differs between them.
    """
    held = model.state_dict(keep_vars=True)
    trained = {id(held[name]): name for name in shapes if name in held}
    # Tied weights are one parameter under several names, of which training knows one.
    found = {n: n if n in shapes else trained.get(id(tensor)) for n, tensor in held.items()}
    for name in sorted(held.keys() | shapes.keys()):
        buffer = name in held and not isinstance(held[name], torch.nn.Parameter)
        source = found.get(name, name)
        if source is None and (buffer or frozen(name)):
            continue
        expected = tuple(held[name].shape) if name in held else "absent"
        given = tuple(shapes[source]) if source is not None and source in shapes else "absent"
        if expected != given:
            raise PipelineError(
                f"{name}: {given} in the trained tensors, {expected} by {config}",
                hint="export the weights with the base model that the training started from",
            )
    return found


class ModelTensors:
    """The tensors to write, each by one of the denoiser's own names."""

    def __init__(
        self,
        folder: Path,
        sources: Mapping[str, str | None],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self._sources = sources
        self._read = read
        kept = None in sources.values()
        self._base = open_tensors(sorted(folder.glob("*.safetensors"))) if kept else {}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name."""
        source = self._sources[name]
        found: torch.Tensor = (
            self._base[name].get_tensor(name) if source is None else self._read(source)
        )
        return found
