"""`zerotrain restore` and `zerotrain data add`: everything back, and nothing left to do."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.builders.git import init_repository, set_author
from tests.workflow.conftest import Jobs, Project, create
from tests.workflow.jobs import (
    CONFIG,
    EVALUATIONS,
    EVERYTHING,
    FROM_LAUNCH,
    NOTHING,
    ONE_PHASE,
    config,
    raised,
    rewrite,
)

pytestmark = pytest.mark.slow  # each begins with a run under DVC, which takes seconds to make

EVERY_PART = ["cache", "progress", "checkpoint", "weights", "state", "evaluation", "report"]


def zerotrain(project: Project, *words: str, code: int = 0, **environment: str) -> str:
    """What the real command prints; `zerotrain` itself is a fake here."""
    printed = project.must("python", "-m", "zerotrain", *words, code=code, **environment)
    assert "Traceback" not in printed
    return printed


def commit(project: Project, message: str) -> str:
    """Commit all that git does not ignore: the commit."""
    project.must("git", "add", ".")
    project.must("git", "commit", "-q", "-m", message)
    return project.must("git", "rev-parse", "HEAD").strip()


def begin(project: Project) -> None:
    """A project under git and DVC, with a folder as DVC's remote, built by Snakemake and pushed."""
    init_repository(project.must)
    zerotrain(project, "dvc", "generate")
    # Next to the project, by a relative path: a copy of both has a remote of its own.
    project.must("dvc", "remote", "add", "-q", "--default", "shelf", "../shelf")
    project.append(".gitignore", "/calls.txt\n")
    project.build("train")
    commit(project, "first")
    project.must("dvc", "push", "-q")
    project.calls()


def remote_of(project: Project) -> Path:
    return project.folder.with_name("shelf")


def copy_with_remote(project: Project, folder: Path) -> Project:
    """The same project and its remote in another folder."""
    shutil.copytree(remote_of(project), folder / "shelf")
    return project.copy_to(folder / "project")


def clone(project: Project, name: str = "clone") -> Project:
    """A fresh clone, with nothing of DVC's in it."""
    folder = project.folder.with_name(name)
    project.must("git", "clone", "-q", str(project.folder), str(folder))
    made = project.at(folder)
    set_author(made.must)
    return made


