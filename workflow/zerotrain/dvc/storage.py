"""What DVC stores: its repository opened, and files brought back from its cache and remote."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from dvc.repo import Repo


@contextlib.contextmanager
def open_repo() -> Iterator[Repo]:
    """DVC's repository of the project that one stands in.

    Raises:
        PipelineError: DVC is not installed or not set up, or says itself what is wrong.
    """
    if importlib.util.find_spec("dvc") is None:
        raise PipelineError(
            "DVC is not installed, and it alone knows where stored files lie",
            hint="`make setup` installs it into .venv, `pip install dvc` elsewhere",
        )
    if not Path(".dvc").is_dir():
        raise PipelineError(
            f"{Path.cwd()}: no .dvc folder here",
            hint="call it from the project's top folder; where DVC was never set up: `dvc init`",
        )
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    # Its warnings list every object; what is missing is told here in the names of files.
    logging.getLogger("dvc").setLevel(logging.CRITICAL)
    try:
        with Repo() as repo:
            yield repo
    except DvcException as error:
        raise PipelineError(
            f"DVC: {error}", hint="mend that and call it again; `dvc doctor` shows DVC's set-up"
        ) from error


def bring(repo: Repo, *, force: bool) -> list[str]:
    """Bring back what dvc.lock and the .dvc files name: from the cache, else from the remote.

    Nothing here is touched before all of it is in the cache.

    Args:
        repo: DVC's repository.
        force: Replace files that lie here and were never stored.

    Returns:
        Paths that were added or changed.

    Raises:
        PipelineError: there is no remote, it lacks objects, or files would be lost.
    """
    from dvc.exceptions import DvcException

    outs = [out for out in repo.index.outs if out.hash_info]
    targets = sorted({out.stage.addressing for out in outs if out.use_cache})
    if not targets:
        return []
    if _missing(repo, outs):
        _fetch(repo, targets, outs)
    try:
        done = repo.checkout(targets=targets, force=force)
    except DvcException as error:
        if "unsaved" not in str(error):
            raise
        lost = [str(Path(line).relative_to(repo.root_dir)) for line in str(error).split("\n")[1:]]
        raise PipelineError(
            f"{some(lost)}: would be replaced, and DVC has not stored what lies here",
            hint="move it away, or `dvc commit` it; to let it go: `zerotrain restore --force`",
        ) from error
    return sorted({*done["added"], *done["modified"]})


def some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _missing(repo: Repo, outs: list[Any]) -> list[str]:
    """Outputs that neither lie here as they were stored nor can be made from the cache."""
    from dvc.output import CollectCacheError

    missing = []
    for out in outs:
        if not out.use_cache or not out.workspace_status():
            continue
        try:
            whole = all(
                (odb or out.cache).exists(one.value)
                for odb, objects in out.get_used_objs().items()
                for one in objects
            )
        except CollectCacheError:
            whole = False
        if not whole:
            missing.append(str(out))
    return missing


def _fetch(repo: Repo, targets: list[str], outs: list[Any]) -> None:
    name = repo.config["core"].get("remote")
    if name is None:
        raise PipelineError(
            f"{some(_missing(repo, outs))}: not in DVC's cache, and no remote is set to fetch from",
            hint="`dvc remote add --default NAME URL`, as where they were pushed from; or make "
            "them anew: `make train`",
        )
    why = ""
    try:
        repo.fetch(targets)
    except Exception as error:  # of any remote's own library
        why = f" ({error})"
    if missing := _missing(repo, outs):
        url = repo.config["remote"].get(name, {}).get("url", "?")
        raise PipelineError(
            f"{some(missing)}: not wholly on the remote {name} at {url}{why}",
            hint="`dvc push` where they were made, and look at `dvc remote list` here; `snakemake "
            "--cores all train` makes anew what is missing",
        )
