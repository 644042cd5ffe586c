"""The base class of all families: one part of a base is trained and saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.config.families import FamilySpec
from zerotrain.models.families import adapters
from zerotrain.models.families.model_tensors import ModelTensors, tensor_sources, write_model

if TYPE_CHECKING:
    import torch

    from zerotrain.models.families import Objective

CONFIG = "config.json"


class ModelFamily(ABC):
    """A kind of model.

    Args:
        spec: What is asked of it without torch.
    """

    weights_name: str
    """Name of the trained part's weight files, without number and suffix."""

    def __init__(self, spec: FamilySpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.trained_part = spec.trained_part

    @abstractmethod
    def load_model(self, base: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Load the trained part on CPU, in float32 if no type is given."""

    @abstractmethod
    def empty_model(self, base: Path) -> torch.nn.Module:
        """Build the trained part without its weights: names, shapes and ties.

        Parameters are on the meta device. Buffers that no file holds are computed, on CPU; other
        buffers of a denoiser are on the meta device, too.
        """

    @abstractmethod
    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> Objective:
        """Build the training objective.

        Args:
            base: Folder of the base model, whose noise scheduler or config.json defines it.
            settings: The family's keys of config.objective. None, or only CONDITIONS, gives the
                plain loss, which evaluations compare.
        """

    @abstractmethod
    def write_config(self, config: Path, dtype: torch.dtype, folder: Path) -> dict[str, str]:
        """Write the trained part's config.json; for a part at the root, only if its type differs.

        Args:
            config: The base's config.json.
            dtype: Type of the weights.
            folder: Folder of the weights.

        Returns:
            Its sha256 by name, if it differs from the base's.
        """

    def load_trained(self, weights: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Load the trained part of a weights folder on CPU, with its adapter, in eval mode.

        The type is float32 if none is given.
        """
        return adapters.apply(self.load_model(weights, dtype).eval(), weights)

    def save_model(
        self,
        base: Path,
        shapes: Mapping[str, list[int]],
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        out: Path,
        *,
        frozen: Callable[[str], bool] = lambda name: False,
        max_shard_size: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Write the trained part in the library's own format into `out`/<trained_part>.

        For a part at the root, files without tensors are those of the base and are not written,
        except for a config.json that names another type.

        Args:
            base: Folder of the base model.
            shapes: Shape of each trained tensor.
            read: Returns a trained tensor when it is written; only one is held.
            dtype: Type to write.
            out: Folder to write into.
            frozen: Returns whether a name was not trained: it is taken from the base, like buffers.
            max_shard_size: Larger files are split into shards, with an index; 10GB by default.
            metadata: Further entries of the files' headers.

        Returns:
            sha256 of each written file, by its name relative to `out`.

        Raises:
            PipelineError: names or shapes are not those of the base; nothing is written.
        """
        part, folder = base / self.trained_part, out / self.trained_part
        model = self.empty_model(base)
        tensors = ModelTensors(part, tensor_sources(model, shapes, frozen, part / CONFIG), read)
        folder.mkdir(parents=True, exist_ok=True)
        written = write_model(
            model, tensors.tensor, dtype, folder, self.weights_name,
            max_shard_size=max_shard_size, metadata=metadata,
        )  # fmt: skip
        written |= self.write_config(part / CONFIG, dtype, folder)
        return {(folder / file).relative_to(out).as_posix(): sha for file, sha in written.items()}
