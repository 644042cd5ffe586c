"""Lines of Snakemake's log records: why a stage failed, on this machine and on a cluster."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake.logging import LogEvent

from zerotrain.graph.terminal import handler
from zerotrain.graph.terminal.handler import StageLines

FURTHER = (
    "For further error details see the cluster/cloud log and the log files of the involved rule(s)."
)
COMMAND_FAILED = """\
RuleException:
CalledProcessError in file "/project/rules/report.smk", line 45:
Command 'set -euo pipefail;  zerotrain report' returned non-zero exit status 7."""
COMMAND_KILLED = COMMAND_FAILED.replace(
    "returned non-zero exit status 7.", "died with <Signals.SIGKILL: 9>."
)


class Job(SimpleNamespace):
    """What the handler asks of Snakemake's job."""

    __hash__ = object.__hash__

    def __init__(self, jobid: int, name: str, *, is_local: bool = False) -> None:
        super().__init__(
            jobid=jobid,
            rule=SimpleNamespace(name=name, norun=False),
            log=[f"{name}.log"],
            output=[f"results/tiny/{name}/manifest.json"],
            wildcards={},
            resources={"mem_mb": 99999999, "runtime": 120, "gres": "gpu:1", "_cores": 1},
            attempt=1,
            is_local=is_local,
        )


class Terminal:
    """The lines of a call of Snakemake with these jobs, fed with records."""

    def __init__(self, jobs: list[Job], **settings: Any) -> None:
        self.stream = io.StringIO()
        options = {"quiet": (), "printshellcmds": False} | settings
        self._lines = StageLines(
            SimpleNamespace(
                dag=SimpleNamespace(needrun_jobs=lambda: jobs),
                rules=[job.rule for job in jobs],
                dryrun=options.pop("dryrun", False),
                local_exec=options.pop("local_exec", True),
                touch=False,
                output_settings=SimpleNamespace(**options),
            ),
            self.stream,
        )
        self._jobs = {job.jobid: job for job in jobs}
        self.emit("", event=LogEvent.RUN_INFO, stats={job.rule.name: 1 for job in jobs})
        self.shown()

    def emit(self, text: str | None, *args: object, **fields: Any) -> None:
        """Log a record as Snakemake does."""
        exc_info = fields.pop("exc_info", None)
        record = logging.LogRecord("snakemake", logging.ERROR, "", 0, text, args, exc_info)
        record.__dict__.update(fields)
        self._lines.emit(record)

    def start(self, *numbers: int) -> None:
        """Start jobs; their lines are not shown."""
        for number in numbers:
            self.emit("", event=LogEvent.JOB_INFO, jobid=number)
        self.shown()

    def error(self, number: int, message: str | None = None, **aux: object) -> dict[str, Any]:
        """The fields of a job's error."""
        job = self._jobs[number]
        return {
            "event": LogEvent.JOB_ERROR,
            "jobid": number,
            "rule_name": job.rule.name,
            "rule_msg": message,
            "log": list(job.log),
            "aux": aux,
        }

    def end(self) -> None:
        """Snakemake's last words after a failure or an interruption."""
        text = "WorkflowError:\nAt least one job did not complete successfully."
        self.emit(text, event=LogEvent.ERROR, exception="WorkflowError")

    def shown(self) -> list[str]:
        """The lines since the last question."""
        lines = self.stream.getvalue().splitlines()
        self.stream.truncate(self.stream.seek(0))
        return lines


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the stages' logs; why a job runs is not asked of the plan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(handler.Reasons, "describe", lambda self, job, dag: handler.NEW)
    monkeypatch.setattr(handler.Reasons, "name", lambda self, job: f"{job.rule.name} tiny")
    return tmp_path


def two_jobs(**settings: Any) -> Terminal:
    """A terminal with two jobs."""
    return Terminal([Job(1, "base"), Job(2, "report")], **settings)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Error submitting jobscript (exit code 1):\nerror: invalid partition\n",
         ["Error submitting jobscript (exit code 1):", "error: invalid partition"]),
        ("SLURM-job '7' failed, SLURM status is: 'OUT_OF_MEMORY'. Reason: Unknown.",
         ["SLURM-job '7' failed, SLURM status is: 'OUT_OF_MEMORY'. Reason: Unknown."]),
        ("", []),
    ],
)  # fmt: skip
def test_a_cluster_job_that_failed_shows_what_the_executor_says(
    message: str, shown: list[str]
) -> None:
    """Without the executor's closing sentence, which names no file."""
    terminal = two_jobs(local_exec=False)
    terminal.start(1)
    terminal.emit("Error in rule base", **terminal.error(1, message + FURTHER, external_jobid="7"))
    assert terminal.shown() == [
        *shown,
        "base tiny: failed after 0:00 (job 7 of the cluster); log: base.log",
    ]


