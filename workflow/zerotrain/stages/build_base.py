"""build_base: the base model, built from a preset or taken from a folder or hub."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from zerotrain import artifact
from zerotrain.artifact import file_sha256, read_shard_names, write_json
from zerotrain.artifact.verdicts import remembering
from zerotrain.base import (
    KIND,
    MODEL_INDEX,
    check_config,
    check_model_index,
    part_digests,
    some,
)
from zerotrain.base_places import base_files
from zerotrain.config import RunConfig
from zerotrain.data.conversation import Conversations, read_conversations
from zerotrain.data.crop import crop_and_resize
from zerotrain.data.dataset import Dataset, Sample, read_dataset
from zerotrain.data.source import Source, open_source
from zerotrain.errors import PipelineError
from zerotrain.families import ImageFamily, TextFamily, load_family
from zerotrain.model_place import PUBLISHED, refuse_revision

if TYPE_CHECKING:
    from PIL.Image import Image

EPSILON = "epsilon"
"""What a noise scheduler predicts that does not say it."""


def build_base(config: RunConfig, dataset: Path | None, output: Path) -> None:
    """Publish the base model.

    A preset is built from the run's seed and the dataset; of folders or hub snapshots the needed
    files are linked, so nothing is copied but a language model under other names than its class's.

    Args:
        config: The run's configuration (family, base, revision, vae, prediction_type,
            rescale_betas_zero_snr; of a preset also seed, data, launch and first resolution).
        dataset: Folder of the dataset, which a preset is built for; a real model needs none.
        output: Folder to publish.

    Raises:
        PipelineError: the base is not there, not whole, of another family, or of a noise schedule
            that the configuration cannot change so.
    """
    family = load_family(config.family)
    samples = _dataset(config, dataset)
    parents = {"dataset": samples.artifact} if samples else {}
    sha256 = remembering(file_sha256)  # what is linked in was hashed when it was checked
    with artifact.publish(output, KIND, parents=parents) as draft:
        commit = None
        if samples:
            refuse_revision(config.base, config.revision)
            _build_preset(config, samples, draft.folder)
        else:
            commit = _link(config, family, draft.folder)
            if config.vae == "identity" and family.modality == "image":
                family.replace_autoencoder(draft.folder)
        _change_schedule(config, draft.folder)
        files = sorted(path for path in draft.folder.rglob("*") if path.is_file())
        draft.known = {path.relative_to(draft.folder).as_posix(): sha256(path) for path in files}
        draft.content = {
            "family": family.name,
            "base": config.base,
            "revision": config.revision,
            "commit": commit,
            "parts": part_digests(draft.known),
        }


class Crops(Sequence["Image"]):
    """The square crops of samples, opened when they are asked for."""

    def __init__(self, source: Source, samples: Sequence[Sample], resolution: int) -> None:
        self._source = source
        self._samples = samples
        self._resolution = resolution

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Image: ...

    @overload
    def __getitem__(self, index: slice) -> Crops: ...

    def __getitem__(self, index: int | slice) -> Image | Crops:
        if isinstance(index, slice):
            return Crops(self._source, self._samples[index], self._resolution)
        sample = self._samples[index]
        image = self._source.image_of(sample.file, sample.image_sha256)
        return crop_and_resize(image, sample.crop, self._resolution)


def _dataset(config: RunConfig, folder: Path | None) -> Dataset | Conversations | None:
    """The dataset that a preset is built for; None for a real model."""
    if not config.is_preset:
        return None
    if folder is None:
        raise PipelineError(
            f"base: the preset {config.base} is built for a dataset, and none was named",
            hint="add --dataset FOLDER",
        )
    return (read_conversations if config.is_text else read_dataset)(folder)


def _build_preset(config: RunConfig, dataset: Dataset | Conversations, folder: Path) -> None:
    import torch

    torch.set_num_threads(config.launch.num_cpu_threads_per_process or os.cpu_count() or 1)
    family = load_family(config.family)
    if isinstance(dataset, Conversations):
        assert family.modality == "text"
        family.build_preset(config.base, dataset, config.seed, folder)
        return
    assert family.modality == "image"
    crops = Crops(
        open_source(config.data), dataset.split("train"), config.phases[0].train.resolution
    )
    family.build_preset(
        config.base, dataset, crops, config.seed, folder, identity=config.vae == "identity"
    )


def _change_schedule(config: RunConfig, folder: Path) -> None:
    """Write the run's own prediction type into the noise scheduler: training, sampling and whoever
    loads the weights read it there."""
    changed: dict[str, Any] = {}
    if config.prediction_type:
        changed["prediction_type"] = config.prediction_type
    if config.rescale_betas_zero_snr:
        # Sampling has to begin at the last timestep, the one without signal.
        changed |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    if changed:
        path = folder / "scheduler" / "scheduler_config.json"
        found = json.loads(path.read_text()) | changed
        if config.rescale_betas_zero_snr and found.get("prediction_type", EPSILON) == EPSILON:
            raise PipelineError(
                f"rescale_betas_zero_snr: the base {config.base} predicts epsilon, of which "
                "nothing can be learned at the last timestep, where noise alone is left",
                hint="set prediction_type: v_prediction, or remove rescale_betas_zero_snr",
            )
        path.unlink()  # it may be a link to the base
        write_json(path, found)


def _link(config: RunConfig, family: ImageFamily | TextFamily, target: Path) -> str | None:
    """Link the files that the family needs into the draft; the commit, of a hub repository."""
    files = base_files(config, family)
    for place, wanted in files.places:
        folder = place.fetch(wanted.values())
        if artifact.is_published(folder):
            published = artifact.read(folder, PUBLISHED, verify=False)
            published.verify(remembering(file_sha256), wanted.values())
        for name, file in wanted.items():
            link = target / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((folder / file).resolve())
            if name.endswith(".index.json"):
                read_shard_names(folder / file)
    if files.others:
        print(f"{files.source}: not part of the model, not taken: {some(files.others)}")
    if family.modality == "text":
        from zerotrain.families.model_tensors import store_by_own_names

        check_config(target / "config.json", family, files.source)
        store_by_own_names(family, target, files.source)
    else:
        index: Any = check_model_index(target / MODEL_INDEX, family, files.source)
        (target / MODEL_INDEX).unlink()
        write_json(target / MODEL_INDEX, index)
    commits = {place.commit for place, _ in files.places}
    return commits.pop() if len(commits) == 1 else None
