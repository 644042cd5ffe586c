"""When Snakemake's books and DVC's are made to agree, and when either is left alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import yaml
from tests.workflow.conftest import create
from tests.workflow.jobs import raised

pytestmark = pytest.mark.slow  # each begins with a run under DVC, which takes seconds to make

CONFIG = "config/config.yaml"
MORE = "  - {name: more, until: 900, launch: torch}\n"
LAUNCH = "results/tiny/plain/launch/manifest.json"


@pytest.fixture(scope="session")
def made(tmp_path_factory, planner):
    """A run under git and DVC that Snakemake alone has made."""
    project = create(tmp_path_factory.mktemp("agreed") / "project", "nano", planner)
    for words in (
        ("python", "-m", "zerotrain", "dvc", "generate"),
        ("git", "init", "-q", "."),
        ("git", "add", "."),
        ("snakemake", "--cores", "2", "train"),
    ):
        project.must(*words)
    project.calls()
    return project


@pytest.fixture
def agreed(made, tmp_path):
    """A copy of it."""
    return made.copy_to(tmp_path / "project")


def clean(project) -> bool:
    return "up to date" in project.command("dvc", "status").stdout


def stale(project) -> set[str]:
    """The stages that DVC would run."""
    return set(json.loads(project.command("dvc", "status", "--json").stdout))


def test_after_snakemake_alone_dvc_has_nothing_to_do(agreed):
    """Its status is clean and a reproduction calls no stage; an edit that changes no value is
    entered though no job runs."""
    assert clean(agreed)
    assert "up to date" in agreed.command("dvc", "repro").stdout
    assert agreed.calls() == []
    agreed.edit(CONFIG, "  learning_rate: 1.0e-3", "  learning_rate: 1.0e-3\n  keep: 2")
    assert not clean(agreed)
    said = agreed.must("snakemake", "--cores", "2", "train")
    assert "Nothing to be done" in said
    assert clean(agreed)


@pytest.mark.soak
def test_dvc_a_folder_that_was_made_again_leaves_nothing_to_do(agreed):
    """Neither to Snakemake nor to DVC, which never entered the damaged one."""
    locked = (agreed.folder / "dvc.lock").read_bytes()
    (agreed.folder / "results/tiny/plain/weights/payload.bin").write_bytes(b"cut")
    agreed.build("train")
    assert agreed.calls() == ["export_weights"]
    assert agreed.planned("train") == {}
    assert clean(agreed)
    assert (agreed.folder / "dvc.lock").read_bytes() == locked


@pytest.mark.soak
def test_an_edited_caption_leaves_the_base_of_a_preset_alone(agreed):
    """Whichever program runs: each continues where the other ended, and both agree on the end."""
    agreed.edit("photos/cat.txt", "a cat", "a cat that sleeps")
    expected = agreed.planned("train")
    assert "build_base" not in expected
    by_dvc = {"prepare_dataset": 1, "cache_latents": 1}
    agreed.must("dvc", "repro", "--quiet", "cache_latents-64")
    assert Counter(agreed.calls()) == by_dvc
    rest = Counter(expected) - Counter(by_dvc)
    assert agreed.planned("train") == rest
    agreed.build("train")
    assert Counter(agreed.calls()) == rest
    assert clean(agreed)
    assert agreed.planned("train") == {}


def test_new_content_under_an_old_time_is_seen(agreed):
    """As `rsync -a` or `tar` leave it: by Snakemake's own rules nothing would run."""
    photo = agreed.folder / "photos" / "cat.png"
    photo.write_bytes(b"another cat")
    os.utime(photo, (10**9, 10**9))
    assert agreed.planned("train")["prepare_dataset"] == 1


def test_a_dry_run_enters_nothing(agreed):
    """It says what would be done, and leaves dvc.lock as it is."""
    agreed.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    before = (agreed.folder / "dvc.lock").read_bytes()
    assert agreed.planned("train") == {"evaluate": 2, "report": 1}
    assert (agreed.folder / "dvc.lock").read_bytes() == before


