"""What the terminal shows: a line when a stage starts and one when it ends, and what changed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time

import pytest
from tests.workflow.jobs import raised

HEADER = (
    "Using workflow specific profile profiles/default for setting default command line arguments."
)
NOTHING = "Nothing to be done (all requested files are present and up to date)."
COUNTS = (
    "1 prepare_dataset, 1 build_base, 2 render_launch, 1 cache_latents, 2 train_phase, "
    "2 export_weights, 2 evaluate, 1 report"
)
AFTER_LAUNCH = "2 render_launch, 2 train_phase, 2 export_weights, 2 evaluate, 1 report"
MADE = {
    "prepare_dataset tiny": "results/data/tiny",
    "build_base tiny": "results/tiny/base",
    "cache_latents tiny 64": "results/data/tiny/cache/64",
    "train_phase tiny/plain": "results/tiny/plain/checkpoint",
    "train_phase tiny/offload": "results/tiny/offload/checkpoint",
    "export_weights tiny/plain": "results/tiny/plain/weights, results/tiny/plain/state",
    "export_weights tiny/offload": "results/tiny/offload/weights, results/tiny/offload/state",
    "evaluate tiny/plain": "results/tiny/plain/evaluation, results/tiny/plain/metrics.json",
    "evaluate tiny/offload": "results/tiny/offload/evaluation, results/tiny/offload/metrics.json",
}
"""Each stage that says when it ends, and what it makes; the report prints the summary."""
RENDERED = {
    "render_launch tiny/plain": "results/tiny/plain/launch",
    "render_launch tiny/offload": "results/tiny/offload/launch",
}
"""Those of one line."""


def lines_of(output: str) -> list[str]:
    """The lines, with every span of time as 0:00 and the name of Snakemake's log as LOG."""
    output = re.sub(r"\b\d+:\d\d\b", "0:00", output)
    return re.sub(r"\.snakemake/log/\S+", "LOG", output).splitlines()


def dry_run(project, *words: str) -> list[str]:
    """What `snakemake -n train` prints below its header and the causes: the jobs sorted, the counts
    last."""
    code, said = project.forked("-n", *words, "train")
    header, *jobs, counts = lines_of(said)
    assert (code, header) == (0, HEADER), said
    return [*sorted(job for job in jobs if not job.startswith("why: ")), counts]


@pytest.mark.slow
def test_output_of_a_run_is_two_lines_a_stage_and_nothing_after_the_report(project):
    """Each stage once when it starts, numbered, and once with what it made; the report is last.

    22 lines, however many images there are.
    """
    for number in range(300):
        (project.folder / "photos" / f"{number}.png").write_bytes(b"pixels %d" % number)
        (project.folder / "photos" / f"{number}.txt").write_text(f"picture {number}\n")
    done = project.snakemake("--cores", "1", "train")
    header, counts, *lines = lines_of(done.stdout)
    assert [header, counts] == [HEADER, f"12 stages to run: {COUNTS}"]
    ended = {f"{name}: done in 0:00, made {made}": name for name, made in MADE.items()}
    started = [line.partition("] ")[2] for line in lines[:-1] if line not in ended]
    for place, name in enumerate(started, 1):  # one after the other, with --cores 1
        expected = f"[{place}/12] {name}"
        if name.startswith("render_launch"):
            assert lines.pop(0) == expected
            continue
        assert lines[0] == expected
        assert ended[lines[1]] == name
        del lines[:2]
    assert lines == ["[12/12] report tiny"]
    rendered = [f"{name}, made {made}" for name, made in RENDERED.items()]
    assert sorted(started) == sorted([*MADE, *rendered])
    log = next((project.folder / ".snakemake" / "log").iterdir()).read_text()
    assert "results/data/tiny/settings/prepare_dataset.json" in log


@pytest.mark.slow
def test_output_of_a_dry_run_names_changed_keys_and_files(built):
    """One line a stage: the key with both values, the file by name, or the stage before it."""
    assert lines_of(built.forked("-n", "train")[1]) == [HEADER, NOTHING]
    built.edit("config/config.yaml", "1.0e-3", "2.0e-3")
    rate = "train.learning_rate 0.001 -> 0.002"
    assert dry_run(built) == [
        "evaluate tiny/offload: after export_weights tiny/offload",
        "evaluate tiny/plain: after export_weights tiny/plain",
        "export_weights tiny/offload: after train_phase tiny/offload",
        "export_weights tiny/plain: after train_phase tiny/plain",
        f"render_launch tiny/offload: {rate}",
        f"render_launch tiny/plain: {rate}",
        "report tiny: after evaluate tiny/offload, evaluate tiny/plain",
        f"train_phase tiny/offload: {rate}",
        f"train_phase tiny/plain: {rate}",
        f"9 stages would run: {AFTER_LAUNCH}",
    ]
    built.edit("config/config.yaml", "2.0e-3", "1.0e-3")
    built.edit("config/config.yaml", "launch: torch", "launch: zero2")
    assert "train_phase tiny/plain: launch.preset torch -> zero2" in dry_run(built)
    assert "render_launch tiny/offload: launch.preset torch -> zero2 (phase plain)" in dry_run(
        built
    )
    built.edit("config/config.yaml", "launch: zero2\n", "launch: torch\n")
    (built.folder / "photos" / "cat.txt").write_text("a cat that sleeps\n")
    for name in "abcde":
        (built.folder / "photos" / f"{name}.png").write_bytes(b"pixels")
        (built.folder / "photos" / f"{name}.txt").write_text("a letter\n")
    for name in ("dog.png", "dog.txt"):
        (built.folder / "photos" / name).unlink()
    jobs = dry_run(built)
    assert (
        jobs[-2] == "train_phase tiny/plain: after cache_latents tiny 64, render_launch tiny/plain"
    )
    assert (
        "prepare_dataset tiny: changed: photos/cat.txt; new: photos/a.png, photos/a.txt, "
        "photos/b.png and 7 more; removed: photos/dog.png, photos/dog.txt" in jobs
    )


