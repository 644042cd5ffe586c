"""What `snakemake` has made is recorded with DVC, without a second copy, and neither of the two has
anything left to do."""

from __future__ import annotations

import json
import shutil
import stat
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tests.builders.git import init_repository, set_author
from tests.workflow.conftest import Project, create
from tests.workflow.jobs import CONFIG, EVALUATIONS, EVERYTHING

pytestmark = pytest.mark.slow  # each begins with a run under DVC, which takes seconds to make

GENERATE = ("python", "-m", "zerotrain", "dvc", "generate")
MEGABYTE = {"DIGESTS": str(2**15)}
"""Of each folder's payload: so much that a folder's own blocks do not count."""


def make(folder: Path, planner: Path) -> Project:
    """A run under Git and DVC that Snakemake alone has made."""
    project = create(folder, "nano", planner)
    project.append(".gitignore", "/calls.txt\n")
    init_repository(project.must)
    project.must(*GENERATE)
    project.must("git", "add", ".")
    project.must("snakemake", "--cores", "2", "train", **MEGABYTE)
    project.calls()
    return project


@pytest.fixture(scope="module")
def made(tmp_path_factory, planner) -> Project:
    return make(tmp_path_factory.mktemp("recorded") / "project", planner)


@pytest.fixture
def recorded(made: Project, tmp_path: Path) -> Project:
    """A copy of it; its links are those of `cp -a`, results and cache together."""
    target = tmp_path / "project"
    made.must("cp", "-a", str(made.folder), str(target))
    return made.at(target)


def blocks(*folders: Path) -> int:
    """The bytes on the disk below folders, each file once, as `du` counts."""
    found = {}
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            entry = path.lstat()
            found[entry.st_ino] = entry.st_blocks * 512
    return sum(found.values())


def is_clean(project: Project) -> bool:
    """Whether DVC would run no stage, and knows all."""
    return "Data and pipelines are up to date" in project.must("dvc", "status")


def stale(project: Project) -> set[str]:
    """The stages that DVC would run."""
    return set(json.loads(project.must("dvc", "status", "--json")))


def nothing_to_do(project: Project) -> None:
    """For both, in whichever order they are called."""
    project.calls()
    assert project.planned("train") == {}
    assert stale(project) == set()
    assert "up to date" in project.must("dvc", "repro")
    assert project.planned("train") == {}
    assert project.calls() == []


def test_an_older_commit_and_a_newer_one_need_nothing_after_dvc_checkout(recorded) -> None:
    """Results of both are in DVC's cache; neither tool makes any of them again."""
    recorded.must("git", "add", ".")
    recorded.must("git", "commit", "-q", "-m", "first")
    recorded.edit(CONFIG, "1.0e-3", "2.0e-3")
    recorded.build("train")
    recorded.must("git", "commit", "-q", "-a", "-m", "second")
    for revision in ("HEAD~1", "-"):
        recorded.must("git", "checkout", "-q", revision)
        recorded.must("dvc", "checkout")
        nothing_to_do(recorded)


def test_either_makes_an_edit_and_neither_has_anything_left_to_do(recorded) -> None:
    """A run is on the disk once, after `snakemake` and after `dvc repro`."""
    results, cache = recorded.folder / "results", recorded.folder / ".dvc/cache"
    nothing_to_do(recorded)
    assert blocks(results) > 9 * 2**20
    assert blocks(results, cache) <= 1.1 * blocks(results)
    recorded.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    recorded.must("dvc", "repro", "--quiet", **MEGABYTE)
    assert sorted(recorded.calls()) == ["evaluate", "evaluate", "report"]
    nothing_to_do(recorded)
    recorded.edit(CONFIG, "guidance_scale: 2.0", "guidance_scale: 1.0")
    recorded.must("snakemake", "--cores", "2", "train", **MEGABYTE)
    assert sorted(recorded.calls()) == ["evaluate", "evaluate", "report"]
    nothing_to_do(recorded)
    former = 2 * 3 * 2**20  # of the two runs before, two evaluations and a report each
    assert blocks(results, cache) <= 1.1 * (blocks(results) + former)


def test_dvc_repro_makes_everything_once(project) -> None:
    """From nothing: each stage runs once, in order, and nothing is left to do."""
    init_repository(project.must)
    project.must(*GENERATE)
    project.must("dvc", "repro", "--quiet")
    assert Counter(project.calls()) == EVERYTHING
    nothing_to_do(project)
    assert " results/" not in project.must("git", "status", "--short")
    (project.folder / "photos" / "cow.png").write_bytes(b"pixels of a cow")
    assert "photos" in project.must("dvc", "status", "data-tiny")