def hashes(project: Project, below: str = "results") -> dict[str, str]:
    """Sha256 of every file; logs, benchmarks and what is hidden belong to no output."""
    return {
        str(path.relative_to(project.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((project.folder / below).rglob("*"))
        if path.is_file() and not {"logs", "benchmarks"} & set(path.parts)
        and not any(part.startswith(".") for part in path.relative_to(project.folder).parts)
    }  # fmt: skip


def nothing_to_do(project: Project) -> None:
    """Both tools say so."""
    assert project.planned("train") == {}
    assert "up to date" in project.must("dvc", "status")


@pytest.fixture(scope="module")
def built(tmp_path_factory, planner) -> Project:
    project = create(tmp_path_factory.mktemp("stored") / "project", "nano", planner)
    begin(project)
    return project


@pytest.fixture
def stored(built: Project, tmp_path: Path) -> Project:
    """A project that was built, committed and pushed."""
    return copy_with_remote(built, tmp_path)


@pytest.fixture(scope="module")
def _restored(built: Project) -> Project:
    project = clone(built, "restored")
    zerotrain(project, "restore")
    return project


@pytest.fixture
def restored(_restored: Project, tmp_path: Path) -> Project:
    """A fresh clone in which everything was brought back."""
    return _restored.copy_to(tmp_path / "restored")


def test_dvc_restore_brings_everything_back(stored):
    """On a fresh clone one command brings the same bytes back, runs no stage, and leaves both tools
    with nothing to do; called again it brings nothing."""
    project = clone(stored)
    assert not (project.folder / "results").exists()
    said = zerotrain(project, "restore")
    assert "nothing to do" in said
    assert project.calls() == []
    assert hashes(project) == hashes(stored)
    assert {part for name in hashes(project) for part in Path(name).parts} >= set(EVERY_PART)
    nothing_to_do(project)
    assert "up to date" in project.must("dvc", "repro")
    assert project.must("git", "status", "--short") == ""
    assert "brought back: 0 of" in zerotrain(project, "restore")


@pytest.mark.slow
def test_dvc_restore_brings_a_removed_run_back_until_gc(stored):
    """`zerotrain remove` says what DVC's cache holds of a run; without dvc.yaml `dvc gc` frees it.
    Snakemake's --delete-all-output removes manifests and metrics alone."""
    before = hashes(stored)
    other = stored.copy_to(stored.folder.with_name("other"))
    other.must("snakemake", "--cores", "1", "--delete-all-output", "train")
    removed = {Path(name).name for name in {*before} - {*hashes(other)}}
    assert removed == {"manifest.json", "metrics.json"}
    said = zerotrain(stored, "remove", "tiny", "--data", "--yes")
    found = re.search(r"(\S+ [kMG]B) in DVC's cache, copies of (\d+) of its outputs", said)
    assert found, said
    assert int(found[2]) == len([name for name in stored_outputs(stored) if "results/" in name])
    assert not [*(stored.folder / "results").rglob("manifest.json")]
    zerotrain(stored, "restore")
    assert hashes(stored) == before
    zerotrain(stored, "remove", "tiny", "--data", "--yes")
    assert stored.planned("train") == EVERYTHING
    (stored.folder / "dvc.yaml").unlink()
    stored.must("dvc", "gc", "-w", "-f")
    objects = [*(stored.folder / ".dvc/cache/files").rglob("*")]
    assert not [path for path in objects if path.is_file()]


def stored_outputs(project: Project) -> list[str]:
    """The outputs that dvc.lock lists with a hash."""
    stages = yaml.safe_load((project.folder / "dvc.lock").read_text())["stages"]
    return [out["path"] for one in stages.values() for out in one.get("outs", []) if "md5" in out]


BUT_THE_BASE = {stage: count for stage, count in EVERYTHING.items() if stage != "build_base"}
EDITS: dict[str, tuple[Callable, Jobs]] = {
    "how images are sampled": (config("guidance_scale: 3.0", "guidance_scale: 2.0"), EVALUATIONS),
    "the end of the last phase": (config("until: 700", "until: 800"), ONE_PHASE),
    "how weights are exported": (
        config("dtype: fp32", "dtype: bf16"),
        # The second phase begins with the state that the first one's export wrote.
        EVALUATIONS | {"train_phase": 1, "export_weights": 2},
    ),
    # A preset that is built stays as it is.
    "an image": (rewrite("photos/cat.png", "another cat"), BUT_THE_BASE),
    "a caption": (rewrite("photos/dog.txt", "an old dog\n"), BUT_THE_BASE),
    "a version": (raised("report"), {"report": 1}),
    "a value of training": (config("1.0e-3", "2.0e-3"), FROM_LAUNCH),
    "a comment": (lambda project: project.append(CONFIG, "# a remark\n"), NOTHING),
}


@pytest.mark.soak  # test_graph.py has every kind after a build, where no restore was
@pytest.mark.parametrize("edit", EDITS)
def test_dvc_restore_leaves_each_edit_its_dependents(edit, restored):
    """After a restore an edit reruns each job that depends on it and no other, in both tools."""
    act, expected = EDITS[edit]
    act(restored)
    assert restored.planned("train") == expected
    restored.must("dvc", "repro", "-q")
    assert Counter(restored.calls()) == expected
    nothing_to_do(restored)


@pytest.mark.soak
def test_dvc_restore_without_remote_takes_the_cache(stored):
    """What the cache holds needs no remote: results that were removed come back from it."""
    stored.must("dvc", "remote", "remove", "-q", "shelf")
    before = hashes(stored)
    shutil.rmtree(stored.folder / "results")
    assert "nothing to do" in zerotrain(stored, "restore")
    assert hashes(stored) == before


def object_of(project: Project, store: Path) -> Path:
    """Where the first phase's weights lie in a cache or remote."""
    weights = project.folder.with_name("project") / "results/tiny/plain/weights/payload.bin"
    md5 = hashlib.md5(weights.read_bytes()).hexdigest()
    return store / "files/md5" / md5[:2] / md5[2:]


def spoil(path: Path) -> None:
    """As a copy that was cut off leaves it."""
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:5])