@pytest.mark.slow
def test_output_says_why_a_folder_is_made_again(built):
    """A version of ours, a file that is missing, a file that is damaged, and what was forced."""
    weights = built.folder / "results" / "tiny" / "plain" / "weights" / "payload.bin"
    weights.write_bytes(b"cut")
    assert "export_weights tiny/plain: damaged: results/tiny/plain/weights/payload.bin" in dry_run(
        built
    )
    shutil.rmtree(built.folder / "results" / "tiny" / "offload" / "evaluation")
    raised("build_base")(built)
    jobs = dry_run(built)
    assert "evaluate tiny/offload: not made yet" in jobs
    assert "build_base tiny: its stage has version 2, 1 before" in jobs
    assert "report tiny: forced, or interrupted before" in dry_run(built, "--forceall")


@pytest.mark.slow
def test_output_keeps_to_quiet_and_verbose(built):
    """--quiet hides what it hides of Snakemake's own output; --verbose shows all of that."""
    report = ["--cores", "1", "--force", "report"]
    assert lines_of(built.snakemake(*report, "--quiet").stdout) == [HEADER]
    done = built.snakemake(*report, "--quiet", "progress")
    assert lines_of(done.stdout) == [HEADER, "[1/1] report tiny: forced, or interrupted before"]
    done = built.snakemake(*report, "--verbose")
    assert (
        "    input: results/tiny/settings/report.json, results/tiny/plain/evaluation/manifest.json"
        in done.stdout
    )
    assert "[1/1] report" not in done.stdout


@pytest.mark.slow
def test_snakemakes_own_report_has_captions_and_categories(built):
    """The page and the checkpoint of each phase; what it is of is the caption of all."""
    built.must("snakemake", "--cores", "1", "--report", "snakemake.html")
    text = (built.folder / "snakemake.html").read_text()
    for words in (
        "From images or text to exported weights",
        "results/tiny/report/manifest.json",
        "The last checkpoint of phase plain",
        "The last checkpoint of phase offload",
        '"Training"',
    ):
        assert words in text


@pytest.mark.slow
def test_output_of_a_failure_is_the_stages_sentence_its_log_and_a_count(project):
    """No exception of Snakemake's, no command, no list of files."""
    done = project.snakemake("--cores", "1", "base", FAIL="build_base")
    assert done.returncode == 1
    assert lines_of(done.stdout) == [
        HEADER,
        "2 stages to run: 1 prepare_dataset, 1 build_base",
        "[1/2] prepare_dataset tiny",
        "prepare_dataset tiny: done in 0:00, made results/data/tiny",
        "[2/2] build_base tiny",
        "build_base: failed on request",
        "build_base tiny: failed after 0:00 (exit code 1); log: results/tiny/logs/build_base.log",
        "1 of 2 stages failed; Snakemake's log: LOG",
    ]


@pytest.mark.slow
def test_output_of_a_submission_that_failed_is_what_the_scheduler_printed(project):
    """Nothing of it is in the stage's log, which does not exist yet."""
    submit = project.folder / "submit.sh"
    submit.write_text("#!/bin/sh\necho 'error: invalid partition'; exit 1\n")
    submit.chmod(0o755)
    executor = ("--executor", "cluster-generic", "--cluster-generic-submit-cmd", "./submit.sh")
    done = project.snakemake(
        *executor, "--jobs", "1", "--seconds-between-status-checks", "0", "base"
    )
    assert done.returncode == 1
    assert lines_of(done.stdout)[2:] == [
        "[1/2] prepare_dataset tiny",
        "Error submitting jobscript (exit code 1):",
        "error: invalid partition",
        "prepare_dataset tiny: failed after 0:00; log: results/tiny/logs/prepare_dataset.log",
        "1 of 2 stages failed, 1 stage did not run; Snakemake's log: LOG",
    ]


def test_output_has_the_commands_with_printshellcmds(project):
    """Of each stage, below its line; it is no setting of the profile."""
    code, said = project.forked("-n", "-p", "base")
    assert code == 0
    lines = [" ".join(line.split()) for line in lines_of(said)]
    assert lines[1:] == [
        "why: nothing is made yet",
        "prepare_dataset tiny: not made yet",
        "zerotrain --log results/tiny/logs/prepare_dataset.log prepare_dataset "
        "--settings results/data/tiny/settings/prepare_dataset.json "
        "--output results/data/tiny/manifest.json",
        "build_base tiny: not made yet",
        "zerotrain --log results/tiny/logs/build_base.log build_base "
        "--settings results/tiny/settings/build_base.json --output results/tiny/base/manifest.json "
        "--dataset results/data/tiny/manifest.json",
        "2 stages would run: 1 prepare_dataset, 1 build_base",
    ]


@pytest.mark.slow
def test_output_of_ctrl_c_is_one_line(project):
    """SIGINT, sent to the whole group as a terminal does."""
    words = ("snakemake", "--cores", "1", "train")
    process = project.hang("prepare_dataset", *words, stdout=subprocess.PIPE)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    # The stand-in of the stage is interrupted in any line, also while Python handles an exception.
    own = lines_of(re.sub(r"^Traceback.*^KeyboardInterrupt\n", "", output, flags=re.S | re.M))
    assert process.returncode == 1
    assert own == [
        HEADER,
        f"12 stages to run: {COUNTS}",
        "[1/12] prepare_dataset tiny",
        "stopped: prepare_dataset tiny after 0:00 (exit code 130), 11 stages did not run; run the "
        "same command to continue",
    ]
