"""Snakemake's log records as short lines: a stage starts, ends or fails; a dry run lists its jobs.

Snakemake's text lists every input file of every job. It is in .snakemake/log, and on the terminal
with `--verbose`. The records carry the events of Snakemake's interface for logger plugins; a plugin
would print from its own thread, after the output of the stage that it announces, and would fail
where it is not installed.
"""

from __future__ import annotations

import logging
import re
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake.logging import LogEvent, logger
from snakemake.settings.enums import Quietness

from zerotrain.config.suggestions import after_question
from zerotrain.errors import EXIT_UNFINISHED, PipelineError, show_controls
from zerotrain.graph.currency import Currency
from zerotrain.graph.terminal.reasons import NEW, Reasons, is_stage, made_by
from zerotrain.run.stages import last_error, log_size
from zerotrain.training.checkpointing.progress_folder import saved_steps
from zerotrain.training.reporting.display import format_duration

REFUSED = re.compile(r"SLURM sbatch failed\. The error message was '(.*?)'\.(?:\n|$)", re.DOTALL)
"""The Slurm executor's message, which the whole call of sbatch follows."""
ASKED = (
    *("slurm_partition", "slurm_account", "nodes", "tasks", "gres", "gpu", "cpus_per_task"),
    *("mem_mb", "mem_mb_per_cpu", "runtime", "constraint", "slurm_extra"),
)
"""Resources that become options of sbatch."""


def describe_refusal(cause: str, rule: str, resources: Mapping[str, Any]) -> str | None:
    """Describe why a job was not submitted.

    Args:
        cause: The executor's message.
        rule: The rule of the job.
        resources: The job's resources.

    Returns:
        The sentences with what Slurm said and what the job asks for; None for another cause.
    """
    found = REFUSED.search(cause)
    if found is None:
        return None
    said = "; ".join(
        line.removeprefix("sbatch: error: ").strip() for line in found[1].splitlines() if line
    )
    asks = ", ".join(f"{name}={resources[name]}" for name in ASKED if resources.get(name))
    return str(
        PipelineError(
            f"{rule}: Slurm refuses the job: {said}. It asks for {asks or 'nothing of its own'}",
            hint=f"give values that a node has: `set-resources: {rule}:` of the profile, or "
            f"`--set-resources {rule}:NAME=VALUE`; `zerotrain cluster check` lists the nodes. Jobs "
            "that run continue",
        )
    )


STREAM_HANDLER = "DefaultStreamHandler"
"""The name of Snakemake's terminal handler; it is missing if `--logger` selects another."""
SUMMARY = "report"
"""The rule that ends with a summary, after which nothing else is printed."""
SHORT = "render_launch"
"""The rule that takes a second and prints nothing: its only line comes when it ends."""
DRY_RUN_ENDS = "This was a dry-run"
LOG_FILE = "Complete log(s): "
NOT_SHOWN = re.compile(
    r"Building DAG of jobs|Using shell: |Conda environments: ign|Singularity containers: ign"
    r"|Group jobs: inactive|Select jobs to execute|Removing output files of failed job"
    r"|Shutting down, this might|Elapsed time: |Some jobs were triggered by provenance"
    r"|Rules with provenance triggered jobs|Reasons:\n"
    r"|Assuming unrestricted shared filesystem|Exiting because a job execution failed"
    r"|\d+ jobs have (?:missing|outdated) provenance|Rules with (?:missing|outdated) metadata"
    r"|Provided |Rules claiming more threads|Job rate limit reached|host: "
)
"""Snakemake's messages that are uninformative or that our lines replace."""
RETRY = re.compile(r"Trying to restart job (\d+)")
INTERRUPTING = "Terminating processes on user request"
"""Snakemake's message after Ctrl-C. Our last line reports it."""
LAST_JOBS = "Will exit after finishing currently running jobs"
"""Snakemake's message after SIGTERM."""
COMMAND_FAILED = re.compile(
    r"RuleException[^\n]*:\nCalledProcessError[^\n]*:\nCommand '.*' "
    r"(?:returned non-zero exit status (\d+)|died with <Signals\.\w+: (\d+)>)",
    re.DOTALL,
)
"""Snakemake's error for a failed stage command. The stage has printed the reason."""
UNKNOWN_TARGET = re.compile(
    r"MissingRuleException[^\n]*:\nNo rule to produce (.+?)(?: \(if you use input functions|$)"
)
"""Snakemake's error for a target that it does not know."""
LOCKED = "Directory cannot be locked"
"""Snakemake's error, and its message in a dry run, where it has found its lock."""
FURTHER_DETAILS = "For further error details see the cluster/cloud log"
"""The end of each message of an executor."""
FAILED = "At least one job did not complete successfully"
TRAINING = "train_phase"
KILLED = 128 + signal.SIGKILL
INTERRUPTED = {EXIT_UNFINISHED, 130, 143}
"""Exit codes of a stage that was asked to stop."""
FirstLines = Callable[[Any, Sequence[Currency]], list[str]]
"""Returns the lines above a dry run's stages, from the graph and what was found of artifacts."""