@pytest.mark.soak
def test_a_part_of_the_run_enters_that_part(agreed):
    """What was not asked for stays as stale as it is."""
    agreed.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    agreed.edit(CONFIG, "learning_rate: 1.0e-3", "learning_rate: 2.0e-3")
    agreed.build("launch")
    status = agreed.command("dvc", "status").stdout
    assert "render_launch" not in status.replace("results/tiny", "")
    assert "train_phase-plain:" in status
    assert "evaluate-plain:" in status


def test_a_failed_run_enters_what_it_made(agreed):
    """The stages before the one that failed are clean; the failed one is not."""
    agreed.edit(CONFIG, "learning_rate: 1.0e-3", "learning_rate: 2.0e-3")
    failing = agreed.snakemake("--cores", "1", "--keep-going", "train", FAIL="export_weights")
    assert failing.returncode == 1
    left = stale(agreed)
    assert {"render_launch-plain", "render_launch-offload", "train_phase-plain"}.isdisjoint(left)
    assert "export_weights-plain" in left


@pytest.mark.parametrize("missing", [".dvc", ".git", "dvc.yaml", "another run"])
def test_without_dvc_snakemake_is_left_alone(agreed, missing):
    """Nothing is entered or reported; the run continues as always."""
    if missing == "another run":
        agreed.edit("dvc.yaml", "Generated", "Written")
        text = (agreed.folder / "dvc.yaml").read_text()
        others = text.replace("--cores all", "--cores all --configfile config/b.yaml")
        (agreed.folder / "dvc.yaml").write_text(others)
    elif (agreed.folder / missing).is_dir():
        shutil.rmtree(agreed.folder / missing)
    else:
        (agreed.folder / missing).unlink()
    before = (agreed.folder / "dvc.lock").read_bytes()
    agreed.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    said = agreed.must("snakemake", "--cores", "2", "train")
    assert "WARNING" not in said
    assert sorted(agreed.calls()) == ["evaluate", "evaluate", "report"]
    assert (agreed.folder / "dvc.lock").read_bytes() == before


def test_a_run_that_lives_is_not_disturbed(agreed):
    """Its outputs come and go while another snakemake looks: nothing is settled meanwhile."""
    book = agreed.folder / ".snakemake" / "agreement.json"
    process = {"pid": os.getppid(), "host": socket.gethostname()}
    process["began"] = psutil.Process(process["pid"]).create_time()
    process["given"] = ""
    book.write_text(json.dumps({**json.loads(book.read_text()), "running": process}))
    manifest = agreed.folder / LAUNCH
    manifest.write_text(manifest.read_text() + "\n")
    noted = book.read_bytes()
    agreed.planned("train")
    assert book.read_bytes() == noted
    assert manifest.stat().st_mtime > time.time() - 600


@pytest.mark.soak
def test_outputs_that_dvc_brought_back_are_distinguished_from_others(agreed):
    """After `dvc checkout` nothing is to do; an output that no one made is made again."""
    shutil.rmtree(agreed.folder / "results")
    shutil.rmtree(agreed.folder / ".snakemake")
    assert agreed.command("dvc", "checkout").returncode == 0
    code, said = agreed.forked("--cores", "2", "train")
    assert (code, agreed.calls()) == (0, []), said
    assert "not entered" not in said  # records were written, and nothing was edited
    assert clean(agreed)
    assert agreed.planned("train") == {}
    grid = agreed.folder / "results/tiny/plain/evaluation/manifest.json"
    grid.write_text(grid.read_text().replace("evaluation", "invention"))
    assert agreed.planned("train") == {"evaluate": 1, "report": 1}
    assert Path(grid).exists()


def test_what_is_edited_while_a_stage_runs_is_not_taken_for_what_it_was_made_from(agreed):
    """Neither tool blesses the outputs: the stages that took it in are made again."""
    raised("evaluate")(agreed)
    edit = f"evaluate|{CONFIG}|_scale: 3|_scale: 2"
    agreed.must("snakemake", "--cores", "1", "train", EDIT=edit)
    assert agreed.planned("train") == {"evaluate": 2, "report": 1}
    assert {"evaluate-plain", "evaluate-offload"} <= stale(agreed)


