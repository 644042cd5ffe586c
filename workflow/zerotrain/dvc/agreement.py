"""Snakemake and DVC both keep books on what was made from what. Here they are made to agree.

Snakemake's books (.snakemake/) tell an output by its time; DVC's (dvc.lock) by its content. So:

- After `snakemake` has run, the stages that it knows to be fresh are entered in dvc.lock, and
  dvc.yaml is written anew where the graph has changed.
- Before it plans, what somebody has put behind its back is looked at (`zerotrain.dvc.records`):
  outputs that DVC brought back, inputs of new content under an old time, a run that was killed
  before it could enter what it had made.

Inside a stage of DVC neither is done: there DVC judges, and its stages force what they call. They
fail where DVC would enter what is not true: where dvc.yaml is not of the graph any more, and where
something was edited while the stage ran.

Where DVC is not installed or not set up, or dvc.yaml is of another run, Snakemake is left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from zerotrain.dvc import jobs
from zerotrain.dvc.book import lives, note_running, read_book, write_book
from zerotrain.dvc.jobs import MAIN_CONFIG, in_order, stage_name
from zerotrain.dvc.meanwhile import Meanwhile, began_and_ended
from zerotrain.dvc.pipeline import LOCK, PIPELINE, is_current
from zerotrain.dvc.records import make_stale
from zerotrain.errors import PipelineError


class Agreement:
    """The agreement over one call of snakemake, made as the Snakefile is read.

    Args:
        workflow: Snakemake's workflow object.
        config: The run's configuration.
    """

    def __init__(self, workflow: Any, config: Path) -> None:
        self._workflow = workflow
        self._config = config
        self._in_stage = "DVC_STAGE" in os.environ
        outputs = {} if jobs.LOOKING or not workflow.is_main_process else outputs_of(config)
        running = read_book().get("running")
        alone = self._in_stage or not (running and lives(running))  # else it settles itself
        self._in_use = bool(outputs) and alone
        if not self._in_use:
            return
        if not self._in_stage:
            if running or disturbed(outputs):
                settle(config, killed=bool(running))
            atexit.register(self._enter)
        self._meanwhile = Meanwhile(config)

    def begin(self) -> None:
        """Before the first job.

        Raises:
            PipelineError: DVC calls it, and would not see edits of what dvc.yaml leaves out.
        """
        if self._in_use and not self._in_stage:
            note_running()
        elif self._in_use and not self._is_current():
            raise PipelineError(
                f"{PIPELINE}: it is not of {self._config}, the rules and the code as they are now",
                hint=f"`zerotrain dvc generate --config {self._config}`, and call DVC again",
            )

    def end(self) -> None:
        """After the last job.

        Raises:
            PipelineError: DVC calls it, and would enter what the job was not made from.
        """
        if not (self._in_use and self._in_stage):
            return
        for job in in_order(self._workflow.dag.jobs):
            if self._workflow.dag.finished(job) and (edits := self._edits(job)):
                raise PipelineError(
                    f"{', '.join(edits)}: edited while {stage_name(job)} ran: what it made is of "
                    "neither",
                    hint="call DVC again; while it works, edit another clone",
                )

    def _is_current(self) -> bool:
        return is_current(_pipeline(), self._workflow.dag.jobs, self._config)

    def _edits(self, job: Any) -> dict[str, float]:
        return self._meanwhile.edited(self._workflow, job, _pipeline()["stages"][stage_name(job)])

    def _enter(self) -> None:
        """At the end of the process, also where there was nothing to do, or a job failed."""
        workflow = self._workflow
        if workflow._executor_plugin is None or workflow.dryrun or workflow._dag is None:
            return
        dag = workflow.dag
        if dag.rules_allowed_for_needrun or len(workflow.rerun_triggers) < 5:
            return  # then Snakemake has not looked at everything
        if not self._is_current():
            print(f"{PIPELINE}: written anew, for the graph has changed", file=sys.stderr)
            _in_a_process("generate", "--config", str(self._config))
            _pipeline.cache_clear()
        outputs = outputs_of(self._config)
        fresh, looked = [], time.time()
        for job in in_order(dag.jobs):
            name = stage_name(job)
            if name not in outputs or not (dag.finished(job) or not dag.needrun(job)):
                continue
            if edits := self._edits(job):
                print(f"{name}: not entered in {LOCK}: {', '.join(edits)}: edited meanwhile",
                      file=sys.stderr)  # fmt: skip
                looked = read_book().get("looked", 0.0)
                if dag.finished(job) and min(edits.values()) <= began_and_ended(workflow, job)[1]:
                    make_stale(workflow, job)
            else:
                fresh.append(name)
        stamp = _stamp(self._config, fresh, outputs)
        if stamp != read_book().get("entered"):
            enter(fresh)
            stamp = _stamp(self._config, fresh, outputs)
        write_book(running=None, looked=looked, entered=stamp)


def outputs_of(config: Path) -> dict[str, list[str]]:
    """The outputs of each stage, where DVC is in use and its pipeline is that of this run."""
    set_up = PIPELINE.is_file() and Path(".dvc").is_dir()
    under_git = any((folder / ".git").exists() for folder in Path("x").resolve().parents)
    if not (set_up and under_git and importlib.util.find_spec("dvc")):
        return {}
    found = {}
    for name, stage in (_pipeline().get("stages") or {}).items():
        words = shlex.split(str(stage.get("cmd", "")))
        if words[:1] != ["snakemake"] or "--" not in words:
            continue
        of = words[words.index("--configfile") + 1] if "--configfile" in words else MAIN_CONFIG
        if Path(of) == config:
            found[name] = words[words.index("--") + 1 :]
    return found


@cache
def _pipeline() -> dict[str, Any]:
    import yaml

    return yaml.load(PIPELINE.read_text(), Loader=yaml.CSafeLoader) or {}


def disturbed(outputs: Mapping[str, Iterable[str]]) -> bool:
    """Whether outputs or inputs were changed in a way that Snakemake would not notice."""
    from snakemake.persistence.file import FilePersistence

    persistence = FilePersistence(nolock=True)
    book = read_book()
    looked, seen = book.get("looked", 0.0), book.get("seen", {})
    times: dict[str, os.stat_result | None] = {}

    def stat(path: str) -> os.stat_result | None:
        if path not in times:
            times[path] = None
            with contextlib.suppress(OSError):
                times[path] = os.stat(path)
        return times[path]

    for output in (path for paths in outputs.values() for path in paths):
        here = stat(output)
        if here is None:
            continue
        record = persistence._read_record(output)
        if record is None or record.endtime != here.st_mtime:
            if seen.get(output) != here.st_mtime:
                return True
            continue
        for path in record.input or ():
            taken = stat(path)
            if taken and taken.st_mtime <= here.st_mtime and taken.st_ctime > looked:
                return True
    return False


def settle(config: Path, *, killed: bool) -> None:
    """Look at what was changed, in a process of its own: it reads the graph itself."""
    words = ["settle", "--config", str(config), *(["--killed"] if killed else [])]
    if _in_a_process(*words):
        print(
            "WARNING: Snakemake's records and dvc.lock could not be made to agree; above it says "
            "why. What snakemake plans now rests on its own records alone.",
            file=sys.stderr,
        )


def enter(names: list[str]) -> None:
    """Enter stages in dvc.lock, in a process of its own: it may fail and take its time."""
    if names and _in_a_process("enter", *names):
        print(
            "WARNING: dvc.lock was not brought up to date; above it says why.\n"
            "  Hint: mend it and call `snakemake` again; what it has made stays",
            file=sys.stderr,
        )


def _in_a_process(*words: str) -> int:
    command = [sys.executable, "-m", "zerotrain", "dvc", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode


def _stamp(config: Path, fresh: Iterable[str], outputs: Mapping[str, list[str]]) -> str:
    """What an entry depends on, by times and sizes."""
    from zerotrain.artifact import digest

    paths = [str(config), str(PIPELINE), str(LOCK), *(p for name in fresh for p in outputs[name])]
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            found.append([path, stat.st_mtime_ns, stat.st_size])
    return digest(found)
