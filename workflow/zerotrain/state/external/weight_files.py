"""The weight files of a model in another program's folder: one file, or shards with an index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from zerotrain.artifact import read_shard_names
from zerotrain.artifact.documents import read_weight_map
from zerotrain.errors import PipelineError
from zerotrain.state.external import adapter_files
from zerotrain.state.state import Shards

STEMS = ("model", "pytorch_model", "diffusion_pytorch_model", *adapter_files.STEMS, "lora")
DENOISERS = ("unet", "transformer")
"""Parts of a whole model that are trained, and come before its encoders."""


class SafeTensors(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name, each mapped from its file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._shards = Shards()
        self._file: dict[str, Path] = {}
        self.header: dict[str, str] = {}
        """Metadata of the files."""
        for path in paths:
            opened = self._shards.file(path)
            self._file.update(dict.fromkeys(opened.keys(), path))
            self.header.update(opened.metadata() or {})

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._shards.tensor(self._file[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)

    def names_in(self, path: Path) -> list[str]:
        """Return the tensors of one of the files."""
        return [name for name, file in self._file.items() if file == path]


def find_weights(folder: Path) -> tuple[list[Path], list[str]]:
    """Find the files of the model's weights, and list the omitted models.

    The root comes first, then diffusers folders, except for EMA weights (`*_ema`).
    """
    parts = [p for p in folder.iterdir() if p.is_dir() and not p.name.endswith("_ema")]
    parts.sort(key=lambda part: (part.name not in DENOISERS, part.name))
    candidates = [files for part in (folder, *parts) if (files := _weights_in(part))]
    others = [str(files[0].relative_to(folder)) for files in candidates[1:]]
    others += sorted(p.name for p in folder.glob("model_[0-9]*.safetensors"))
    lost = [f"{other}: a second model; only the first is read" for other in others]
    lost += [f"{p.name}: averaged weights" for p in sorted(folder.glob("*_ema")) if p.is_dir()]
    lost += [f"{name}: averaged weights" for name in ("ema/ema.pt",) if (folder / name).is_file()]
    return (candidates[0] if candidates else []), lost


def _weights_in(folder: Path) -> list[Path]:
    for stem in STEMS:
        for suffix in ("safetensors", "bin"):
            index = folder / f"{stem}.{suffix}.index.json"
            if index.is_file():
                return [folder / name for name in read_shard_names(index)]
            if (folder / f"{stem}.{suffix}").is_file():
                return [folder / f"{stem}.{suffix}"]
    return []


def check_shards(paths: Sequence[Path], names_in: Callable[[Path], Iterable[str]]) -> None:
    """Check that each shard has the tensors that the index lists for it."""
    for index in paths[0].parent.glob("*.index.json"):
        if [path.name for path in paths] != read_shard_names(index):
            continue
        weight_map = read_weight_map(index)
        for path in paths:
            expected = {name for name, file in weight_map.items() if file == path.name}
            if differing := expected.symmetric_difference(names_in(path)):
                raise PipelineError(
                    f"{path}: {min(differing)} is in this file or in {index.name} alone",
                    hint="the shards are of several checkpoints, or exchanged; copy them again",
                )