@pytest.mark.soak
def test_dvc_yaml_follows_the_graph(agreed):
    """A phase more: after snakemake, dvc.yaml and dvc.lock have it; a raised version is seen."""
    agreed.edit(CONFIG, "launch: zero2_offload\n", "launch: zero2_offload\n" + MORE)
    agreed.build("train")
    assert "train_phase-more:" in (agreed.folder / "dvc.lock").read_text()
    assert clean(agreed)
    raised("report")(agreed)
    assert stale(agreed) == {"report"}


@pytest.mark.soak
def test_dvc_sees_a_value_that_is_given_for_the_first_time(agreed):
    """It depends on values that stand in the file; one stage depends on all and says that others
    have come."""
    agreed.append(CONFIG, "cache:\n  dtype: fp16\n")
    done = agreed.command("dvc", "repro")
    assert done.returncode != 0
    assert "`zerotrain dvc generate config/config.yaml`" in done.stdout
    assert agreed.calls() == []
    assert agreed.planned("train")["cache_latents"] == 1
    assert agreed.command("python", "-m", "zerotrain", "dvc", "generate").returncode == 0
    assert agreed.command("dvc", "repro", "cache_latents-64").returncode == 0
    assert agreed.calls() == ["cache_latents"]
    assert agreed.planned("train")["train_phase"] == 2


def test_an_edit_before_a_kill_is_not_blessed_after_it(agreed):
    """What was edited while a stage ran is known from the records alone."""
    raised("evaluate")(agreed)
    words, edit = ("snakemake", "--cores", "1", "train"), f"evaluate|{CONFIG}|_scale: 3|_scale: 2"
    process = agreed.hang("report", *words, EDIT=edit)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert agreed.snakemake("--unlock").returncode == 0
    agreed.calls()
    assert agreed.planned("train") == {"evaluate": 2, "report": 1}


def test_a_missing_output_is_made_again_and_dvc_has_nothing_to_do(agreed):
    """By its job alone, whatever else was saved meanwhile: no stage counts as edited for it."""
    weights = agreed.folder / "results/tiny/plain/weights/payload.bin"
    whole = weights.read_bytes()
    weights.unlink()
    agreed.append(CONFIG, "# a comment\n")
    code, said = agreed.forked("--cores", "2", "train")
    assert (code, agreed.calls()) == (0, ["export_weights"]), said
    assert "not entered" not in said
    assert weights.read_bytes() == whole
    assert clean(agreed)


def test_a_damaged_output_does_not_replace_the_stored_one(agreed):
    """Planning sees neither size nor time of it: what is under a manifest is compared with what DVC
    stored, and the stored files come back."""
    weights = agreed.folder / "results/tiny/plain/weights/payload.bin"
    whole, before = weights.read_bytes(), weights.stat()
    weights.write_bytes(bytes(len(whole)))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    agreed.append(CONFIG, "# a comment\n")
    said = agreed.must("snakemake", "--cores", "2", "train")
    assert "results/tiny/plain/weights: other files under the manifest" in said
    assert "export_weights-plain" in agreed.command("dvc", "status").stdout
    assert agreed.command("dvc", "checkout", "--force").returncode == 0
    assert weights.read_bytes() == whole
    code, said = agreed.forked("--cores", "2", "train")
    assert (code, agreed.calls()) == (0, []), said
    assert clean(agreed)


@pytest.mark.soak
def test_what_could_not_be_done_is_done_by_the_next_call(agreed):
    """While DVC is at work, neither is settled nor entered: snakemake says so and continues. The
    next call does both."""
    lock = agreed.folder / ".dvc" / "tmp" / "lock"
    lock.unlink(missing_ok=True)
    lock.mkdir(parents=True)
    preset = agreed.folder / "config/launch/torch.yaml"
    preset.write_text(preset.read_text() + "# edited\n")
    os.utime(preset, (10**9, 10**9))
    said = agreed.must("snakemake", "--cores", "2", "train")
    assert "could not be made to agree" in said
    agreed.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    agreed.calls()
    lock.rmdir()
    agreed.build("train")
    assert {"render_launch", "evaluate"} <= set(agreed.calls())
    assert clean(agreed)
    lock.unlink(missing_ok=True)
    lock.mkdir()
    agreed.edit(CONFIG, "guidance_scale: 2.0", "guidance_scale: 4.0")
    said = agreed.must("snakemake", "--cores", "2", "train")
    assert "dvc.lock was not brought up to date" in said
    lock.rmdir()
    agreed.build("train")
    assert clean(agreed)