def test_a_new_section_is_not_missed_by_dvc(recorded) -> None:
    """No stage names it; the last one takes the whole file and makes what depends on it."""
    recorded.append(CONFIG, "cache:\n  dtype: fp16\n")
    assert stale(recorded) == {"tiny-report"}
    recorded.must("dvc", "repro", "--quiet")
    assert "cache_latents" in recorded.calls()
    assert recorded.planned("train") == {}


def test_what_is_out_of_date_is_not_recorded(recorded) -> None:
    """A call for a part of the run records that part; after a failure the next call records all."""
    recorded.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    recorded.edit("photos/cat.txt", "a cat", "a cat that sleeps")
    recorded.must("snakemake", "--cores", "1", "dataset")
    assert recorded.calls() == ["prepare_dataset"]
    left = stale(recorded)
    assert "data-tiny" not in left
    assert {"data-tiny-cache-64", "tiny-plain", "tiny-offload", "tiny-report"} <= left
    former = (recorded.folder / "dvc.lock").read_bytes()
    assert recorded.snakemake("--cores", "1", "train", FAIL="report").returncode == 1
    assert (recorded.folder / "dvc.lock").read_bytes() == former
    recorded.must("snakemake", "--cores", "1", "train")
    nothing_to_do(recorded)


@pytest.mark.parametrize("edited", ["the configuration", "an image"])
def test_what_is_edited_meanwhile_is_not_recorded(recorded, edited) -> None:
    """DVC would take the edit for what the results were made from."""
    recorded.edit("photos/cat.txt", "a cat", "a cat that sleeps")
    file, old, new = (CONFIG, "_scale: 3", "_scale: 2") if "conf" in edited else (
        "photos/dog.txt", "a dog", "a dog that sleeps")  # fmt: skip
    recorded.must("snakemake", "--cores", "1", "train", EDIT=f"report|{file}|{old}|{new}")
    left = {"tiny-plain", "tiny-offload", "tiny-report"} if "conf" in edited else {"data-tiny"}
    assert left <= stale(recorded)
    recorded.must("dvc", "repro", "--quiet")
    nothing_to_do(recorded)


@pytest.mark.parametrize("missing", [".dvc", "dvc.yaml", "the run", "DVC"])
def test_without_dvc_snakemake_works_alone(recorded, missing) -> None:
    """Nothing is recorded and nothing said."""
    environment = {}
    if missing == "the run":
        text = (recorded.folder / "dvc.yaml").read_text()
        others = text.replace("--cores all", "--cores all --configfile config/b.yaml")
        (recorded.folder / "dvc.yaml").write_text(others)
    elif missing == "DVC":  # it calls Snakemake itself
        environment = {"DVC_STAGE": "tiny-report"}
    elif (recorded.folder / missing).is_dir():
        shutil.rmtree(recorded.folder / missing)
    else:
        (recorded.folder / missing).unlink()
    former = (recorded.folder / "dvc.lock").read_bytes()
    recorded.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    said = recorded.must("snakemake", "--cores", "2", "train", **environment)
    assert "WARNING" not in said
    assert "dvc" not in said
    assert (recorded.folder / "dvc.lock").read_bytes() == former


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        ("DVC at work", "WARNING: DVC: nothing is recorded: `dvc commit` ended with code"),
        ("merge", "WARNING: DVC: nothing is recorded: dvc.yaml: "),
    ],
)
def test_what_cannot_be_recorded_fails_no_run(recorded, harm, sentence) -> None:
    """It is one warning, and the next `dvc repro` records it without making anything."""
    lock, pipeline = recorded.folder / ".dvc/tmp/lock", recorded.folder / "dvc.yaml"
    text = pipeline.read_text()
    if harm == "merge":
        pipeline.write_text(f"<<<<<<< HEAD\n{text}")
    else:
        lock.unlink(missing_ok=True)
        lock.mkdir()
    recorded.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    said = recorded.must("snakemake", "--cores", "2", "train")
    assert said.count("WARNING") == 1
    assert sentence in said
    pipeline.write_text(text)
    if lock.is_dir():
        lock.rmdir()
    recorded.calls()
    recorded.must("dvc", "repro", "--quiet")
    nothing_to_do(recorded)