@pytest.mark.parametrize("harm", ["spoiled", pytest.param("emptied", marks=pytest.mark.soak)])
def test_dvc_restore_repairs_the_cache(harm, stored):
    """What the cache has lost or spoiled comes from the remote, where results lie here too."""
    before = hashes(stored)
    if harm == "spoiled":
        spoil(object_of(stored, stored.folder / ".dvc/cache"))
        shutil.rmtree(stored.folder / "results/tiny/plain")
    else:
        shutil.rmtree(stored.folder / ".dvc/cache")
    assert "nothing to do" in zerotrain(stored, "restore")
    assert hashes(stored) == before


@pytest.mark.soak
def test_dvc_restore_names_the_configuration(stored):
    """Where dvc.yaml is of another run, the command that is reported is that run's."""
    shutil.copy(stored.folder / CONFIG, stored.folder / "config/b.yaml")
    zerotrain(stored, "dvc", "generate", "config/b.yaml")
    said = zerotrain(stored, "restore", code=1)
    assert "`snakemake --cores all train --configfile config/b.yaml` does it" in said


def test_dvc_restore_is_called_from_the_top(stored):
    """Below it nothing is looked for, and no revision checked out: the way up is reported."""
    inner = Project(stored.folder / "config", stored.server)
    inner.environment = stored.environment
    head = stored.must("git", "log", "-1", "--format=%D")
    for words in (["restore"], ["restore", "HEAD~1"], ["data", "add", "../photos"]):
        assert f"`cd {stored.folder}`" in zerotrain(inner, *words, code=2)
    assert stored.must("git", "log", "-1", "--format=%D") == head


@pytest.fixture(scope="module")
def _trained_twice(built: Project, tmp_path_factory) -> Project:
    project = copy_with_remote(built, tmp_path_factory.mktemp("twice"))
    project.edit(CONFIG, "learning_rate: 1.0e-3", "learning_rate: 2.0e-3")
    project.build("train")
    commit(project, "faster")
    project.must("dvc", "push", "-q")
    project.calls()
    return project


@pytest.fixture
def twice(_trained_twice: Project, tmp_path: Path) -> Project:
    """A project like `stored`, trained again to other weights, which are committed and pushed."""
    return copy_with_remote(_trained_twice, tmp_path)


def trainings(project: Project) -> tuple[str, str]:
    """The commits that hold the two trainings, the first one and the one after it."""
    second, first = project.must("git", "log", "--format=%H", "--", "dvc.lock").split()
    return first, second


def test_dvc_restore_takes_a_revision(built, twice):
    """A revision is checked out on no branch, and its own results come back."""
    before = hashes(built)
    first, _ = trainings(twice)
    head = twice.must("git", "rev-parse", "HEAD")
    assert hashes(twice) != before
    twice.must("git", "checkout", "-q", "--detach")
    said = zerotrain(twice, "restore", first[:8])
    assert "nothing to do" in said
    assert twice.must("git", "rev-parse", "HEAD").strip() == first
    assert twice.must("git", "branch", "--show-current").strip() == ""
    assert hashes(twice) == before
    assert twice.calls() == []
    nothing_to_do(twice)
    twice.must(*said.partition("; `")[2].partition("` goes back")[0].split())
    assert twice.must("git", "rev-parse", "HEAD") == head


@pytest.mark.parametrize("change", ["edit", "dvc.lock"])
def test_dvc_restore_refuses_uncommitted_changes(change, stored):
    """A revision is not checked out over changes that no commit holds; they are named."""
    name = CONFIG if change == "edit" else "dvc.lock"
    if change == "edit":
        stored.must("git", "commit", "-q", "--allow-empty", "-m", "second")
        stored.append(CONFIG, "# a remark\n")
    else:
        stored.must("git", "rm", "-q", "--cached", "dvc.lock")
        stored.must("git", "commit", "-q", "-m", "forgotten")
    head = stored.must("git", "rev-parse", "HEAD")
    said = zerotrain(stored, "restore", "HEAD~1", code=2)
    assert f"{name}: changed here and not committed" in said
    assert stored.must("git", "rev-parse", "HEAD") == head