@pytest.mark.soak
def test_a_stage_that_comes_back_is_judged_again(agreed):
    """dvc.lock has it from before; what it was made from is not what it would be made from now."""
    text = (agreed.folder / CONFIG).read_text()
    phase = "  - name: offload\n    until: 700\n    launch: zero2_offload\n"
    (agreed.folder / CONFIG).write_text(text.replace(phase, ""))
    agreed.must("snakemake", "--cores", "2", "train")
    (agreed.folder / CONFIG).write_text(text.replace("until: 700", "until: 650"))
    for path in agreed.folder.glob("results/tiny/**/m*.json"):
        path.touch()
    assert agreed.planned("train")["train_phase"] == 1


@pytest.mark.parametrize(
    "flag", ["--touch", pytest.param("--drop-metadata", marks=pytest.mark.soak)]
)
def test_a_run_that_notes_nothing_enters_nothing(flag, agreed):
    """`snakemake --touch` says that stale outputs are right, and dvc.lock goes to others."""
    before = (agreed.folder / "dvc.lock").read_bytes()
    agreed.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    printed = agreed.must("snakemake", "--cores", "1", flag, "train")
    assert "Traceback" not in printed
    assert (agreed.folder / "dvc.lock").read_bytes() == before


@pytest.mark.soak
def test_progress_that_was_deleted_keeps_nothing_else_from_being_entered(agreed):
    """It frees space, and a finished phase needs none."""
    shutil.rmtree(agreed.folder / "results/tiny/plain/progress")
    agreed.build("train")
    agreed.edit(CONFIG, "guidance_scale: 3.0", "guidance_scale: 2.0")
    agreed.build("train")
    assert clean(agreed)


@pytest.mark.soak
def test_a_look_from_another_branch_leaves_what_was_right(agreed):
    """Planned for other values, then for the ones that the outputs were made for: nothing to do."""
    shutil.rmtree(agreed.folder / ".snakemake")
    shutil.rmtree(agreed.folder / "results")
    assert agreed.command("dvc", "checkout").returncode == 0
    files = [agreed.folder / name for name in (CONFIG, "dvc.lock")]
    former = [path.read_bytes() for path in files]
    agreed.edit(CONFIG, "learning_rate: 1.0e-3", "learning_rate: 2.0e-3")
    lock = files[1].read_text()
    files[1].write_text(lock.replace("learning_rate: 0.001", "learning_rate: 0.009"))
    assert agreed.planned("train")["train_phase"] == 2
    for path, content in zip(files, former, strict=True):
        path.write_bytes(content)
    assert agreed.planned("train") == {}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("dvc.yaml", "<<<<<<< HEAD\nstages: {}\n=======\n"),
        pytest.param(".snakemake/agreement.json", '{"looked": "x"}', marks=pytest.mark.soak),
        (".snakemake/agreement.json", '{"running": {"pid": 1}}'),
    ],
)
def test_files_that_cannot_be_read_stop_no_one(agreed, file, content):
    """A merge that was left half done, a book of another version: snakemake works all the same."""
    (agreed.folder / file).write_text(content)
    said = agreed.must("snakemake", "--cores", "2", "train")
    assert "Nothing to be done" in said
    assert ("WARNING: DVC is left aside: " in said) == (file == "dvc.yaml")


@pytest.mark.soak
def test_a_stage_of_ones_own_stays_in_dvc_yaml(agreed):
    """Written again, the file keeps what was not generated."""
    own = "  mine:\n    cmd: echo don't\n    deps:\n    - photos\n"
    agreed.edit("dvc.yaml", "stages:\n", f"stages:\n{own}")
    agreed.edit(CONFIG, "launch: zero2_offload\n", "launch: zero2_offload\n" + MORE)
    said = agreed.must("snakemake", "--cores", "2", "train")
    assert "dvc.yaml: written again" in said
    stages = yaml.safe_load((agreed.folder / "dvc.yaml").read_text())["stages"]
    assert stages["mine"] == {"cmd": "echo don't", "deps": ["photos"]}
    assert "train_phase-more" in stages
    assert agreed.command("python", "-m", "zerotrain", "dvc", "check").returncode == 0