def replace_output(workflow: Any, currency: Sequence[Currency], first_lines: FirstLines) -> None:
    """Replace Snakemake's lines on the terminal, unless `--verbose` or `--logger` selects others.

    Args:
        workflow: Snakemake's workflow object, while the Snakefile is read.
        currency: What was found of each artifact.
        first_lines: The lines above a dry run's stages.
    """
    settings = workflow.output_settings
    if settings.verbose or settings.debug_dag:
        return
    for handler in list(logger.handlers):
        if handler.name == STREAM_HANDLER:
            logger.removeHandler(handler)
            logger.addHandler(StageLines(workflow, handler.stream, currency, first_lines))


class StageLines(logging.Handler):
    """A log handler that prints the events of the stages of one call of Snakemake.

    Args:
        workflow: Snakemake's workflow object.
        stream: The stream that Snakemake would print to.
        currency: What was found of each artifact.
        first_lines: The lines above a dry run's stages.
    """

    def __init__(
        self,
        workflow: Any,
        stream: TextIO,
        currency: Sequence[Currency] = (),
        first_lines: FirstLines = lambda dag, found: [],
    ) -> None:
        super().__init__()
        self.name = STREAM_HANDLER
        self._workflow = workflow
        self._stream = stream
        self._currency = currency
        self._why = Reasons(currency)
        self._first_lines = first_lines
        self._quiet = set(workflow.output_settings.quiet or ())
        self._shows_commands = bool(workflow.output_settings.printshellcmds)
        self._jobs: dict[int, Any] = {}
        self._reasons: dict[int, str] = {}
        self._started: dict[int, float] = {}
        self._lines: dict[int, str] = {}
        self._failed: dict[int, int | None] = {}
        self._ended: dict[int, str] = {}
        self._finished: set[int] = set()
        self._exit_codes: dict[int, int] = {}
        self._log_sizes: dict[str, int] = {}
        self._failed_in_group: set[int] = set()
        self._refused: set[int] = set()
        self._interrupted = False
        self._counts = ""
        self._log_file = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record's line, if it has one."""
        try:
            text = self._line(record)
        except Exception:
            self.handleError(record)
            return
        if text:
            # Clear a progress bar of another process, which redraws it.
            clear = "\r\x1b[K" if self._stream.isatty() else ""
            self._stream.write(f"{clear}{show_controls(text)}\n")
            self._stream.flush()

    def _line(self, record: logging.LogRecord) -> str | None:
        event = getattr(record, "event", None)
        fields = record.__dict__
        if event == LogEvent.RUN_INFO:
            return self._plan(fields["stats"])
        if event == LogEvent.JOB_INFO:
            return self._start(fields["jobid"])
        if event == LogEvent.JOB_FINISHED:
            return self._finish(fields["job_id"])
        if event == LogEvent.SHELLCMD:
            return self._command(fields["shellcmd"])
        if event == LogEvent.JOB_ERROR:
            return self._fail(fields)
        if event == LogEvent.GROUP_ERROR:
            return self._fail_group(fields)
        if event == LogEvent.ERROR:
            return self._error(fields)
        if event is not None:
            return None
        return self._message(record)

    def _plan(self, stats: Mapping[str, int]) -> str | None:
        """Record why each job runs, before a finished job changes the metadata."""
        dag = self._workflow.dag
        rules = {rule.name for rule in self._workflow.rules if is_stage(rule)}
        counts = {name: count for name, count in stats.items() if name in rules}
        total = sum(counts.values())
        each = ", ".join(f"{count} {name}" for name, count in counts.items())
        verb = "would run" if self._workflow.dryrun else "to run"
        stages = f"{total} stage{'' if total == 1 else 's'}"
        self._counts = f"{stages} {verb}: {each}" if total else NOTHING_TO_BE_DONE_MSG
        first = not self._jobs  # a dry run counts its jobs again at its end
        if first:
            for job in dag.needrun_jobs():
                if is_stage(job.rule):
                    self._jobs[job.jobid] = job
                    self._reasons[job.jobid] = self._why.describe(job, dag)
        if not self._workflow.dryrun:
            return self._counts if self._shows(Quietness.PROGRESS) else None
        if first and total and self._shows(Quietness.RULES):
            return "\n".join(self._first_lines(dag, self._currency)) or None
        # With this setting Snakemake ends a dry run here.
        return self._counts if self._quiet == {Quietness.RULES, Quietness.PROGRESS} else None

    def _start(self, number: int) -> str | None:
        job = self._jobs.get(number)
        again = number in self._started
        self._started[number] = time.monotonic()
        self._failed_in_group.discard(number)
        if job is not None and not self._workflow.dryrun:
            self._log_sizes.update((str(path), log_size(path)) for path in job.log)
        if job is None or not self._shows(Quietness.RULES):
            return None
        reason = self._reasons[number]
        if self._workflow.dryrun:
            return f"{self._why.name(job)}: {reason}"
        if again:
            return f"{self._why.name(job)}: attempt {job.attempt}"
        place = f"[{len(self._started.keys() & self._jobs.keys())}/{len(self._jobs)}]"
        shown = "" if reason == NEW else f": {reason}"
        self._lines[number] = f"{place} {self._why.name(job)}{shown}"
        return None if job.rule.name == SHORT else self._lines[number]

    def _command(self, command: str | None) -> str | None:
        if not command or not self._shows_commands or not self._shows(Quietness.RULES):
            return None
        return textwrap.indent(command.strip(), "    ")

    def _finish(self, number: int) -> str | None:
        job = self._jobs.get(number)
        self._finished.add(number)
        self._failed.pop(number, None)
        if job is None or not self._shows(Quietness.RULES):
            return None
        if self._workflow.touch:
            return f"{self._why.name(job)}: touched {made_by(job)}"
        if job.rule.name == SUMMARY:
            return None
        if job.rule.name == SHORT:
            return f"{self._lines[number]}, made {made_by(job)}"
        wait = "" if self._workflow.local_exec or job.is_local else " with its wait in the queue"
        return f"{self._why.name(job)}: done in {self._elapsed(number)}{wait}, made {made_by(job)}"

    def _fail_group(self, fields: Mapping[str, Any]) -> str:
        """Return a line for each job of a group, with fields that only the group's record has."""
        shown = [
            self._fail({**one, "log": [*one["log"], *fields["aux_logs"]]})
            for one in fields["job_error_info"]
        ]
        self._failed_in_group.update(one["jobid"] for one in fields["job_error_info"])
        return "\n".join(filter(None, shown))

    def _fail(self, fields: Mapping[str, Any]) -> str | None:
        number = fields["jobid"]
        if number in self._failed_in_group:
            return None  # Snakemake logs each job of a group again
        job = self._jobs.get(number)
        name = self._why.name(job) if job is not None else fields["rule_name"]
        code = self._exit_codes.pop(threading.get_ident(), None)
        self._failed[number] = code
        how = f"exit code {code}" if code is not None else ""
        if external := fields["aux"].get("external_jobid"):
            how = f"job {external} of the cluster"
        after = f"after {self._elapsed(number)}{how and f' ({how})'}"
        self._ended[number] = f"{name} {after}"
        if code in INTERRUPTED:
            return None  # the last line reports it
        log = f"; log: {', '.join(fields['log'])}" if fields["log"] else ""
        line = f"{name}: failed {after}{log}"
        if job is not None and job.rule.name == TRAINING and code == KILLED:
            line = f"{line}\n{_after_a_kill(job)}"
        if self._workflow.local_exec or (job is not None and job.is_local):
            return line  # the stage has printed the reason
        cause = (fields["rule_msg"] or "").partition(FURTHER_DETAILS)[0].strip()
        resources = job.resources if job is not None else {}
        if refused := describe_refusal(cause, fields["rule_name"], resources):
            shown = line if number in self._refused else refused  # the next attempts repeat it
            self._refused.add(number)
            return shown
        return "\n".join([*cause.splitlines(), *last_error(fields["log"], self._log_sizes), line])

    def _error(self, fields: Mapping[str, Any]) -> str | None:
        text = str(fields["msg"])
        if FAILED in text:
            return self._end()
        if code := COMMAND_FAILED.match(text):
            status, number = code.groups()
            self._exit_codes[threading.get_ident()] = int(status or 128 + int(number))
            return None
        if unknown := UNKNOWN_TARGET.match(text):
            return self._describe_unknown_target(unknown[1])
        if LOCKED in text:
            hint = "wait for it; after a kill -9 or a power cut `snakemake --unlock`, then again"
            return str(PipelineError("another Snakemake works here, or was killed", hint=hint))
        return text

    def _describe_unknown_target(self, target: str) -> str:
        """Return the error for a mistyped target, with the nearest rule or file of the results."""
        rules = [rule for rule in self._workflow.rules if not rule.has_wildcards()]
        targets = [rule for rule in rules if not is_stage(rule)]
        files = [str(file) for rule in targets for file in rule.input if not callable(file)]
        names = ", ".join(rule.name for rule in targets)
        hint = after_question(
            target,
            [*(rule.name for rule in rules), *files],
            f"targets: {names}, or the path of a file of the results",
        )
        what = f"{target}: neither a target nor a file that a rule makes"
        return str(PipelineError(what, hint=hint))

    def _end(self) -> str:
        left = len(self._jobs) - len(self._finished & self._jobs.keys()) - len(self._failed)
        rest = f", {left} stage{'' if left == 1 else 's'} did not run" if left else ""
        asked = all(code in INTERRUPTED for code in self._failed.values())
        if asked and (self._failed or self._interrupted):
            names = ", ".join(self._ended[number] for number in self._failed)
            return f"stopped: {names or 'on request'}{rest}; run the same command to continue"
        log = f"; Snakemake's log: {self._log_file}" if self._log_file else ""
        if not self._failed:
            return f"no stage failed{rest}{log}"
        return f"{len(self._failed)} of {len(self._jobs)} stages failed{rest}{log}"

    def _message(self, record: logging.LogRecord) -> str | None:
        text = record.getMessage() if record.msg else ""
        if record.exc_info:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        if text.startswith((INTERRUPTING, LAST_JOBS)):
            self._interrupted = True
        if text.startswith(LOG_FILE):
            self._log_file = _relative(text.removeprefix(LOG_FILE))
        if text.startswith(DRY_RUN_ENDS):
            return self._counts
        if LOCKED in text:
            return "another Snakemake works here, or was killed"
        if text.startswith((LOG_FILE, INTERRUPTING)) or RETRY.match(text) or NOT_SHOWN.match(text):
            return None
        if record.levelno < logging.WARNING and Quietness.ALL in self._quiet:
            return None
        return text

    def _elapsed(self, number: int) -> str:
        return format_duration(time.monotonic() - self._started.get(number, time.monotonic()))

    def _shows(self, what: Quietness) -> bool:
        hushed = Quietness.ALL in self._quiet and not self._workflow.dryrun
        return not hushed and what not in self._quiet


def _after_a_kill(job: Any) -> str:
    """Describe how a killed training resumes, as it could not print that."""
    steps = saved_steps(Path(job.output[0]).parents[1] / "progress")
    where = f"step {steps[-1]}" if steps else "its start"
    return f"killed by SIGKILL; run the same command again: it resumes from {where}"


def _relative(path: str) -> str:
    folder = f"{Path.cwd()}/"
    return path.removeprefix(folder)