FULL = "ERROR: the disk is full\n  Hint: delete something\n"
LIBRARY = "[2026-11-24 10:00:00,123] [ERROR] [launch.py:325:sigkill_handler] exits\n"


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        # A log is appended to: an ERROR from before this start is no cause.
        (FULL, FULL, []),
        (FULL, f"{FULL}loading\nERROR: photos: no images\n  Hint: add some\n",
         ["ERROR: photos: no images", "  Hint: add some"]),
        # A log shorter than at the start is read from its start.
        (9 * FULL, "ERROR: photos: no images\n", ["ERROR: photos: no images"]),
        # DeepSpeed's records have ERROR in brackets; a line of ours begins with it.
        ("", f"ERROR: out of memory\n{LIBRARY}", ["ERROR: out of memory", LIBRARY.strip()]),
        ("", LIBRARY, []),
    ],
)  # fmt: skip
def test_a_cluster_job_that_failed_shows_the_error_of_its_last_start_alone(
    folder: Path, before: str, after: str, shown: list[str]
) -> None:
    """From the log of its stage, which another machine has written."""
    log = folder / "base.log"
    log.write_text(before)
    terminal = two_jobs(local_exec=False)
    terminal.start(1)
    log.write_text(after)
    terminal.emit("", **terminal.error(1, FURTHER))
    assert terminal.shown() == [*shown, "base tiny: failed after 0:00; log: base.log"]


def test_a_stage_that_failed_on_this_machine_does_not_repeat_its_error(folder: Path) -> None:
    """It has printed it; the same holds for the local jobs of a cluster's profile."""
    for terminal in (
        two_jobs(),
        Terminal([Job(1, "base", is_local=True), Job(2, "report")], local_exec=False),
    ):
        terminal.start(1)
        (folder / "base.log").write_text("ERROR: photos: no images\n")
        terminal.emit(COMMAND_FAILED, event=LogEvent.ERROR, exception="RuleException")
        terminal.emit("", **terminal.error(1))
        (folder / "base.log").unlink()
        assert terminal.shown() == ["base tiny: failed after 0:00 (exit code 7); log: base.log"]


def test_a_group_that_failed_names_each_stage_once_with_its_job() -> None:
    """Snakemake logs the group, then each of its jobs without its number on the cluster."""
    terminal = two_jobs(local_exec=False)
    terminal.start(1, 2)
    infos = [terminal.error(number, external_jobid="7") for number in (2, 1)]
    group = {"groupid": "g", "aux_logs": ["slurm.log"], "job_error_info": infos}
    terminal.emit("Error in group g", event=LogEvent.GROUP_ERROR, **group)
    for number in (1, 2):
        terminal.emit("", **terminal.error(number))
    terminal.end()
    failed = "failed after 0:00 (job 7 of the cluster); log: "
    assert terminal.shown() == [
        f"report tiny: {failed}report.log, slurm.log",
        f"base tiny: {failed}base.log, slurm.log",
        "2 of 2 stages failed",
    ]
    terminal.start(1)  # once more, by itself
    terminal.emit("", **terminal.error(1))
    assert terminal.shown() == ["base tiny: failed after 0:00; log: base.log"]


def test_an_end_without_a_stage_that_failed_is_no_stop_on_request() -> None:
    """It is one only after Snakemake was asked to end."""
    terminal = two_jobs()
    terminal.emit("Complete log(s): /logs/1.log")
    terminal.end()
    assert terminal.shown() == [
        "no stage failed, 2 stages did not run; Snakemake's log: /logs/1.log"
    ]
    for words in (
        "Terminating processes on user request, this might take some time.",
        "Will exit after finishing currently running jobs (scheduler).",
    ):
        terminal = two_jobs()
        terminal.emit(words)
        terminal.end()
        last = "stopped: on request, 2 stages did not run; run the same command to continue"
        assert terminal.shown()[-1] == last


def test_the_exit_code_of_a_stage_is_in_its_line() -> None:
    """Snakemake's own exception is not shown; a signal counts 128 and its number."""
    for text, code in ((COMMAND_FAILED, 7), (COMMAND_KILLED, 137)):
        terminal = two_jobs()
        terminal.start(1)
        terminal.emit(text, event=LogEvent.ERROR, exception="RuleException")
        terminal.emit("", **terminal.error(1))
        line = f"base tiny: failed after 0:00 (exit code {code}); log: base.log"
        assert terminal.shown() == [line]


