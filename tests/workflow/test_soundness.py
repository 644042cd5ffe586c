"""Whatever edits, calls, checkouts and kills came before: what is current is what a run from
nothing makes of the same values and data, and nothing is left to do."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.builders.git import init_repository
from tests.workflow.conftest import Project, create
from tests.workflow.jobs import CONFIG, NOTHING

pytestmark = pytest.mark.soak
CALLS = 60
VALUES = {
    "learning_rate": ("learning_rate: 1.0e-3", "learning_rate: 2.0e-3"),
    "until": ("until: 700", "until: 800"),
    "guidance": ("guidance_scale: 3.0", "guidance_scale: 2.0"),
    "dtype": ("dtype: fp32", "dtype: bf16"),
    "resolution": ("resolution: 64", "resolution: 32"),
    "comment": ("# Two phases", "# Twice"),
}
"""Edits of the configuration; each is made and taken back."""


def made(project: Project) -> dict[str, object]:
    """Content and files of each published folder."""
    results = project.folder / "results"
    found = {}
    for path in sorted(results.rglob("manifest.json")):
        if "progress" not in path.parts and "cache_shards" not in path.parts:
            manifest = json.loads(path.read_text())
            found[str(path.relative_to(results))] = [manifest["content"], manifest["files"]]
    return found


def from_nothing(project: Project, folder: Path) -> dict[str, object]:
    """What a run of the same configuration and data makes where nothing was made before."""
    fresh = create(folder, "sdxl", project.server)
    for name in ("config", "photos"):
        shutil.rmtree(folder / name)
        shutil.copytree(project.folder / name, folder / name)
    fresh.build("train")
    return made(fresh)


def unsound(project: Project, every: dict[str, object]) -> dict[str, tuple[object, object]]:
    """What is there of all that a run from nothing makes, and what that run makes, where they
    differ; more may be there."""
    found = made(project)
    return {name: (found.get(name), of) for name, of in every.items() if found.get(name) != of}


def kill(project: Project, after: float, *words: str) -> None:
    """Kill a call and all that it started; then remove Snakemake's lock."""
    environment = project.environment | {"COMMAND_SERVER": str(project.server)}
    called = subprocess.Popen(
        words, cwd=project.folder, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(called.pid, signal.SIGKILL)
    called.wait()
    while any(map(project_process(project), psutil.process_iter())):
        time.sleep(0.05)
    project.must("snakemake", "--unlock")


def project_process(project: Project) -> Callable[[psutil.Process], bool]:
    """Return a function that tells whether a process works in the project's folder."""

    def works(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.cwd() == str(project.folder)
        return False

    return works


@pytest.fixture
def repository(tmp_path: Path, planner: Path) -> Project:
    """A run on a base from a folder, under Git and DVC."""
    project = create(tmp_path / "project", "sdxl", planner)
    # A derived horizon stays that which a finished phase was trained with.
    text = (project.folder / CONFIG).read_text()
    rate = VALUES["learning_rate"][0]
    (project.folder / CONFIG).write_text(text.replace(rate, f"{rate}\n  lr_scheduler_steps: 800"))
    project.append(".gitignore", "/calls.txt\n")
    init_repository(project.must)
    project.must("python", "-m", "zerotrain", "dvc", "generate")
    project.must("git", "add", ".")
    project.must("git", "commit", "-q", "-m", "first")
    return project


@pytest.mark.parametrize("seed", range(3))
def test_no_call_leaves_a_result_that_is_not_of_its_inputs(
    repository: Project, tmp_path: Path, seed: int
) -> None:
    """Edits of values, captions and images, `snakemake`, `dvc repro`, commits, checkouts and kills:
    after each that ends well, all is current, and neither tool has anything left to do."""
    chance, known = random.Random(seed), {}
    project, sound = repository, 0

    def edit() -> None:
        old, new = chance.choice([*VALUES.values()])
        text = (project.folder / CONFIG).read_text()
        was, now = (old, new) if old in text else (new, old)
        (project.folder / CONFIG).write_text(text.replace(was, now))
        if "resolution" in old:  # the name of a cache
            project.must("python", "-m", "zerotrain", "dvc", "generate")

    def caption() -> None:
        words = chance.choice(["a cat", "a cat asleep"])
        (project.folder / "photos/cat.txt").write_text(f"{words}\n")

    def image() -> None:
        for suffix in ("png", "txt"):
            path = project.folder / f"photos/cow.{suffix}"
            path.unlink() if path.exists() else path.write_text("a cow")

    def commit() -> None:
        project.must("git", "add", ".")
        project.command("git", "commit", "-q", "-m", "more")

    def checkout() -> None:
        commit()
        count = int(project.must("git", "rev-list", "--count", "HEAD"))
        project.must("git", "checkout", "-q", f"HEAD~{min(count - 1, chance.randint(0, 2))}")
        project.command("dvc", "checkout", "--force")

    def interrupted() -> None:
        kill(project, chance.uniform(0.2, 4.0), "snakemake", "--cores", "2", "train")

    calls = [edit, edit, caption, image, commit, checkout, interrupted]
    called: list[str] = []
    for _ in range(CALLS):
        act = chance.choice([*calls, None, None])
        if act is not None:
            called.append(act.__name__)
            act()
            continue
        words = chance.choice([("snakemake", "--cores", "2", "train"), ("dvc", "repro")])
        called.append(words[0])
        project.must(*words)
        key = (project.folder / CONFIG).read_text() + str(
            sorted((p.name, p.read_text()) for p in (project.folder / "photos").iterdir())
        )
        if key not in known:
            known[key] = from_nothing(project, tmp_path / f"fresh{len(known)}")
        assert unsound(project, known[key]) == {}, called
        assert project.planned("train") == NOTHING
        sound += 1
    assert sound > 5