@pytest.mark.parametrize("phase", [pytest.param("plain", marks=pytest.mark.soak), "offload"])
def test_dvc_weights_are_found_by_their_content(phase, built, twice, tmp_path):
    """A file of weights copied to another folder leads to the commit, the stage, the phase and
    the values and hashes that made it, in a clone that has fetched nothing; and that commit
    comes back."""
    weights = f"results/tiny/{phase}/weights"
    old = tmp_path / "old.safetensors"
    shutil.copy2(built.folder / weights / "payload.bin", old)
    before = hashes(built)
    first, second = trainings(twice)
    new = shutil.copytree(twice.folder / weights, tmp_path / "new")
    lock = yaml.safe_load((twice.folder / "dvc.lock").read_text())["stages"]
    project = clone(twice)
    head = project.must("git", "rev-parse", "HEAD")
    for path, made_by, rate in ((old, first, 0.001), (new, second, 0.002)):
        said = zerotrain(project, "restore", "--find-only", str(path))
        assert project.must("git", "show", "-s", "--format=%h of %cs", made_by).strip() in said
        assert f"output  {weights}\n" in said
        assert f"stage   export_weights\nphase   {phase}\n" in said
        assert f"{CONFIG}: train = " in said
        assert f'"learning_rate": {rate}' in said
    for stage in ("prepare_dataset", f"train_phase-{phase}", f"export_weights-{phase}"):
        assert f"{stage}:\n" in said
        for dep in lock[stage]["deps"]:
            assert f"  {dep['path']}  md5 {dep['md5']}\n" in f"{said}\n"
    assert ("train_phase-offload:" in said) == (phase == "offload")
    assert project.must("git", "rev-parse", "HEAD") == head
    assert not (project.folder / "results").exists()

    assert "nothing to do" in zerotrain(project, "restore", str(old))
    assert project.must("git", "rev-parse", "HEAD").strip() == first
    assert hashes(project) == before


@pytest.mark.soak
def test_dvc_weights_are_found_on_another_branch(twice, tmp_path):
    """The history of all branches is looked through, not of one alone; what no commit holds yet is
    found as well."""
    stored, weights = twice, "results/tiny/offload/weights"
    first, aside = trainings(stored)
    stored.must("git", "switch", "-q", "-c", "aside")
    stored.must("git", "branch", "-q", "--force", "main", first)
    of_branch = shutil.copytree(stored.folder / weights, tmp_path / "of_branch")
    stored.must("git", "switch", "-q", "main")
    said = zerotrain(stored, "restore", "--find-only", str(of_branch))
    assert stored.must("git", "show", "-s", "--format=%h of %cs", aside).strip() in said
    assert "nothing to do" in zerotrain(stored, "restore", "aside")
    assert stored.must("git", "rev-parse", "HEAD").strip() == aside

    stored.edit(CONFIG, "learning_rate: 2.0e-3", "learning_rate: 4.0e-3")
    stored.build("train")
    said = zerotrain(stored, "restore", "--find-only", weights)
    assert "not committed yet" in said
    assert '"learning_rate": 0.004' in said


def test_dvc_unknown_weights_are_no_error_of_ours(twice, tmp_path):
    """Weights from another program: a sentence that says how many commits were looked at."""
    path = tmp_path / "other.safetensors"
    path.write_bytes(b"not ours")
    said = zerotrain(twice, "restore", str(path), code=2)
    assert f"{path}: recorded in none of the 2 commits that changed dvc.lock" in said


def write(project: Project, name: str, content: str) -> None:
    """A file that lies in the way."""
    path = project.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


