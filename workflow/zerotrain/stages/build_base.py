"""build_base: the base model, built from a preset or taken from a folder or hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from zerotrain import artifact
from zerotrain.artifact import file_sha256, read_shard_names, write_json
from zerotrain.artifact.documents import read_object
from zerotrain.artifact.recipe import Recipe
from zerotrain.artifact.verdicts import remembering
from zerotrain.config.stage_settings import BuildSettings
from zerotrain.config.suggestions import join_first
from zerotrain.data.buckets import bucket_sizes, crop_and_resize
from zerotrain.data.conversation import Conversations, read_conversations
from zerotrain.data.dataset import Dataset, Sample, read_dataset
from zerotrain.data.open import open_source
from zerotrain.data.source import Source
from zerotrain.errors import PipelineError
from zerotrain.models.base import KIND, MODEL_INDEX, check_config, check_model_index, part_digests
from zerotrain.models.base_places import base_files, find_single_file
from zerotrain.models.families import Family, load_family
from zerotrain.models.hub import PUBLISHED, check_no_revision

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.models.families.autoencoders import FittedAutoencoders

AUTOENCODERS = "autoencoders"
"""Folder next to a dataset's manifest, with the fits of its presets."""
EPSILON = "epsilon"
"""The default prediction type of a noise scheduler."""


def build_base(
    settings: BuildSettings, dataset: Path | None, output: Path, recipe: Recipe | None = None
) -> None:
    """Publish the base model.

    A preset is built from the run's seed and the dataset, whose folder keeps the fitted autoencoder
    for other runs. For a folder or hub snapshot, the needed files are taken as `base_copy` says,
    by default as links; a file in a single-file layout, or a language model whose tensors have
    other names than in its class, is rewritten.

    Args:
        settings: What the stage reads of the configuration.
        dataset: Folder of the dataset, which a preset is built for; a real model needs none.
        output: Folder to publish.
        recipe: What the folder records of what it is made from.

    Raises:
        PipelineError: the base does not exist, is not whole, is of another family, or has a noise
            schedule that the configuration cannot change like this.
    """
    family = load_family(settings.family)
    samples = _dataset(settings, dataset)
    parents = {"dataset": samples.artifact} if samples else {}
    sha256 = remembering(file_sha256)  # linked files were hashed when they were checked
    with artifact.publish(output, KIND, parents=parents, recipe=recipe) as draft:
        commit = None
        if samples:
            check_no_revision(settings.base, settings.revision)
            _build_preset(settings, samples, draft.folder)
        else:
            commit = _link(settings, family, draft.folder)
            if settings.vae == "identity" and family.modality == "image":
                family.replace_autoencoder(draft.folder)
        _change_schedule(settings, draft.folder)
        files = sorted(path for path in draft.folder.rglob("*") if path.is_file())
        draft.known = {path.relative_to(draft.folder).as_posix(): sha256(path) for path in files}
        draft.content = {
            "family": family.name,
            "base": settings.base,
            "revision": settings.revision,
            "commit": commit,
            "parts": part_digests(draft.known),
        }
        if (file := find_single_file(settings.base)) is not None:
            draft.content["file_sha256"] = sha256(file)


class Crops(Sequence["Image"]):
    """The square crops of samples, opened on access."""

    def __init__(self, source: Source, samples: Sequence[Sample], resolution: int) -> None:
        self._source = source
        self._samples = samples
        self.resolution = resolution

    def digest(self) -> str:
        """Return the digest of everything that the pixels and their order depend on."""
        cut = [(sample.image_sha256, sample.crop, sample.background) for sample in self._samples]
        return artifact.digest([cut, self.resolution])

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Image: ...

    @overload
    def __getitem__(self, index: slice) -> Crops: ...

    def __getitem__(self, index: int | slice) -> Image | Crops:
        if isinstance(index, slice):
            return Crops(self._source, self._samples[index], self.resolution)
        sample = self._samples[index]
        image = self._source.image_of(sample.file, sample.image_sha256, sample.background)
        return crop_and_resize(image, sample.crop, self.resolution)


def _dataset(settings: BuildSettings, folder: Path | None) -> Dataset | Conversations | None:
    """Return the dataset that a preset is built for; None for a real model."""
    if not settings.is_preset:
        return None
    if folder is None:
        raise PipelineError(
            f"base: the preset {settings.base} is built for a dataset, and none was named",
            hint="add --dataset FOLDER",
        )
    return (read_conversations if settings.is_text else read_dataset)(folder)


