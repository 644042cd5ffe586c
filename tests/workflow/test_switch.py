"""`zerotrain switch` through the real Snakemake: after it, nothing that is trained trains again."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.builders.states import publish_checkpoint
from tests.workflow.conftest import create

CONFIG = "config/config.yaml"


def wait_for_end(project) -> None:
    """Wait until no process works in the project's folder."""

    def works(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.cwd() == str(project.folder)
        return False

    while any(map(works, psutil.process_iter())):
        time.sleep(0.05)


REST = {"render_launch": 1, "train_phase": 1, "export_weights": 1, "evaluate": 1, "report": 1}
CUT = "  - name: plain\n    until: 300\n    launch: torch\n  - name: offload\n"
AFTER = """\
  - name: plain
    until: 250
    launch: torch
  - name: plain-zero2
    until: 300
    launch: zero2
  - name: offload
"""


def save(project, phase: str, *steps: int, preset: str = "torch") -> Path:
    """Rolling checkpoints that do not say what they trained."""
    progress = project.folder / "results/tiny" / phase / "progress"
    for step in steps:
        publish_checkpoint(
            progress / f"step-{step:08d}", step, run="tiny", phase=phase, engine={"preset": preset}
        )
    return progress


def switch(project, *words: str, code: int = 0) -> str:
    """What the command prints, as a user runs it; its stages are the fake's."""
    return project.must("python", "-m", "zerotrain", "switch", "tiny", *words, code=code)


def stop_in(project, phase: str) -> None:
    """Make everything before a phase, and let the phase have been stopped."""
    results = "results/tiny"
    inputs = ["results/data/tiny/cache/64/manifest.json", f"{results}/{phase}/launch/manifest.json"]
    if phase == "offload":
        parts = ("state", "weights", "checkpoint")
        inputs += [f"{results}/plain/{part}/manifest.json" for part in parts]
    project.build("--", *inputs)
    project.calls()


@pytest.fixture(scope="module")
def _stopped(tmp_path_factory, planner):
    project = create(tmp_path_factory.mktemp("stopped") / "project", "nano", planner)
    stop_in(project, "plain")
    save(project, "plain", 250)
    return project


@pytest.fixture
def stopped(_stopped, tmp_path):
    """A project whose first phase was stopped at step 250 of 300."""
    return _stopped.copy_to(tmp_path / "project")


@pytest.mark.slow
def test_switch_of_a_stopped_phase(project):
    """Three jobs end the first phase; the configuration has the new one after it; what is left are
    the new phase, the one after, and the cut phase's evaluation. The checkpoint is the newest."""
    stop_in(project, "plain")
    save(project, "plain", 100, 200, 250)
    former = (project.folder / CONFIG).read_text()
    printed = switch(project, "--to", "zero2")
    assert printed.splitlines()[-1] == (
        "plain: ends at step 250 (was 300), exported; plain-zero2 continues to 300 under zero2. "
        "Next: snakemake --cores all train"
    )
    assert project.calls() == ["render_launch", "train_phase", "export_weights"]
    assert former.count(CUT) == 1
    assert (project.folder / CONFIG).read_text() == former.replace(CUT, AFTER)
    assert project.planned("train") == {
        "render_launch": 2,
        "train_phase": 2,
        "export_weights": 2,
        "evaluate": 3,
        "report": 1,
    }
    assert sorted(path.name for path in (project.folder / "config").iterdir()) == sorted(
        path.name for path in (Path.cwd() / "config").iterdir()
    )
    project.build("train")
    assert project.calls().count("train_phase") == 2
    assert project.planned("train") == {}


@pytest.mark.slow
def test_a_switch_to_more_processes_keeps_the_preset(project):
    """It is done at once, says what follows from it, and is done already when called again; a phase
    of more processes is published without starting one."""
    project.edit(CONFIG, "    launch: torch\n", "    launch: torch\n    global_batch_size: 4\n")
    stop_in(project, "plain")
    save(project, "plain", 250)
    words = ("--num-processes", "2", "--mixed-precision", "bf16", "--machines", "2")
    printed = switch(project, *words)
    assert project.calls() == ["render_launch", "train_phase", "export_weights"]
    said = "continues to 300 under torch with "
    assert said in printed.splitlines()[-1]
    text = (project.folder / CONFIG).read_text()
    assert "  - name: plain-x2-bf16\n    until: 300\n    launch: {preset: torch, " in text
    assert "    global_batch_size: 4\n" in text.split("plain-x2-bf16")[1]
    assert "plain-x2-bf16 continues to 300 under torch. " in switch(project, *words)
    assert (project.folder / CONFIG).read_text() == text


@pytest.mark.slow
def test_switch_of_the_last_phase_leaves_the_first_alone(project):
    """Only the cut phase is published; the finished one is neither trained nor exported."""
    stop_in(project, "offload")
    save(project, "offload", 400, 500, preset="zero2_offload")
    printed = switch(project, "--to", "torch", "--at", "400", "--name", "rest")
    assert "offload: ends at step 400 (was 700), exported; rest continues to 700" in printed
    assert project.calls() == ["render_launch", "train_phase", "export_weights"]
    assert project.planned("train") == REST | {"evaluate": 3}


@pytest.mark.slow
def test_switch_of_another_file(project):
    """Snakemake is called with the file that has the run, and so is what comes next."""
    (project.folder / CONFIG).rename(project.folder / "config/mine.yaml")
    inputs = ["results/tiny/plain/launch/manifest.json", "results/data/tiny/cache/64/manifest.json"]
    project.build(*inputs, "--configfile", "config/mine.yaml")
    project.calls()
    save(project, "plain", 250)
    printed = switch(project, "--to", "zero2")
    assert printed.endswith("snakemake --cores all train --configfile config/mine.yaml\n")
    assert project.calls() == ["render_launch", "train_phase", "export_weights"]


@pytest.mark.slow
def test_a_switch_that_fails_restores_the_configuration(stopped):
    """Byte for byte; Snakemake's own message stands above ours. Called again, it succeeds."""
    former = (stopped.folder / CONFIG).read_bytes()
    words = ["python", "-m", "zerotrain", "switch", "tiny", "--to", "zero2"]
    done = stopped.command(*words, FAIL="export_weights")
    assert done.returncode == 2
    assert "export_weights: failed on request" in done.stdout
    assert "ended with code 1; above it says why; config/config.yaml is as it was" in done.stdout
    assert (stopped.folder / CONFIG).read_bytes() == former
    stopped.calls()
    stopped.must(*words)
    assert "export_weights" in stopped.calls()
    assert stopped.planned("train") == REST | {
        "render_launch": 2, "train_phase": 2, "export_weights": 2, "evaluate": 3,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edited", "jobs"),
    [
        ("photos/cat.txt", "cache_latents, prepare_dataset"),
        ("workflow/zerotrain/artifact/stage_versions.py", "cache_latents"),
    ],
)
def test_a_switch_after_a_change_of_what_it_depends_on_is_refused(stopped, edited, jobs):
    """Training would start from step 0: the refusal names the jobs that would run, and nothing
    runs."""
    stopped.append(edited, '\nVERSIONS = {**VERSIONS, "cache_latents": 2}\n')
    former = (stopped.folder / CONFIG).read_text()
    printed = switch(stopped, "--to", "zero2", code=2)
    assert f"depends on has changed since it was trained: {jobs} would run first" in printed
    assert "results/data/tiny/cache/64/manifest.json` (first with -n" in printed
    assert (stopped.folder / CONFIG).read_text() == former
    assert stopped.calls() == []


@pytest.mark.slow
def test_a_profile_that_hushes_snakemake_hides_no_job(stopped):
    """The jobs that would run are found all the same, and refused."""
    stopped.append("profiles/default/config.yaml", "\nquiet: [rules, progress]\n")
    assert "\ntrain_phase tiny/plain: " not in stopped.snakemake("-n", "--cores", "1").stdout
    printed = switch(stopped, "--to", "zero2", "--dry-run")
    assert printed.endswith(": render_launch, train_phase, export_weights\n")
    stopped.append("photos/cat.txt", "\nEDITED = 1\n")
    printed = switch(stopped, "--to", "zero2", code=2)
    assert "cache_latents, prepare_dataset would run first" in printed


@pytest.mark.slow
def test_a_second_switch_gets_a_name_of_its_own(stopped):
    """Of a phase that comes from a switch, and back to a preset that has had its turn."""
    switch(stopped, "--to", "zero2")
    save(stopped, "plain-zero2", 260, preset="zero2")
    (stopped.folder / "results/tiny/plain-zero2-torch/launch").mkdir(parents=True)
    printed = switch(stopped, "--to", "torch")
    assert "plain-zero2: ends at step 260 (was 300), exported; plain-zero2-torch-2" in printed


@pytest.mark.slow
def test_what_a_killed_switch_began_ends_with_it(stopped):
    """Else its Snakemake would publish for no one. If it could not remove its lock any more, the
    next command says what does."""
    words = (sys.executable, "-m", "zerotrain", "switch", "tiny", "--to", "zero2")
    process = stopped.hang("export_weights", *words)
    process.kill()
    process.wait()
    wait_for_end(stopped)
    done = stopped.command(*words)
    if done.returncode:
        assert "--unlock" in done.stdout
        stopped.must("snakemake", "--unlock")
        done = stopped.command(*words)
    printed = done.stdout
    assert done.returncode == 0, printed
    assert "was killed before its end; it is completed" in printed
    assert (stopped.folder / CONFIG).read_text().count("plain-zero2") == 1
    assert stopped.calls().count("export_weights") == 2
    done = stopped.command(*words)
    assert done.stdout == (
        "done already: plain ended at step 250, plain-zero2 continues to 300 under zero2. "
        "Next: snakemake --cores all train\n"
    )


@pytest.mark.soak
@pytest.mark.parametrize("stagger", [n / 19 * 2 for n in range(20)])
def test_of_two_switches_that_start_together_one_is_done(stopped, stagger):
    """The other is refused with whose turn it is, or learns that it is done already. The
    configuration has what the one that is done reported. Staggered by seconds; at each place where
    it matters by test_a_second_switch_of_a_run_cannot_lose_the_first."""
    former = (stopped.folder / CONFIG).read_text()
    words = [sys.executable, "-m", "zerotrain", "switch", "tiny", "--to", "zero2"]
    switches = []
    for wait in (stagger, 0):
        switches.append(
            subprocess.Popen(
                words, cwd=stopped.folder, env=stopped.environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
        time.sleep(wait)
    said = [process.communicate(timeout=600)[0] for process in switches]
    codes = [process.returncode for process in switches]
    done = [text for text in said if "plain: ends at step 250 (was 300), exported" in text]
    refused = "another switch of it is under way: pid "
    [other] = [text for text in said if text not in done]
    assert len(done) == 1
    assert codes[said.index(done[0])] == 0
    assert (codes[said.index(other)], refused in other, "done already: " in other) in (
        (2, True, False),
        (0, False, True),
    ), other
    assert (stopped.folder / CONFIG).read_text() == former.replace(CUT, AFTER)
    assert sorted(path.name for path in (stopped.folder / "config").glob(".*")) == []
    print(
        f"stagger {stagger:.2f} s: {codes}, {other.splitlines()[-1 if codes.count(0) == 2 else 0]}"
    )