MODIFY = ("dvc", "remote", "modify", "-q", "shelf")
# Of another host nothing is known: its owner counts as alive.
FAR = json.dumps(
    {"host": "far", "pid": 7, "started": 1.0, "job": "", "restart": 0, "cluster": "", "user": 0,
     "boot": "", "pid_namespace": 0, "lease": 0}
)  # fmt: skip
UNSAVED = ("results/tiny/plain/weights/payload.bin", "of hours")
REFUSALS: dict[str, tuple[Callable[[Project], object], str, str]] = {
    "no lock": (lambda it: (it.folder / "dvc.lock").unlink(),
        "dvc.lock: not here", "dvc push"),
    "empty lock": (lambda it: write(it, "dvc.lock", ""),
        "dvc.lock: empty", "git checkout -- dvc.lock"),
    "merge": (lambda it: it.edit("dvc.lock", "stages:\n", "<<<<<<< HEAD\nstages:\n"),
        "dvc.lock: a merge has left its marks", "git checkout --ours -- dvc.lock"),
    "no remote": (lambda it: it.must("dvc", "remote", "remove", "-q", "shelf"),
        "no remote is set", "dvc remote add --default"),
    "remote gone": (lambda it: remote_of(it).rename(it.folder.with_name("elsewhere")),
        "not wholly on the remote shelf at /", "dvc push"),
    "object gone": (lambda it: object_of(it, remote_of(it)).unlink(),
        "results/tiny/plain/weights: not wholly on the remote", "push"),
    "no library": (lambda it: it.must(*MODIFY, "url", "oss://nowhere/at/all"),
        "requires 'dvc-oss' to be installed", "dvc remote list"),
    "training": (lambda it: write(it, "results/tiny/plain/progress/lock", FAR),
        "a training is running here: pid 7 on far", "progress/stop"),
    "snakemake": (lambda it: write(it, ".snakemake/locks/0.input.lock", ""),
        "snakemake is running", "snakemake --unlock"),
    "unsaved": (lambda it: write(it, *UNSAVED),
        "results/tiny/plain/weights/payload.bin: would be", "--force"),
    "no data": (lambda it: shutil.rmtree(it.folder / "photos"),
        "photos: not here, and DVC does not hold it", "zerotrain data add"),
    "not DVC": (lambda it: shutil.rmtree(it.folder / ".dvc"),
        "no .dvc folder here", "dvc init"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSALS)
def test_dvc_restore_refuses_with_a_hint(reason, stored):
    """Whatever is missing or in the way is a sentence; nothing that lay here is lost."""
    harm, sentence, hint = REFUSALS[reason]
    project = clone(stored)
    harm(project)
    before = hashes(project) if (project.folder / "results").exists() else {}
    error, _, advice = zerotrain(project, "restore", code=2).partition("  Hint: ")
    assert sentence in error
    assert hint in advice
    if reason != "no data":
        assert (hashes(project) if before else {}) == before


@pytest.mark.soak
def test_dvc_restore_replaces_what_it_is_asked_to(stored):
    """--force: a result that was never stored makes room."""
    project = clone(stored)
    write(project, *UNSAVED)
    assert "nothing to do" in zerotrain(project, "restore", "--force")
    assert hashes(project) == hashes(stored)


def test_dvc_restore_needs_dvc(stored):
    """Without DVC there is a sentence."""
    blocked = stored.folder.with_name("blocked")
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'dvc' else find(name, *a)\n"
    )
    path = f"{blocked}:{stored.environment['PYTHONPATH']}"
    assert "DVC is not installed" in zerotrain(stored, "restore", code=2, PYTHONPATH=path)


def test_dvc_restore_asks_what_is_meant(stored):
    """A word that is nothing, or two things, is not guessed at."""
    stored.must("git", "branch", "photos")
    for words, sentence in (
        (["no-such"], "no-such: neither a file or folder nor a revision of git"),
        (["--find-only"], "--find-only: nothing is no weights file or folder"),
        (["--find-only", "main"], "--find-only: main is no weights file or folder"),
        (["photos"], "photos: a file or folder here, and a revision of git"),
    ):
        assert sentence in zerotrain(stored, "restore", *words, code=2)


