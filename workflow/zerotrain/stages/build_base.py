"""build_base: the base model, built from a preset or taken from a folder or hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from zerotrain import artifact
from zerotrain.artifact import file_sha256, write_json
from zerotrain.base import (
    KIND,
    MODEL_INDEX,
    check_config,
    check_model_index,
    choose_files,
    part_digests,
)
from zerotrain.config import RunConfig
from zerotrain.data.conversation import Conversations, read_conversations
from zerotrain.data.crop import crop_and_resize
from zerotrain.data.dataset import Dataset, Sample, read_dataset
from zerotrain.data.source import Source, open_source
from zerotrain.errors import PipelineError
from zerotrain.families import LANGUAGE_MODELS, ROOT, Family, load_family

if TYPE_CHECKING:
    from PIL.Image import Image

PRESETS = ("nano",)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def build_base(config: RunConfig, dataset: Path | None, output: Path) -> None:
    """Publish the base model.

    A preset is built from the run's seed and the dataset; of a folder or a hub snapshot the needed
    files are linked, so nothing is copied.

    Args:
        config: The run's configuration (family, base, revision, vae, seed).
        dataset: Folder of the dataset, which a preset is built for; a real model needs none.
        output: Folder to publish.

    Raises:
        PipelineError: the base is not there, not whole, or of another family.
    """
    family = load_family(config.family)
    samples = _dataset(config, dataset)
    parents = {"dataset": samples.artifact} if samples else {}
    with artifact.publish(output, KIND, parents=parents) as draft:
        commit = None
        if samples:
            _refuse_revision(config)
            _build_preset(config, samples, draft.folder)
        else:
            folder, commit = _find(config, family)
            _link(folder, family, config.base, draft.folder)
            if config.vae == "identity" and family.modality == "image":
                family.replace_autoencoder(draft.folder)
        _change_schedule(config, draft.folder)
        files = sorted(path for path in draft.folder.rglob("*") if path.is_file())
        draft.known = {
            path.relative_to(draft.folder).as_posix(): file_sha256(path) for path in files
        }
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
    if config.base not in PRESETS:
        return None
    if folder is None:
        raise PipelineError(
            f"base: the preset {config.base} is built for a dataset, and none was named",
            hint="add --dataset FOLDER",
        )
    return (read_conversations if config.family in LANGUAGE_MODELS else read_dataset)(folder)


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
        known = json.loads(path.read_text())
        path.unlink()  # it may be a link to the base
        write_json(path, known | changed)


def _refuse_revision(config: RunConfig) -> None:
    if config.revision is not None:
        raise PipelineError(
            f"revision: {config.revision!r} is set, but base {config.base!r} is no hub id",
            hint="remove `revision`, or set `base` to a hub id",
        )


def _find(config: RunConfig, family: Family) -> tuple[Path, str | None]:
    """The folder that holds the base model and, from a hub, its commit."""
    folder = Path(config.base).expanduser()
    if folder.is_dir():
        _refuse_revision(config)
        return folder, None
    if folder.is_file():
        raise PipelineError(
            f"base: {config.base} is a file, not a folder in diffusers' layout",
            hint="convert it once with diffusers' "
            "StableDiffusionXLPipeline.from_single_file(FILE).save_pretrained(DIR), "
            "then set `base` to DIR",
        )
    if not HUB_ID.fullmatch(config.base):
        raise PipelineError(
            f"base: there is no folder {config.base}",
            hint="set `base` to a folder, a hub id (OWNER/NAME) or a preset: " + ", ".join(PRESETS),
        )
    return _download(config.base, config.revision, family)


def _download(base: str, revision: str | None, family: Family) -> tuple[Path, str]:
    """Download the needed files of a hub repository, or take them from the hub's local cache."""
    from huggingface_hub import HfApi, snapshot_download

    # HTTPError is that of whichever HTTP client the hub's own uses.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{base}@{revision}" if revision else base
    try:
        info = HfApi().model_info(base, revision=revision)
        names = [file.rfilename for file in info.siblings or []]
        needed = sorted(choose_files(names, family, f"hub model {at}").values())
        folder = snapshot_download(base, revision=info.sha, allow_patterns=needed)
        return Path(folder), str(info.sha)
    except GatedRepoError as error:
        raise PipelineError(
            f"base: the hub model {at} asks you to accept its licence first",
            hint=f"accept it at https://huggingface.co/{base}, then run `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise PipelineError(
            f"base: the hub model {base} has no revision {revision!r}",
            hint="check `revision`: a branch, tag or commit of the model",
        ) from error
    except RepositoryNotFoundError as error:
        raise PipelineError(
            f"base: there is no folder {base}, and no hub model of that name that you may read",
            hint="check the spelling; for a private model run `hf auth login`",
        ) from error
    except (HTTPError, ConnectionError, TimeoutError, LocalEntryNotFoundError) as error:
        try:
            folder = snapshot_download(base, revision=revision, local_files_only=True)
        except LocalEntryNotFoundError:
            raise PipelineError(
                f"base: there is no folder {base}, the hub cannot be reached "
                f"({str(error).splitlines()[0]}), and its local cache does not hold {at}",
                hint="check the network or HF_ENDPOINT, or download the model elsewhere "
                "(`hf download`) and set `base` to its folder",
            ) from error
        return Path(folder), Path(folder).name


def _link(folder: Path, family: Family, base: str, target: Path) -> None:
    """Link the needed files of a model's folder into the draft."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    for name, file in choose_files(names, family, base).items():
        link = target / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to((folder / file).resolve())
    if family.trained_part == ROOT:
        check_config(folder / "config.json", family, base)
        return
    index: Any = check_model_index(folder / MODEL_INDEX, family, base)
    (target / MODEL_INDEX).unlink()
    write_json(target / MODEL_INDEX, index)
