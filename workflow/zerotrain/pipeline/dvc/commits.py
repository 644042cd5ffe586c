"""The project's commits: resolve a revision, move to it without losing changes, and find the one
whose dvc.lock records weights of unknown origin, by their content."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.artifact.documents import DocumentError, read_text
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_to_read
from zerotrain.pipeline.dvc.files import LOCK, Stage, parse_lock
from zerotrain.pipeline.dvc.storage import open_repo

if TYPE_CHECKING:
    from dvc.repo import Repo

KNOWS_RESTORE = "workflow/zerotrain/pipeline/dvc/restore.py"
FOLDER = re.compile(r"\bmd5: ([0-9a-f]{32}\.dir)\n\s+size: (\d+)")
"""A folder's object and the total bytes of its files, as DVC writes dvc.lock."""
CODE = ("workflow/", "rules/", "Snakefile")


def git(*words: str) -> str:
    """Return what a git command prints.

    Raises:
        PipelineError: git is missing or fails; the message is git's.
    """
    try:
        command = ["git", "-c", "core.quotepath=off", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError as error:
        raise PipelineError("git is not installed", hint="install git") from error
    if done.returncode:
        failure = " ".join(done.stderr.split()).removeprefix("fatal: ").removeprefix("error: ")
        raise PipelineError(
            f"git {words[0]}: {failure}", hint="fix that, then run the command again"
        )
    return done.stdout


def commit_of(name: str) -> str | None:
    """Return the commit of a branch, tag or hash; None if not found."""
    try:
        return git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        ).strip()
    except PipelineError:
        return None


def move_to(commit: str) -> None:
    """Check out a commit with a detached HEAD.

    Raises:
        PipelineError: the work tree has uncommitted changes, or the commit predates `zerotrain
            restore`.
    """
    changed = [line[3:] for line in git("status", "--porcelain", "-uno").splitlines()]
    changed += git("ls-files", "--others", "--exclude-standard", "dvc.lock", "*.dvc").splitlines()
    if changed:
        raise PipelineError(
            f"{join_first(changed, 3)}: changed here and not committed",
            hint="`git commit -a` (and `git add` for new files) or `git stash` first",
        )
    if not git("ls-tree", "--name-only", commit, "--", KNOWS_RESTORE):
        raise PipelineError(
            f"{commit[:10]} is of a time before `zerotrain restore`",
            hint=f"by hand: `git checkout {commit[:10]}` and `dvc pull`; snakemake may then run "
            "stages again",
        )
    git("checkout", "--quiet", "--detach", commit)
    # `git switch -` works only for branches.
    print(f"at {described(commit)}; `git checkout -` goes back")


def described(commit: str) -> str:
    """Return a commit's short hash, date and subject."""
    return git("show", "--no-patch", "--format=%h of %cs, %s", commit).strip()


@dataclass(frozen=True)
class Found:
    """The record of weights in a dvc.lock."""

    commit: str | None
    """None: the dvc.lock here, not committed yet."""
    stage: str
    path: str
    """The output that was recorded with these bytes, or that contains them."""
    lock: dict[str, Stage]
    """The stages of that dvc.lock."""

    def lines(self) -> list[str]:
        """Return commit, stage, phase, and all inputs of the weights, with hashes."""
        rule, _, phase = self.stage.partition("-")
        when = described(self.commit) if self.commit else f"the {LOCK} here, not committed yet"
        lines = [f"{'commit':8}{when}", f"{'output':8}{self.path}", f"{'stage':8}{rule}"]
        if phase:
            lines.append(f"{'phase':8}{phase}")
        code: dict[str, str] = {}
        for name in self.made_by():
            stage = self.lock[name]
            lines.append(f"{name}:")
            for file, values in stage.get("params", {}).items():
                lines += [
                    f"  {file}: {key} = {json.dumps(v, default=str)}" for key, v in values.items()
                ]
            for dep in stage.get("deps", []):
                md5 = dep.get("md5", "unknown")
                if dep["path"].startswith(CODE):
                    code[dep["path"]] = md5
                else:
                    lines.append(f"  {dep['path']}  md5 {md5}")
        lines.append("code of these stages:")
        return lines + [f"  {path}  md5 {md5}" for path, md5 in sorted(code.items())]

    def made_by(self) -> list[str]:
        """Return the stage and all stages before it, in dependency order."""
        makers = {
            out["path"]: name for name, stage in self.lock.items() for out in stage.get("outs", [])
        }
        ordered: list[str] = []
        seen, waiting = {self.stage}, [self.stage]
        while waiting:
            for dep in self.lock[waiting[-1]].get("deps", []):
                places = (dep["path"], *map(str, Path(dep["path"]).parents))
                maker = next((makers[place] for place in places if place in makers), None)
                if maker is not None and maker not in seen:
                    seen.add(maker)
                    waiting.append(maker)
                    break
            else:
                ordered.append(waiting.pop())
        return ordered