def test_dvc_restore_says_what_is_left(stored):
    """A commit whose training was not finished: its stages and the reasons, exit code 1."""
    stored.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    commit(stored, "edited and not run")
    said = zerotrain(clone(stored), "restore", code=1)
    assert "dvc: evaluate-plain: changed deps: " in said
    assert "snakemake: evaluate-plain: " in said
    assert "train_phase" not in said


@pytest.mark.soak
def test_dvc_data_add_tracks_a_folder(stored):
    """A user's folder goes to DVC with a line for the configuration; on a fresh clone it comes back
    with all the rest. Called again it says that nothing has changed, or renews."""
    stored.must("git", "rm", "-rq", "--cached", "photos")
    said = zerotrain(stored, "data", "add", "photos")
    assert "wrote photos.dvc" in said
    assert "git add photos.dvc .gitignore" in said
    assert "config: data.images: photos" in said
    nothing_to_do(stored)
    commit(stored, "photos by DVC")
    stored.must("dvc", "push", "-q")
    project = clone(stored)
    assert not (project.folder / "photos").exists()
    assert "nothing to do" in zerotrain(project, "restore")
    assert hashes(project, "photos") == hashes(stored, "photos")

    tracked = (project.folder / "photos.dvc").read_text()
    assert "unchanged" in zerotrain(project, "data", "add", "photos")
    assert (project.folder / "photos.dvc").read_text() == tracked
    (project.folder / "photos" / "cow.png").write_bytes(b"pixels of a cow")
    assert "renewed photos.dvc" in zerotrain(project, "data", "add", "photos/")
    assert (project.folder / "photos.dvc").read_text() != tracked


def test_dvc_data_add_prints_commands_that_work(stored):
    """Of a name with spaces and beyond ASCII too; links that DVC itself makes are no mistake."""
    stored.must("dvc", "config", "--local", "cache.type", "symlink")
    image = stored.folder / "meine Kätzchen" / "a b.png"
    image.parent.mkdir()
    image.write_bytes(b"a cat")
    said = zerotrain(stored, "data", "add", image.parent.name)
    assert image.is_symlink()
    stored.must("sh", "-c", said.partition("then: ")[2].partition("\n")[0])
    added = stored.must("git", "diff", "-z", "--cached", "--name-only").split("\0")
    assert added == [".gitignore", "meine Kätzchen.dvc", ""]
    assert "unchanged" in zerotrain(stored, "data", "add", image.parent.name)


@pytest.fixture(scope="module")
def refusing(built: Project, tmp_path_factory) -> Project:
    """A copy with folders that `data add` refuses; one of them is tracked already."""
    project = built.copy_to(tmp_path_factory.mktemp("refusing") / "project")
    (project.folder / "link").symlink_to("photos")
    for name, target in (("linked", "../photos/cat.png"), ("dangling", "nowhere")):
        (project.folder / name).mkdir()
        (project.folder / name / "cat.png").symlink_to(target)
    (project.folder / "empty").mkdir()
    inner = project.folder / "own" / "inner" / "a.png"
    inner.parent.mkdir(parents=True)
    inner.write_bytes(b"a")
    zerotrain(project, "data", "add", "own")
    return project


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("no-such", "no-such: no such folder"),
        ("..", "not a folder inside the project"),
        (".", "not a folder inside the project"),
        ("link", "link: a link to"),
        ("photos", "4 files of it are tracked by git, photos/cat.png among them"),
        ("results/tiny/plain/weights", "is made by the stage export_weights-plain already"),
        ("results/tiny", "is made by the stage"),
        ("own/inner", "own is tracked by own.dvc already"),
        ("empty", "empty: an empty folder"),
        ("linked", "linked/cat.png: a link to"),
        ("dangling", "dangling/cat.png: a link to"),
    ],
)
def test_dvc_data_add_refuses(folder, sentence, refusing):
    """What lies outside, or is another's already, is refused with a hint."""
    status = refusing.must("git", "status", "--short")
    error, _, hint = zerotrain(refusing, "data", "add", folder, code=2).partition("  Hint: ")
    assert sentence in error
    assert hint
    assert refusing.must("git", "status", "--short") == status