def _build_preset(settings: BuildSettings, dataset: Dataset | Conversations, folder: Path) -> None:
    import torch

    torch.set_num_threads(settings.num_cpu_threads_per_process or os.cpu_count() or 1)
    family = load_family(settings.family)
    assert settings.seed is not None
    assert settings.resolution is not None
    if isinstance(dataset, Conversations):
        assert family.modality == "text"
        family.build_preset(settings.base, dataset, settings.seed, folder)
        return
    assert family.modality == "image"
    crops = Crops(open_source(settings.data), dataset.split("train"), settings.resolution)
    family.build_preset(
        settings.base,
        dataset,
        crops,
        settings.seed,
        folder,
        identity=settings.vae == "identity",
        conditioned=dataset.conditioning_images > 0,
        longest=_longest_side(settings),
        store=_store(dataset, crops),
    )


def _longest_side(settings: BuildSettings) -> int | None:
    """Return the longest side of a bucket in pixels; None for squares."""
    buckets, side = settings.data.aspect_buckets, settings.resolution
    if buckets is None or side is None:
        return None
    return max(max(size) for size in bucket_sizes(side, buckets))


def _store(dataset: Dataset, crops: Crops) -> FittedAutoencoders | None:
    """Return the fitted autoencoders next to the dataset; None if its folder is read-only."""
    from zerotrain.models.families.autoencoders import FittedAutoencoders

    folder = dataset.artifact.folder
    if not os.access(folder, os.W_OK):
        return None
    return FittedAutoencoders(folder / AUTOENCODERS, crops.digest(), crops.resolution)


def _change_schedule(settings: BuildSettings, folder: Path) -> None:
    """Write the run's own prediction type and schedule into the noise scheduler.

    Training, sampling and programs that load the weights read them there.
    """
    changed: dict[str, Any] = {}
    if settings.prediction_type:
        changed["prediction_type"] = settings.prediction_type
    if settings.rescale_betas_zero_snr:
        # Sampling has to start at the last timestep, the one without signal.
        changed |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    if changed:
        path = folder / "scheduler" / "scheduler_config.json"
        found = read_object(path, follow_links=True) | changed
        if settings.rescale_betas_zero_snr and found.get("prediction_type", EPSILON) == EPSILON:
            raise PipelineError(
                f"rescale_betas_zero_snr: the base {settings.base} predicts epsilon, of which "
                "nothing can be learned at the last timestep, where noise alone is left",
                hint="set prediction_type: v_prediction, or remove rescale_betas_zero_snr",
            )
        path.unlink()  # it may be a link to the base
        write_json(path, found)


def _take(source: Path, target: Path, how: str) -> None:
    """Put a file of the base into the draft, as a link or as this project's own copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if how == "link":
        target.symlink_to(source)
    elif artifact.is_own(source):
        artifact.link_or_copy(source, target)
    else:
        artifact.copy_new(source, target, only_share=how == "reflink")


def _link(settings: BuildSettings, family: Family, target: Path) -> str | None:
    """Take the files that the family needs into the draft; return a hub repository's commit."""
    files = base_files(settings.base, settings.revision, family.spec)
    for place, wanted in files.places:
        folder = place.fetch(wanted.values())
        if artifact.is_published(folder):
            published = artifact.read(folder, PUBLISHED, verify=False)
            published.verify(remembering(file_sha256), wanted.values())
        for name, file in wanted.items():
            _take((folder / file).resolve(), target / name, settings.base_copy)
            if name.endswith(".index.json"):
                read_shard_names(folder / file)
    if files.others:
        print(f"{files.source}: not part of the model, not taken: {join_first(files.others)}")
    if family.modality == "text":
        check_config(target / "config.json", family.spec, files.source)
        family.store_by_own_names(target, files.source)
    else:
        index: Any = check_model_index(target / MODEL_INDEX, family.spec, files.source)
        (target / MODEL_INDEX).unlink()
        write_json(target / MODEL_INDEX, index)
        if files.single_file is not None:
            # Not at the top: it imports diffusers' converters, which take two seconds.
            from zerotrain.export.formats.original_base import write_parts

            write_parts(files.single_file, family, target)
    commits = {place.commit for place, _ in files.places}
    return commits.pop() if len(commits) == 1 else None