def test_a_dvc_yaml_of_another_configuration_is_named(recorded) -> None:
    """After an edit that changes the stages one line says so, `generate` writes it; a stage of
    the user's own stays."""
    own = "  mine:\n    cmd: echo mine\n    deps: [photos]\n"
    recorded.edit("dvc.yaml", "stages:\n", f"stages:\n{own}")
    phase = "launch: zero2_offload\n"
    recorded.edit(CONFIG, phase, f"{phase}  - {{name: more, until: 900, launch: torch}}\n")
    said = recorded.must("snakemake", "--cores", "2", "train")
    assert said.count("dvc.yaml: not what `zerotrain dvc generate config/config.yaml`") == 1
    recorded.must(*GENERATE)
    stages = yaml.safe_load((recorded.folder / "dvc.yaml").read_text())["stages"]
    assert stages["mine"] == {"cmd": "echo mine", "deps": ["photos"]}
    assert "tiny-more" in stages
    recorded.must("dvc", "repro", "--quiet")
    assert recorded.planned("train") == {}
    assert stale(recorded) == set()


def is_writable(path: Path) -> bool:
    """By its mode: root may write whatever it is."""
    return bool(path.stat().st_mode & stat.S_IWUSR)


def test_what_snakemake_declares_is_writable_and_no_link(recorded) -> None:
    """Or it would refuse to make it again; weights and what else is below them are links of DVC's
    cache, which no one writes. Times are those of the links."""
    folder = recorded.folder / "results/tiny/plain"
    declared = [folder / "weights/manifest.json", folder / "metrics.json"]
    declared.append(recorded.folder / "results/data/tiny/manifest.json")
    assert all(map(is_writable, declared))
    shutil.rmtree(recorded.folder / "results")
    recorded.must("dvc", "checkout", "--quiet")
    former = [(path.stat().st_mtime_ns, path.read_bytes()) for path in declared]
    assert not any(map(is_writable, declared))
    recorded.must("snakemake", "-n", "train")
    assert all(map(is_writable, declared))
    assert [(path.stat().st_mtime_ns, path.read_bytes()) for path in declared] == former
    weights = folder / "weights/payload.bin"
    assert not is_writable(weights)
    assert weights.stat().st_nlink == 2
    stored = {path.stat().st_ino for path in (recorded.folder / ".dvc/cache").rglob("*")}
    assert not stored & {path.stat().st_ino for path in declared}
    objects = [path for path in (recorded.folder / ".dvc/cache").rglob("*") if path.is_file()]
    assert not any(map(is_writable, objects))


def test_two_clones_share_a_cache(recorded) -> None:
    """A group's: results of both are on the disk once, and what one makes again leaves the other's
    as they are."""
    shared = recorded.folder.with_name("shared")
    recorded.must("dvc", "cache", "dir", str(shared))
    (recorded.folder / ".dvc/cache").rename(shared)
    recorded.must("git", "add", ".")
    recorded.must("git", "commit", "-q", "-m", "run")
    clone = recorded.at(recorded.folder.with_name("clone"))
    recorded.must("git", "clone", "-q", str(recorded.folder), str(clone.folder))
    set_author(clone.must)
    clone.must("dvc", "checkout", "--quiet")
    places = [project.folder / "results" for project in (recorded, clone)]
    assert blocks(*places, shared) <= 1.1 * blocks(places[0])
    for project in (recorded, clone):
        project.must("snakemake", "-n", "train")
    for name in ("tiny/plain/weights/manifest.json", "data/tiny/manifest.json"):
        one, other = (place / name for place in places)
        assert one.read_bytes() == other.read_bytes()
        assert one.stat().st_ino != other.stat().st_ino
    former = {path: path.read_bytes() for path in places[0].rglob("*") if path.is_file()}
    clone.edit(CONFIG, "seed: 1", "seed: 2")
    clone.must("snakemake", "--cores", "2", "train")
    assert {path: path.read_bytes() for path in former} == former
    assert stale(recorded) == set()
    assert stale(clone) == set()


def test_a_clone_pulls_and_has_nothing_to_do(recorded) -> None:
    """By content alone: no record of Snakemake is in the clone."""
    recorded.must("dvc", "remote", "add", "-q", "--default", "shelf", "../shelf")
    recorded.must("git", "add", ".")
    recorded.must("git", "commit", "-q", "-m", "run")
    recorded.must("dvc", "push", "--quiet")
    clone = recorded.at(recorded.folder.with_name("clone"))
    recorded.must("git", "clone", "-q", str(recorded.folder), str(clone.folder))
    clone.must("dvc", "pull", "--quiet")
    nothing_to_do(clone)
    clone.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    assert clone.planned("train") == EVALUATIONS
