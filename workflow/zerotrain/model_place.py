"""Where a model lies: a folder, or a repository of the hub whose files are downloaded as needed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.families import PRESETS

PUBLISHED = ("weights", "base")
"""Kinds of folders of this program's that are whole models."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Place:
    """A folder or hub repository.

    Attributes:
        name: What messages call it.
        names: All its files, with forward slashes.
        folder: Of a folder, and of a repository that is in the hub's cache alone.
        repo: Of a repository that can be reached: its id.
        commit: Of a repository.
    """

    name: str
    names: tuple[str, ...]
    folder: Path | None = None
    repo: str | None = None
    commit: str | None = None

    def fetch(self, names: Iterable[str], revision: str | None = None) -> Path:
        """The folder that holds these files of it; of a repository, no others are downloaded.

        Args:
            names: Names of its files.
            revision: Branch or tag by which the files are to be found without the hub as well;
                the cache knows files that were downloaded by commit by that commit alone.
        """
        if self.folder is not None:
            return self.folder
        from huggingface_hub import snapshot_download

        assert self.repo is not None
        with _refusals(self.repo, self.commit):
            return Path(
                snapshot_download(
                    self.repo, revision=revision or self.commit, allow_patterns=sorted(names)
                )
            )

    def missing(self, names: Iterable[str], revision: str) -> dict[str, int]:
        """Bytes of each of these files of a repository that would have to be downloaded."""
        from huggingface_hub import snapshot_download

        assert self.repo is not None
        with _refusals(self.repo, self.commit):
            files = snapshot_download(
                self.repo, revision=revision, allow_patterns=sorted(names), dry_run=True
            )
        return {one.filename: one.file_size or 0 for one in files if one.will_download}


def open_place(base: str, revision: str | None) -> Place:
    """Open a folder or a hub repository.

    Raises:
        PipelineError: it is not there, cannot be reached, or has no such revision.
    """
    folder = Path(base).expanduser()
    if folder.is_dir():
        refuse_revision(base, revision)
        return _folder(base, folder)
    if folder.is_file():
        raise PipelineError(
            f"base: {base} is a file, not a folder in diffusers' layout",
            hint="convert it once with diffusers' from_single_file(FILE).save_pretrained(DIR) of "
            "its pipeline's class, such as StableDiffusionXLPipeline, then set `base` to DIR",
        )
    if not HUB_ID.fullmatch(base):
        raise PipelineError(
            f"base: there is no folder {base}",
            hint="set `base` to a folder, a hub id (OWNER/NAME) or a preset: " + ", ".join(PRESETS),
        )
    return _repository(base, revision)


def refuse_revision(base: str, revision: str | None) -> None:
    """Refuse a revision of what has none."""
    if revision is not None:
        raise PipelineError(
            f"revision: {revision!r} is set, but base {base!r} is no hub id",
            hint="remove `revision`, or set `base` to a hub id",
        )


def _folder(name: str, folder: Path, commit: str | None = None) -> Place:
    artifact.check_published(folder)
    if artifact.is_described(folder):  # without a file it would be another model
        published = artifact.read(folder, PUBLISHED, verify=False)
        return Place(name, tuple(sorted(published.files)), folder=folder, commit=commit)
    files = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    return Place(name, tuple(names), folder=folder, commit=commit)


def _repository(repo: str, revision: str | None) -> Place:
    """A hub repository; where the hub cannot be reached, what its local cache holds of it."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    at = f"hub model {repo}@{revision}" if revision else f"hub model {repo}"
    try:
        with _refusals(repo, revision):
            info = HfApi().model_info(repo, revision=revision)
    except Unreachable:
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
            return _folder(at, folder, folder.name)
        raise
    names = sorted(file.rfilename for file in info.siblings or [])
    return Place(at, tuple(names), repo=repo, commit=str(info.sha))


class Unreachable(PipelineError):
    """The hub does not answer."""


@contextlib.contextmanager
def _refusals(repo: str, revision: str | None) -> Iterator[None]:
    """Say in a sentence why the hub gives nothing."""
    # HTTPError is that of whichever HTTP client the hub's own uses.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repo}@{revision}" if revision else repo
    try:
        yield
    except GatedRepoError as error:
        raise PipelineError(
            f"base: the hub model {at} asks you to accept its licence first",
            hint=f"accept it at https://huggingface.co/{repo}, then run `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise PipelineError(
            f"base: the hub model {repo} has no revision {revision!r}",
            hint="check `revision`: a branch, tag or commit of the model",
        ) from error
    except RepositoryNotFoundError as error:
        raise PipelineError(
            f"base: there is no folder {repo}, and no hub model of that name that you may read",
            hint="check the spelling; for a private model run `hf auth login`",
        ) from error
    except (HTTPError, ConnectionError, TimeoutError, LocalEntryNotFoundError) as error:
        raise Unreachable(
            f"base: there is no folder {repo}, the hub cannot be reached "
            f"({str(error).splitlines()[0]}), and its local cache does not hold {at}",
            hint="on a node without internet run `zerotrain fetch CONFIG` on the login node and "
            "source its env.sh in jobs; else check the network or HF_ENDPOINT, or download the "
            "model elsewhere (`hf download`) and set `base` to its folder",
        ) from error
