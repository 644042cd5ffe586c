"""`zerotrain restore`: the results of a commit, from DVC's cache or its remote."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerotrain.artifact.documents import DocumentError
from zerotrain.artifact.layout import RESULTS, ROLLING
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.graph.dvc.files import LOCK, Entry, parse_lock
from zerotrain.machine.regular_file import open_to_read
from zerotrain.training.process.lock import LOCK as TRAINING
from zerotrain.training.process.lock import check_not_locked

FOLDER = ".dir"
"""How DVC marks the hash of a folder, which is that of the list of its files."""


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
        PipelineError: the work tree has uncommitted changes.
    """
    changed = [line[3:] for line in git("status", "--porcelain", "-uno").splitlines()]
    changed += git("ls-files", "--others", "--exclude-standard", "dvc.lock", "*.dvc").splitlines()
    if changed:
        raise PipelineError(
            f"{join_first(changed, 3)}: changed here and not committed",
            hint="`git commit -a` (and `git add` for new files) or `git stash` first",
        )
    git("checkout", "--quiet", "--detach", commit)
    print(f"at {described(commit)}; `git checkout -` goes back", flush=True)


def described(commit: str) -> str:
    """Return a commit's short hash, date and subject."""
    return git("show", "--no-patch", "--format=%h of %cs, %s", commit).strip()


@dataclass(frozen=True)
class Found:
    """The record of weights in the dvc.lock of a commit."""

    commit: str
    stage: str
    path: str
    """The output that holds them."""

    def __str__(self) -> str:
        return f"commit  {described(self.commit)}\noutput  {self.path}\nstage   {self.stage}"


def find(path: Path) -> Found:
    """Find the newest commit, of all branches and tags, whose results hold weights.

    Args:
        path: A weights file or folder, at any place. Of a folder the .safetensors count: a download
            has other files next to them.

    Raises:
        PipelineError: no dvc.lock records it.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [file for file in files if file.suffix == ".safetensors"] or files
    if not files:
        raise PipelineError(f"{path}: an empty folder", hint="name a weights file or folder")
    wanted = {_md5(file) for file in files}
    size = sum(file.stat().st_size for file in files)
    looked, known = 0, _Folders()
    for commit, text in _history():
        looked += 1
        found = [
            Found(commit, stage, out["path"])
            for stage, out in _outputs(text)
            if int(out.get("size", 0)) >= size and wanted <= known.files(commit, out)
        ]
        if found:  # a checkpoint may have the same file as the weights
            return min(found, key=lambda one: Path(one.path).name != "weights")
    unread = f"; {len(known.unread)} recorded folders are on no remote" if known.unread else ""
    shallow = git("rev-parse", "--is-shallow-repository").strip() == "true"
    raise PipelineError(
        f"{path}: recorded in none of the {looked} commits that changed {LOCK}{unread}",
        hint="this clone is shallow: `git fetch --unshallow`, and call it again"
        if shallow
        else "weights of `zerotrain export` are recorded nowhere: give those of the phase they "
        "came from; for branches of others: `git fetch --all`",
    )


def _history() -> Iterator[tuple[str, str]]:
    """Yield each commit that changed dvc.lock with its text, newest first, each text once."""
    seen = set()
    where = ["--branches", "--remotes", "--tags", *(["HEAD"] if commit_of("HEAD") else [])]
    log = git("log", *where, "--full-history", "--date-order", "--format=%H", "--", str(LOCK))
    for commit in log.split():
        tree = git("ls-tree", commit, "--", str(LOCK)).split()
        if tree and tree[2] not in seen:
            seen.add(tree[2])
            yield commit, git("cat-file", "blob", tree[2])


def _outputs(text: str) -> list[tuple[str, Entry]]:
    """List the stored outputs of a dvc.lock, each with its stage; none of one with merge marks."""
    try:
        stages = parse_lock(text)
    except DocumentError:
        return []
    outs = [(name, out) for name, stage in stages.items() for out in stage.get("outs", [])]
    return [(name, out) for name, out in outs if "md5" in out]


class _Folders:
    """The hashes of the files in recorded folders, from DVC's cache or its remote."""

    def __init__(self) -> None:
        self._read: dict[str, set[str]] = {}
        self.unread: set[str] = set()

    def files(self, commit: str, out: Entry) -> set[str]:
        """Return the hashes of an output's files; empty if its list is in no cache or remote."""
        md5 = out["md5"]
        if not md5.endswith(FOLDER):
            return {md5}
        if md5 not in self._read:
            self._read[md5] = self._list(commit, out)
        return self._read[md5]

    def _list(self, commit: str, out: Entry) -> set[str]:
        from dvc.api import DVCFileSystem

        try:
            listed = DVCFileSystem(".", rev=commit).find(out["path"], detail=True)
            return {entry["md5"] for entry in listed.values() if "md5" in entry}
        except Exception:  # a remote's library raises errors of any type
            self.unread.add(out["md5"])
            return set()