class Weights:
    """A file or folder, identified by its content."""

    def __init__(self, path: Path) -> None:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        if not files:
            raise PipelineError(f"{path}: an empty folder", hint="name a weights file or folder")
        hashes = {file: _md5(file) for file in files}
        self.exact = hashes[path] if path.is_file() else _folder_md5(path, hashes)
        """The hash in dvc.lock of an output with exactly this content."""
        tensors = [file for file in files if file.suffix == ".safetensors"]
        self.files = {hashes[file] for file in tensors or files}
        """Required hashes in a recorded folder: downloads have other files next to tensors."""
        self.size = sum(file.stat().st_size for file in tensors or files)


def find(path: Path) -> Found:
    """Find the newest record of weights: in all branches and tags, then here.

    Args:
        path: A weights file or folder, at any place.

    Raises:
        PipelineError: no dvc.lock records it.
    """
    weights = Weights(path)
    looked, unread = 0, 0
    with open_repo() as repo:
        folders = _Folders(repo)
        for commit, text in _history():
            looked += commit is not None
            found = _in_lock(commit, text, {weights.exact}) if weights.exact in text else None
            holding = (
                set()
                if found
                else {
                    name
                    for name, size in set(FOLDER.findall(text))
                    if int(size) >= weights.size and weights.files <= folders.files(name)
                }
            )
            if found := found or (_in_lock(commit, text, holding) if holding else None):
                return found
        unread = len(folders.unread)
    hint = (
        "weights of `zerotrain export` are recorded nowhere: give those of the phase they came "
        "from; for branches of others: `git fetch --all`; for an experiment of DVC: `dvc exp "
        "branch` gives it a branch"
    )
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        hint = "this clone is shallow: `git fetch --unshallow`, and call it again"
    lacking = f"; {unread} recorded folders are on no remote and could not be looked into"
    raise PipelineError(
        f"{path}: recorded in none of the {looked} commits that changed {LOCK}"
        f"{lacking if unread else ''}",
        hint=hint,
    )


def _history() -> Iterator[tuple[str | None, str]]:
    """Yield each commit that changed dvc.lock with its text, newest first; then the file here."""
    seen = set()
    where = ("--branches", "--remotes", "--tags")
    log = git("log", *where, "--full-history", "--date-order", "--format=%H", "--", str(LOCK))
    for commit in log.split():
        tree = git("ls-tree", commit, "--", str(LOCK)).split()
        if tree and tree[2] not in seen:
            seen.add(tree[2])
            yield commit, git("cat-file", "blob", tree[2])
    if LOCK.is_file():
        yield None, read_text(LOCK, follow_links=True)


def _in_lock(commit: str | None, text: str, hashes: set[str]) -> Found | None:
    """Find an output with one of these hashes; prefer weights to a checkpoint."""
    try:
        stages = parse_lock(text)
    except DocumentError:  # one commit of many, as with the marks of a merge
        return None
    found = [
        Found(commit, name, out["path"], stages)
        for name, stage in stages.items()
        for out in stage.get("outs", [])
        if out.get("md5") in hashes
    ]
    return min(found, key=lambda one: Path(one.path).name != "weights", default=None)


class _Folders:
    """The contents of recorded folders, from DVC's cache or remote."""

    def __init__(self, repo: Repo) -> None:
        self._repo = repo
        self._read: dict[str, set[str]] = {}
        self.unread: set[str] = set()

    def files(self, name: str) -> set[str]:
        """Return the hashes of a folder's files; empty if neither cache nor remote has its list."""
        if name not in self._read:
            self._read[name] = self._load(name)
        return self._read[name]

    def _load(self, name: str) -> set[str]:
        from dvc_data.hashfile.hash_info import HashInfo
        from dvc_data.hashfile.tree import Tree

        info = HashInfo("md5", name)
        cache = self._repo.cache.local
        try:
            if not cache.exists(name):
                remote = self._repo.cloud.get_remote_odb()
                self._repo.cloud.transfer(remote, cache, [info])
            return {entry[2].value for entry in Tree.load(cache, info)}
        except Exception:  # a remote's library raises errors of any type
            self.unread.add(name)
            return set()


def _md5(path: Path) -> str:
    with open_to_read(path, follow_links=True) as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def _folder_md5(folder: Path, hashes: dict[Path, str]) -> str:
    """Return DVC's hash of a folder: the hash of its list of files."""
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.tree import Tree

    tree = Tree()
    for file, md5 in hashes.items():
        tree.add(file.relative_to(folder).parts, None, HashInfo("md5", md5))
    tree.digest()
    return str(tree.hash_info.value)
