"""DVC's storage: opens its repository, commits stages to dvc.lock, and restores files."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact import MANIFEST
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.machine.disk_errors import check_room, explain
from zerotrain.pipeline.dvc.files import LOCK, check_documents

if TYPE_CHECKING:
    from dvc.repo import Repo


def check_dvc_is_set_up() -> None:
    """Check that DVC is installed and set up here.

    Raises:
        PipelineError: it is not installed or not set up, or this is not the project's top folder.
    """
    if importlib.util.find_spec("dvc") is None:
        raise PipelineError(
            "DVC is not installed, and only DVC knows where stored files are",
            hint="`make setup` installs it into .venv, `pip install dvc` in another environment",
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
    """Open DVC's repository of the project in the working directory.

    Raises:
        PipelineError: DVC is not installed, is not set up, or reports an error, or a file that it
            would read is damaged.
    """
    check_dvc_is_set_up()
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    check_documents()
    # DVC's warnings list every object; our message names the missing files.
    logging.getLogger("dvc").setLevel(logging.CRITICAL)
    try:
        with Repo() as repo:
            yield repo
    except (DvcException, OSError) as error:
        if found := explain(error, Path(".dvc")):
            raise found from error
        raise PipelineError(
            f"DVC: {error}", hint="fix that and call it again; `dvc doctor` shows DVC's set-up"
        ) from error


def commit_stages(names: Iterable[str]) -> None:
    """Commit stages of dvc.yaml to dvc.lock: their current inputs, and their outputs.

    This is `dvc commit --force --no-relink` for several stages at once. The command reads and
    writes all of dvc.lock for each given stage, which took 9 s for the twelve stages of the
    example.

    Raises:
        PipelineError: DVC is running here or cannot store an output, or files of an output are
            missing or damaged; the other stages are committed.
    """
    from dvc.exceptions import DvcException

    wanted, entered, failed = set(names), [], []
    with open_repo() as repo, repo.lock:
        stages = [stage for stage in repo.stage.load_all("dvc.yaml") if stage.name in wanted]
        for stage in stages:
            for out in stage.outs:
                if out.persist:  # a progress folder that was deleted to free disk space
                    Path(out.fs_path).mkdir(parents=True, exist_ok=True)
            former = {out: (out.hash_info, out.get_obj()) for out in stage.outs if out.hash_info}
            try:
                stage.save()
                if damaged := [str(out) for out in former if _is_damaged(out, *former[out])]:
                    failed.append(
                        f"{stage.name}: {', '.join(damaged)}: other files under the manifest that "
                        f"was stored; `dvc checkout --force {damaged[0]}` brings them back"
                    )
                    continue
                stage.commit(relink=False)
            except DvcException as error:
                failed.append(f"{stage.name}: {error}")
                continue
            entered.append(stage)
        if entered:
            entered[0].dvcfile.dump_stages(entered, update_pipeline=False)
    if failed:
        raise PipelineError(
            "not entered in dvc.lock: " + "\n  ".join(failed),
            hint="fix that, and call `snakemake` again",
        )


def _is_damaged(out: Any, hash_info: Any, tree: Any) -> bool:
    """Return whether files of a folder are missing or changed while its manifest is as stored."""
    if tree is None or out.hash_info == hash_info or not (out.hash_info.isdir and hash_info.isdir):
        return False
    before, now = (dict(_hashes(one)) for one in (tree, out.get_obj()))
    manifest = (MANIFEST,)
    if manifest not in before or before[manifest] != now.get(manifest):
        return False
    return any(now.get(key) != value for key, value in before.items())


def _hashes(tree: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, _, found in tree:
        yield key, found.value


def bring(repo: Repo, *, force: bool) -> list[str]:
    """Restore the files of dvc.lock and the .dvc files: from the cache, else from the remote.

    No file here is changed until all are in the cache, where each file from a remote is checked
    against its hash.

    Args:
        repo: DVC's repository.
        force: Whether to replace files here that were never stored.

    Returns:
        Paths that were added or changed.

    Raises:
        PipelineError: there is no remote, it lacks objects or has corrupt ones, or files would be
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
            f"{join_first(lost, 3)}: would be replaced, and DVC has not stored what is here",
            hint="move it away, or `dvc commit` it; to let it go: `zerotrain restore --force`",
        ) from error
    return sorted({*done["added"], *done["modified"]})


def stored_copies(places: Iterable[Path]) -> tuple[int, int]:
    """Return the number and bytes of the outputs at these places that DVC's cache holds.

    Raises:
        PipelineError: DVC is set up here and cannot answer.
    """
    if importlib.util.find_spec("dvc") is None or not (Path(".dvc").is_dir() and LOCK.is_file()):
        return 0, 0
    wanted = [place.absolute() for place in places]
    with open_repo() as repo:
        sizes = [
            out.meta.size or 0
            for out in repo.index.outs
            if out.hash_info
            and any(Path(out.fs_path).is_relative_to(place) for place in wanted)
            and out.cache.exists(out.hash_info.value)
        ]
    return len(sizes), sum(sizes)


def check_listed_names(out: Any) -> None:
    """Check that the files of an output folder stay inside it, before any is written.

    Names in a user's own data may contain anything else.

    Raises:
        PipelineError: a listing from a remote names a file outside the folder.
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


def _lacking(out: Any) -> set[str]:
    """List an output's objects that the cache lacks; the check drops corrupt ones."""
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
    """Fill the cache from the remote, except for files that are here as stored."""
    name = repo.config["core"].get("remote")
    why = ""
    if name:
        verified = {one: {"verify": True} for one in repo.config["remote"]}
        try:
            repo.fetch(targets, config={"remote": verified})
        except Exception as error:  # a remote's library raises errors of any type
            why = f" ({error})"
    lost = {out: names for out in outs if (names := _lacking(out)) and out.workspace_status()}
    if not lost:
        return
    check_room(Path(repo.cache.local.path))  # DVC reports only the number of failed files
    files = join_first([str(out) for out in lost], 3)
    if name is None:
        raise PipelineError(
            f"{files}: not in DVC's cache, and no remote is set to fetch from",
            hint="`dvc remote add --default NAME URL`, as where they were pushed from; or make "
            "them again: `make train`",
        )
    url = repo.config["remote"].get(name, {}).get("url", "?")
    objects = join_first(sorted(set().union(*lost.values())), 3)
    raise PipelineError(
        f"{files}: not wholly on the remote {name} at {url}{why}; lost or spoiled: {objects}",
        hint="`dvc push` where they were made, and look at `dvc remote list` here; docs/remotes.md "
        "has more on lost objects. `snakemake --cores all train` makes what is missing again",
    )