def _md5(path: Path) -> str:
    with open_to_read(path, follow_links=True) as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def restore(what: str | None, *, find_only: bool = False, force: bool = False) -> None:
    """Bring back the results of a commit.

    Args:
        what: A weights file or folder from anywhere, or a revision; None: the commit that is
            checked out.
        find_only: Whether to stop once the commit of the weights is found.
        force: Whether to replace results that DVC has not stored.

    Raises:
        PipelineError: nothing is recorded, a training is running, or DVC fails.
    """
    commit = _commit(what, find_only=find_only)
    if find_only:
        return
    for path in sorted(RESULTS.glob(f"*/*/{ROLLING}/{TRAINING}")):
        check_not_locked(path.parent)
    if commit and commit != git("rev-parse", "HEAD").strip():
        move_to(commit)
    if not LOCK.is_file():
        raise PipelineError(
            f"{LOCK}: not here, so nothing is recorded that could be brought back",
            hint=f"take a commit that has one: `git log --all -- {LOCK}`",
        )
    forced = ["--force"] if force else []
    # What the cache has needs no remote.
    if _dvc("checkout", "--quiet", *forced, quiet=True) and (code := _dvc("pull", *forced)):
        raise PipelineError(
            f"`dvc pull` ended with code {code}; above it says why",
            hint="docs/remotes.md has the causes; `--force` replaces results that are not stored; "
            "`snakemake` makes what is missing again",
        )
    print("brought back; `snakemake -n` says what is left to do")


def _commit(what: str | None, *, find_only: bool) -> str | None:
    """Return the commit that a word names; None for the one that is checked out."""
    is_file = what is not None and Path(what).exists()
    if find_only and not is_file:
        raise PipelineError(
            f"--find-only: {what or 'nothing'} is no weights file or folder here",
            hint="`zerotrain restore --find-only WEIGHTS`",
        )
    if what is None:
        return None
    commit = commit_of(what)
    if is_file and commit and not find_only:
        raise PipelineError(
            f"{what}: a file or folder here, and a revision of git",
            hint=f"write ./{what} for the one, {commit[:10]} for the other",
        )
    if is_file:
        found = find(Path(what))
        print(found, flush=True)
        return found.commit
    if commit is None:
        raise PipelineError(
            f"{what}: neither a file or folder nor a revision of git",
            hint="`git branch --all` and `git tag` name revisions; `git fetch` brings those of "
            "others",
        )
    return commit


def _dvc(*words: str, quiet: bool = False) -> int:
    """Call DVC and return its exit code.

    Raises:
        PipelineError: it is not installed.
    """
    try:
        return subprocess.run(
            ["dvc", *words],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if quiet else None,
        ).returncode
    except FileNotFoundError as error:
        raise PipelineError(
            "DVC is not installed, and only DVC knows where stored files are",
            hint="`make setup` installs it into .venv, `pip install dvc` in another environment",
        ) from error