@pytest.mark.parametrize(("steps", "where"), [((100, 250), "step 250"), ((), "its start")])
def test_a_killed_training_says_how_to_continue(steps: tuple[int, ...], where: str) -> None:
    """SIGKILL leaves the stage no time to say it; any other stage starts over."""
    for step in steps:
        folder = Path(f"results/tiny/progress/step-{step:08d}")
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    terminal = Terminal([Job(1, "train_phase"), Job(2, "report")])
    terminal.start(1)
    terminal.emit(COMMAND_KILLED, event=LogEvent.ERROR, exception="RuleException")
    terminal.emit("", **terminal.error(1))
    assert terminal.shown() == [
        "train_phase tiny: failed after 0:00 (exit code 137); log: train_phase.log",
        f"killed by SIGKILL; run the same command again: it resumes from {where}",
    ]


@pytest.mark.parametrize(
    ("exception", "text"),
    [
        ("WorkflowError",
         "WorkflowError:\nCould not ask the cluster: Command 'squeue' returned non-zero exit "
         "status 1."),
        ("CalledProcessError",
         'CalledProcessError in file "/project/Snakefile", line 3:\n'
         "Command 'git log' returned non-zero exit status 128."),
    ],
)  # fmt: skip
def test_a_command_that_failed_outside_of_a_job_is_shown(exception: str, text: str) -> None:
    """And its exit code is that of no stage."""
    terminal = two_jobs()
    terminal.start(1)
    terminal.emit(text, event=LogEvent.ERROR, exception=exception)
    terminal.emit("", **terminal.error(1))
    assert terminal.shown() == [
        *text.splitlines(),
        "base tiny: failed after 0:00; log: base.log",
    ]


def test_a_message_has_its_values_and_its_exception() -> None:
    """%-style records are formatted, and a traceback follows; an empty record shows nothing."""
    terminal = two_jobs()
    terminal.emit("job %s on %s", 7, "node1")
    terminal.emit("100% of it")
    terminal.emit(None)
    try:
        raise OSError("no such node")
    except OSError:
        terminal.emit("cannot ask: %s", "squeue", exc_info=sys.exc_info())
    first, second, third, traceback, *_, last = terminal.shown()
    assert [first, second, third] == ["job 7 on node1", "100% of it", "cannot ask: squeue"]
    assert (traceback, last) == ("Traceback (most recent call last):", "OSError: no such node")


@pytest.mark.parametrize("dryrun", [False, True])
def test_commands_are_shown_where_they_are_asked_for(dryrun: bool) -> None:
    """With -p, a stage's command follows the line of its start; a target has none."""
    command = "\n        zerotrain report  --output results\n        "
    shellcmd = {"event": LogEvent.SHELLCMD, "shellcmd": command}
    terminal = two_jobs(dryrun=dryrun)
    terminal.emit(f"Shell command: {command}", **shellcmd)
    assert terminal.shown() == []
    terminal = two_jobs(dryrun=dryrun, printshellcmds=True)
    terminal.emit(f"Shell command: {command}", **shellcmd)
    terminal.emit("Shell command: None", **shellcmd | {"shellcmd": None})
    assert terminal.shown() == ["    zerotrain report  --output results"]


def test_a_job_that_slurm_refuses_is_said_once_with_what_it_asks_for() -> None:
    """The executor would show the whole call of sbatch, at every attempt."""
    terminal = Terminal([job := Job(3, "train_phase")], local_exec=False)
    terminal.start(3)
    call = "sbatch --parsable --mem 99999999 --wrap 'python -m snakemake'"
    said = "Memory specification can not be satisfied", "Batch job submission failed: Requested"
    message = (
        f"SLURM sbatch failed. The error message was 'sbatch: error: {said[0]}\n"
        f"sbatch: error: {said[1]}'.\n    sbatch call:\n        {call}\n{FURTHER}"
    )
    terminal.emit("", **terminal.error(3, message))
    first, hint = terminal.shown()
    assert first == (
        f"ERROR: train_phase: Slurm refuses the job: {said[0]}; {said[1]}. It asks for gres=gpu:1, "
        "mem_mb=99999999, runtime=120"
    )
    assert "`--set-resources train_phase:NAME=VALUE`" in hint
    job.attempt = 2
    terminal.start(3)
    terminal.emit("", **terminal.error(3, message))
    assert terminal.shown() == ["train_phase tiny: failed after 0:00; log: train_phase.log"]
