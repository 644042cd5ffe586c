"""The autoencoder of a small model, fitted once and shared by the runs of a dataset.

It depends on the images, their order and crops, the resolution, the seed, the threads and the code,
but not on captions: a run with other captions, or of another family with the same autoencoder, uses
the stored one. The state of torch's generator after the fit is stored, too, since the models that
are built next draw from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file, save_file

from zerotrain import artifact
from zerotrain.artifact import MANIFEST, Artifact, digest
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.errors import PipelineError
from zerotrain.machine.file_lock import one_at_a_time

KIND = "autoencoder"
FILE = "fitted.safetensors"
PARAMETERS = "autoencoder."
GENERATOR = "generator"


@dataclass(frozen=True)
class FittedAutoencoders:
    """The fitted autoencoders of a dataset."""

    folder: Path
    """Folder with one for each class, resolution and seed."""
    pixels: str
    """Digest of everything that the pixels of the fit depend on."""
    resolution: int

    def load_or_fit(
        self, autoencoder: Any, seed: int, fit: Callable[[], tuple[float, float]]
    ) -> tuple[float, float]:
        """Load the stored parameters into `autoencoder`, or fit it and store them.

        Either way the parameters and torch's generator are bit for bit those after `fit`. Processes
        that need the same one at the same time wait for the first.

        Args:
            autoencoder: The autoencoder, initialised from its seed.
            seed: The seed; torch's generator depends only on it.
            fit: Fits `autoencoder`.

        Returns:
            What `fit` returns: the latents' mean and standard deviation.
        """
        name = type(autoencoder).__name__
        target = self.folder / f"{name}-{self.resolution}px-seed{seed}"
        config = {key: v for key, v in autoencoder.config.items() if not key.startswith("_")}
        versions = [torch.__version__, diffusers.__version__]
        key = digest(
            [
                *(name, config, self.pixels, self.resolution, seed),
                *(torch.get_num_threads(), versions, VERSIONS["build_base"]),
            ]
        )
        with one_at_a_time(self.folder / f".{target.name}.lock"):
            if stored := _read(target, key):
                print(f"the autoencoder was fitted to these images before: {target}")
                tensors = load_file(stored.path(FILE))
                torch.random.set_rng_state(tensors.pop(GENERATOR))
                autoencoder.load_state_dict(
                    {name.removeprefix(PARAMETERS): value for name, value in tensors.items()}
                )
                autoencoder.eval()
                return stored.content["mean"], stored.content["std"]
            mean, std = fit()
            with artifact.publish(target, KIND, made_by={"stage": "build_base"}) as draft:
                tensors = {
                    PARAMETERS + name: value.detach().contiguous()
                    for name, value in autoencoder.state_dict().items()
                }
                generator = torch.random.get_rng_state()
                save_file({**tensors, GENERATOR: generator}, draft.folder / FILE)
                draft.content = {"key": key, "mean": mean, "std": std}
        return mean, std


def _read(folder: Path, key: str) -> Artifact | None:
    """Read the published fit with this key; return None if it is missing or damaged."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        found = artifact.read(folder, KIND)
    except PipelineError as error:
        print(f"WARNING: {error.what}; the autoencoder is fitted again")
        return None
    return found if found.content["key"] == key else None
