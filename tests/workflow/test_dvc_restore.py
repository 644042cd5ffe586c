"""`zerotrain restore`: the results of a commit, which weights of unknown origin may name."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.builders.git import init_repository, set_author
from tests.workflow.conftest import Project, create
from tests.workflow.jobs import CONFIG

pytestmark = pytest.mark.slow  # each begins with a run under DVC, which takes seconds to make

# Of another host nothing is known: its owner counts as alive.
FAR = json.dumps(
    {"host": "far", "pid": 7, "started": 1.0, "job": "", "restart": 0, "cluster": "", "user": 0,
     "boot": "", "pid_namespace": 0, "lease": 0}
)  # fmt: skip


def zerotrain(project: Project, *words: str, code: int = 0) -> str:
    """What the real command prints; `zerotrain` itself is a fake here."""
    printed = project.must("python", "-m", "zerotrain", *words, code=code)
    assert "Traceback" not in printed
    return printed


def train(project: Project, message: str) -> None:
    """Train, commit and push."""
    project.build("train")
    project.must("git", "add", ".")
    project.must("git", "commit", "-q", "-m", message)
    project.must("dvc", "push", "-q")


def hashes(project: Project) -> dict[str, str]:
    """Sha256 of every output of the run."""
    found = (project.folder / "results").rglob("*")
    no_output = {"logs", "benchmarks", "progress", ".files", "settings", ".publishing.lock"}
    return {
        str(path.relative_to(project.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(found)
        if path.is_file() and path.name != ".manifest.json" and not no_output & set(path.parts)
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory, planner) -> tuple[Project, list[dict[str, str]]]:
    """A project that was trained and pushed twice, and the hashes of both."""
    project = create(tmp_path_factory.mktemp("stored") / "project", "nano", planner)
    init_repository(project.must)
    zerotrain(project, "dvc", "generate")
    project.must("dvc", "remote", "add", "-q", "--default", "shelf", "../shelf")
    project.append(".gitignore", "/calls.txt\n")
    train(project, "first")
    found = [hashes(project)]
    shutil.copytree(project.folder / "results/tiny/plain/weights", project.folder / "../old")
    project.edit(CONFIG, "learning_rate: 1.0e-3", "learning_rate: 2.0e-3")
    train(project, "faster")
    found.append(hashes(project))
    project.calls()
    return project, found


@pytest.fixture
def clone(trained, tmp_path: Path) -> Project:
    """A fresh clone, with the remote next to it."""
    project, _ = trained
    shutil.copytree(project.folder.with_name("shelf"), tmp_path / "shelf")
    project.must("git", "clone", "-q", str(project.folder), str(tmp_path / "clone"))
    made = project.at(tmp_path / "clone")
    set_author(made.must)
    return made


def subject(project: Project) -> str:
    return project.must("git", "log", "-1", "--format=%s").strip()


def test_a_clone_gets_everything_back(trained, clone: Project) -> None:
    """The same bytes, and DVC has nothing to do; called again, and without a remote, too."""
    zerotrain(clone, "restore")
    assert hashes(clone) == trained[1][1]
    assert "up to date" in clone.must("dvc", "status")
    assert clone.must("git", "status", "--short") == ""
    shutil.rmtree(clone.folder / "results")
    clone.folder.with_name("shelf").rename(clone.folder.with_name("elsewhere"))
    zerotrain(clone, "restore")
    assert hashes(clone) == trained[1][1]


def test_a_revision_is_checked_out_on_no_branch(trained, clone: Project) -> None:
    """Its own results come back, and the line says how to go back."""
    said = zerotrain(clone, "restore", "HEAD~1")
    assert (subject(clone), hashes(clone)) == ("first", trained[1][0])
    assert clone.must("git", "branch", "--show-current").strip() == ""
    clone.must(*said.partition("; `")[2].partition("` goes back")[0].split())
    assert subject(clone) == "faster"


@pytest.mark.parametrize("given", ["file", "folder"])
def test_weights_are_found_by_their_content(given: str, trained, clone: Project) -> None:
    """A copy under another name leads to the commit, the output and the stage, in a clone that has
    fetched nothing; and that commit comes back."""
    old = trained[0].folder.with_name("old")
    weights = clone.folder.with_name("weights")
    if given == "file":
        shutil.copy(old / "payload.bin", weights)
    else:
        shutil.copytree(old, weights)
    said = zerotrain(clone, "restore", "--find-only", str(weights))
    assert re.search(r"^commit  \w+ of [\d-]+, first\n", said)
    assert "output  results/tiny/plain/weights\nstage   tiny-plain\n" in said
    assert not (clone.folder / "results").exists()
    zerotrain(clone, "restore", str(weights))
    assert (subject(clone), hashes(clone)) == ("first", trained[1][0])


def test_unknown_weights_are_named(clone: Project) -> None:
    """Weights from another program: a sentence that says how many commits were looked at."""
    path = clone.folder / "other.safetensors"
    path.write_bytes(b"not ours")
    said = zerotrain(clone, "restore", str(path), code=2)
    assert f"{path}: recorded in none of the 2 commits that changed dvc.lock" in said


def write(project: Project, name: str, content: str) -> None:
    """A file in the way."""
    path = project.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


REFUSALS: dict[str, tuple[Callable[[Project], object], list[str], str]] = {
    "no lock": (lambda it: (it.folder / "dvc.lock").unlink(), [], "dvc.lock: not here"),
    "remote gone": (
        lambda it: shutil.rmtree(it.folder.with_name("shelf")), [], "`dvc pull` ended with code",
    ),
    "training": (
        lambda it: write(it, "results/tiny/plain/progress/lock", FAR), [], "pid 7 on far",
    ),
    "unsaved": (
        lambda it: write(it, "results/tiny/plain/weights/payload.bin", "of hours"), [],
        "`dvc pull` ended with code",
    ),
    "edited": (
        lambda it: it.append(CONFIG, "# a remark\n"), ["HEAD~1"],
        f"{CONFIG}: changed here and not committed",
    ),
    "no such": (
        lambda it: None, ["no-such"], "no-such: neither a file or folder nor a revision of git",
    ),
    "nothing to find": (
        lambda it: None, ["--find-only"], "--find-only: nothing is no weights file or folder",
    ),
    "two meanings": (
        lambda it: it.must("git", "branch", "photos"), ["photos"],
        "photos: a file or folder here, and a revision of git",
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSALS)
def test_restore_refuses_with_a_hint(reason: str, clone: Project) -> None:
    """Whatever is missing or in the way is a sentence; nothing that is here is lost."""
    harm, words, sentence = REFUSALS[reason]
    harm(clone)
    before = hashes(clone)
    error, _, hint = zerotrain(clone, "restore", *words, code=2).partition("  Hint: ")
    assert sentence in error
    assert hint
    assert {name: hashes(clone)[name] for name in before} == before
    assert subject(clone) == "faster"


def test_restore_replaces_what_it_is_asked_to(trained, clone: Project) -> None:
    """--force: a result that was never stored makes room."""
    write(clone, "results/tiny/plain/weights/payload.bin", "of hours")
    zerotrain(clone, "restore", "--force")
    assert hashes(clone) == trained[1][1]


def test_a_removed_run_comes_back(trained, clone: Project) -> None:
    """`zerotrain remove` says what dvc.lock lists of it; without dvc.yaml `dvc gc` frees that."""
    zerotrain(clone, "restore")
    said = zerotrain(clone, "remove", "tiny", "--data", "--yes")
    found = re.search(r"\S+ k?B of (\d+) outputs, as dvc.lock lists them", said)
    assert found, said
    stages = yaml.safe_load((clone.folder / "dvc.lock").read_text())["stages"]
    assert int(found[1]) == sum(len(stage["outs"]) for stage in stages.values())
    assert not [*(clone.folder / "results").rglob("manifest.json")]
    zerotrain(clone, "restore")
    assert hashes(clone) == trained[1][1]
    (clone.folder / "dvc.yaml").unlink()
    clone.must("dvc", "gc", "-w", "-f")
    objects = [*(clone.folder / ".dvc/cache/files").rglob("*")]
    assert not [path for path in objects if path.is_file()]
