"""What DVC stores: its repository opened, and files brought back from its cache and remote."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.disk_errors import check_room, explain
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from dvc.repo import Repo


def refuse_without_dvc() -> None:
    """Refuse where nothing can be asked of DVC.

    Raises:
        PipelineError: it is not installed or not set up, or this is not the project's top folder.
    """
    if importlib.util.find_spec("dvc") is None:
        raise PipelineError(
            "DVC is not installed, and it alone knows where stored files lie",
            hint="`make setup` installs it into .venv, `pip install dvc` elsewhere",
        )
    if not Path(".dvc").is_dir():
        tops = [folder for folder in Path.cwd().parents if (folder / ".dvc").is_dir()]
        raise PipelineError(
            f"{Path.cwd()}: no .dvc folder here",
            hint=f"call it from the project's top folder: `cd {shlex.quote(str(tops[0]))}`"
            if tops
            else "call it from the project's top folder; where DVC was never set up: `dvc init`",
        )


@contextlib.contextmanager
def open_repo() -> Iterator[Repo]:
    """DVC's repository of the project that one stands in.

    Raises:
        PipelineError: DVC is not installed or not set up, or says itself what is wrong.
    """
    refuse_without_dvc()
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    # Its warnings list every object; what is missing is told here in the names of files.
    logging.getLogger("dvc").setLevel(logging.CRITICAL)
    try:
        with Repo() as repo:
            yield repo
    except (DvcException, OSError) as error:
        if found := explain(error, Path(".dvc")):
            raise found from error
        raise PipelineError(
            f"DVC: {error}", hint="mend that and call it again; `dvc doctor` shows DVC's set-up"
        ) from error


def bring(repo: Repo, *, force: bool) -> list[str]:
    """Bring back what dvc.lock and the .dvc files name: from the cache, else from the remote.

    Nothing here is touched before all of it is in the cache, where each file from a remote is held
    to its hash.

    Args:
        repo: DVC's repository.
        force: Replace files that lie here and were never stored.

    Returns:
        Paths that were added or changed.

    Raises:
        PipelineError: there is no remote, it lacks objects or has spoiled ones, or files would be
            lost.
    """
    from dvc.exceptions import DvcException

    outs = [out for out in repo.index.outs if out.hash_info and out.use_cache]
    targets = sorted({out.stage.addressing for out in outs})
    if not targets:
        return []
    if any(_lacking(out) for out in outs):
        _fetch(repo, targets, outs)
    for out in outs:
        check_listed_names(out)
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


def check_listed_names(out: Any) -> None:
    """Check that the files of an output that is a folder stay in it, before any is written.

    Names of a user's own data may hold anything else.

    Raises:
        PipelineError: a listing that came from a remote names a file in another place.
    """
    listing = out.get_obj() if out.hash_info.isdir else None
    for parts, *_ in () if listing is None else listing:
        if ".." in parts or "" in parts:
            raise PipelineError(
                f"{out}: its listing {out.hash_info.value} names {'/'.join(parts)!a}, which leaves "
                "the folder",
                hint="DVC writes no such listing: take the repository and its remote from who made "
                "them, or do not use them",
            )


def some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _lacking(out: Any) -> set[str]:
    """Names of an output's objects that the cache lacks; spoiled ones it drops when asked."""
    from dvc.output import CollectCacheError

    try:
        used = out.get_used_objs()
    except CollectCacheError:
        return {out.hash_info.value}
    lacking = set()
    for odb, objects in used.items():
        names = {one.value for one in objects}
        lacking |= names - set((odb or out.cache).oids_exist(list(names)))
    return lacking


def _fetch(repo: Repo, targets: list[str], outs: list[Any]) -> None:
    """Fill the cache from the remote; what lies here as it was stored may stay out of it."""
    name = repo.config["core"].get("remote")
    why = ""
    if name:
        verified = {one: {"verify": True} for one in repo.config["remote"]}
        try:
            repo.fetch(targets, config={"remote": verified})
        except Exception as error:  # of any remote's own library
            why = f" ({error})"
    lost = {out: names for out in outs if (names := _lacking(out)) and out.workspace_status()}
    if not lost:
        return
    check_room(Path(repo.cache.local.path))  # DVC only counts the files that failed
    files = some([str(out) for out in lost])
    if name is None:
        raise PipelineError(
            f"{files}: not in DVC's cache, and no remote is set to fetch from",
            hint="`dvc remote add --default NAME URL`, as where they were pushed from; or make "
            "them anew: `make train`",
        )
    url = repo.config["remote"].get(name, {}).get("url", "?")
    objects = some(sorted(set().union(*lost.values())))
    raise PipelineError(
        f"{files}: not wholly on the remote {name} at {url}{why}; lost or spoiled: {objects}",
        hint="`dvc push` where they were made, and look at `dvc remote list` here; docs/remotes.md "
        "has more on lost objects. `snakemake --cores all train` makes anew what is missing",
    )
