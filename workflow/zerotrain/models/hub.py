"""The location of a model: a folder, or a hub repository whose files are downloaded as needed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zerotrain import artifact
from zerotrain.config.families import PRESETS
from zerotrain.config.suggestions import after_question
from zerotrain.errors import PipelineError

PUBLISHED = ("weights", "base")
"""Kinds of artifacts that are whole models."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelLocation:
    """A folder or hub repository.

    Attributes:
        name: Its name in messages.
        names: All its files, with forward slashes.
        folder: The folder, or the cached snapshot of a repository that cannot be reached.
        repo: Id of a repository that can be reached.
        commit: Commit of a repository.
    """

    name: str
    names: tuple[str, ...]
    folder: Path | None = None
    repo: str | None = None
    commit: str | None = None

    def fetch(self, names: Iterable[str], revision: str | None = None) -> Path:
        """Return a folder with these files; from a repository, only these are downloaded.

        Args:
            names: Names of its files.
            revision: Branch or tag under which the cache is to find the files without the hub;
                it finds files that were downloaded by commit only under that commit.
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
        """Return the bytes of each of these files of a repository that must be downloaded."""
        from huggingface_hub import snapshot_download

        assert self.repo is not None
        with _refusals(self.repo, self.commit):
            files = snapshot_download(
                self.repo, revision=revision, allow_patterns=sorted(names), dry_run=True
            )
        return {one.filename: one.file_size or 0 for one in files if one.will_download}


def open_location(base: str, revision: str | None) -> ModelLocation:
    """Open a folder or a hub repository.

    Raises:
        PipelineError: it does not exist, cannot be reached, or has no such revision.
    """
    folder = Path(base).expanduser()
    if folder.is_dir():
        check_no_revision(base, revision)
        return _folder(base, folder)
    if folder.is_file():
        raise PipelineError(
            f"base: {base} is a file, not a folder in diffusers' layout",
            hint="of parts from several places name the folder and a pattern of its files",
        )
    if not HUB_ID.fullmatch(base):
        raise PipelineError(
            f"base: there is no folder {base}",
            hint=after_question(
                base,
                PRESETS,
                f"set `base` to a folder, a hub id (OWNER/NAME) or a preset: {', '.join(PRESETS)}",
            ),
        )
    return _repository(base, revision)


def check_no_revision(base: str, revision: str | None) -> None:
    """Check that no revision is set for a base that has none."""
    if revision is not None:
        raise PipelineError(
            f"revision: {revision!r} is set, but base {base!r} is not a hub id",
            hint="remove `revision`, or set `base` to a hub id",
        )


def _folder(name: str, folder: Path, commit: str | None = None) -> ModelLocation:
    artifact.check_published(folder)
    if artifact.is_described(folder):  # a missing file would make it another model
        published = artifact.read(folder, PUBLISHED, verify=False)
        return ModelLocation(name, tuple(sorted(published.files)), folder=folder, commit=commit)
    files = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    return ModelLocation(name, tuple(names), folder=folder, commit=commit)


def _repository(repo: str, revision: str | None) -> ModelLocation:
    """Open a hub repository, or its snapshot in the local cache if the hub cannot be reached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    at = f"hub model {repo}@{revision}" if revision else f"hub model {repo}"
    try:
        with _refusals(repo, revision):
            info = HfApi().model_info(repo, revision=revision)
    except UnreachableError:
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
            return _folder(at, folder, folder.name)
        raise
    names = sorted(file.rfilename for file in info.siblings or [])
    return ModelLocation(at, tuple(names), repo=repo, commit=str(info.sha))


class UnreachableError(PipelineError):
    """The error for a hub that does not answer."""


@contextlib.contextmanager
def _refusals(repo: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the hub's client into a PipelineError."""
    # HTTPError is the error of the HTTP client that huggingface_hub uses.
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
        raise UnreachableError(
            f"base: there is no folder {repo}, the hub cannot be reached "
            f"({str(error).splitlines()[0]}), and its local cache does not hold {at}",
            hint="on a node without internet run `zerotrain fetch CONFIG` on the login node and "
            "source its env.sh in jobs; else check the network or HF_ENDPOINT, or download the "
            "model on another machine (`hf download`) and set `base` to its folder",
        ) from error
