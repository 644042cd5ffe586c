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
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from zerotrain.dvc import jobs
from zerotrain.dvc.book import lives, note_running, read_book, write_book
from zerotrain.dvc.jobs import MAIN_CONFIG, in_order, stage_name
from zerotrain.dvc.meanwhile import Meanwhile, edited_during
from zerotrain.dvc.pipeline import (
    GUARD,
    LOCK,
    PIPELINE,
    is_current,
    is_ours,
    load_pipeline,
    outdated,
)
from zerotrain.dvc.records import disturbed, make_stale
from zerotrain.dvc.storage import some
from zerotrain.errors import PipelineError

LOCK_BEHIND = f"{LOCK} was not brought up to date"


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
        self._meanwhile = Meanwhile(config)
        if not self._in_stage:
            wanted = running or disturbed(outputs)
            if wanted and not settle(config, killed=bool(running)):
                return  # the next call tries again
            self._meanwhile.began = time.time()  # what was settled was edited by nobody
            atexit.register(self._enter_or_warn)

    def begin(self) -> None:
        """Before the first job.

        Raises:
            PipelineError: DVC calls it, and would not see edits of what dvc.yaml leaves out.
        """
        if self._in_use and not self._in_stage:
            note_running(self._meanwhile.given)
        elif self._in_use and not self._is_current():
            raise outdated(self._config)

    def end(self) -> None:
        """After the last job.

        Raises:
            PipelineError: DVC calls it, and would enter what the job was not made from.
        """
        if not (self._in_use and self._in_stage):
            return
        if edits := self._set_aside_edited(self._workflow.dag.finished):
            names = sorted({name for found in edits.values() for name in found})
            raise PipelineError(
                f"{some(names)}: edited while {', '.join(edits)} ran: what it made is of neither",
                hint="call DVC again; while it works, edit another clone",
            )

    def _is_current(self) -> bool:
        return is_current(pipeline_here(), self._workflow.dag.jobs, self._config)

    def _set_aside_edited(self, ended: Callable[[Any], bool]) -> dict[str, list[str]]:
        """Make stale what was made while something that it takes in was edited.

        Returns:
            What was edited, for each stage that has ended and is not what is here now.
        """
        self._workflow.persistence._clear_cache()  # it holds what it read before the jobs ran
        stages = pipeline_here()["stages"]
        found, stale = {}, []
        for job in in_order(self._workflow.dag.jobs):
            name = stage_name(job)
            if name not in stages or not ended(job):
                continue
            if edits := self._meanwhile.edited(self._workflow, job, stages[name]):
                found[name] = list(edits)
                if self._workflow.dag.finished(job) and edited_during(
                    self._workflow, job, edits.values()
                ):
                    stale.append(job)
        for job in stale:
            make_stale(self._workflow, job)
        return found

    def _enter_or_warn(self) -> None:
        try:
            self._enter()
        except PipelineError as error:  # the configuration does not hold any more
            warn(LOCK_BEHIND, str(error))

    def _enter(self) -> None:
        """At the end of the process, also where there was nothing to do, or a job failed."""
        workflow = self._workflow
        if workflow._executor_plugin is None or workflow.dryrun or workflow._dag is None:
            return
        dag = workflow.dag
        if workflow.touch or not workflow.execution_settings.keep_metadata:
            return  # then it says nothing of what the outputs were made from
        if dag.rules_allowed_for_needrun or len(workflow.rerun_triggers) < 5:
            return  # then Snakemake has not looked at everything
        if not self._is_current():
            print(f"{PIPELINE}: written anew, for the graph has changed", file=sys.stderr)
            if _in_a_process("generate", "--config", str(self._config)):
                return
            pipeline_here.cache_clear()
        outputs = outputs_of(self._config)

        def is_fresh(job: Any) -> bool:
            return dag.finished(job) or not dag.needrun(job)

        edits = self._set_aside_edited(is_fresh)
        # What a damaged folder's job made again is no edit; if it is another than before, the next
        # plan and `dvc status` find it.
        remade = {path for job in dag.jobs if dag.finished(job) for path in map(str, job.output)}
        for name, found in edits.items():
            if remade.issuperset(found):
                continue
            print(
                f"{name}: not entered in {LOCK}: {some(found)}: edited meanwhile", file=sys.stderr
            )
        fresh = [stage_name(job) for job in in_order(dag.jobs) if is_fresh(job)]
        fresh = [name for name in fresh if name in outputs and name not in edits]
        if not self._meanwhile.config_edited():
            fresh.append(GUARD)
        stamp = _stamp(self._config, fresh)
        if stamp != read_book().get("entered"):
            stamp = _stamp(self._config, fresh) if enter(fresh) else ""
        looked = read_book().get("looked", 0.0) if edits else time.time()
        write_book(running=None, looked=looked, entered=stamp)


def outputs_of(config: Path) -> dict[str, list[str]]:
    """The outputs of each stage, where DVC is in use and its pipeline is that of this run."""
    set_up = PIPELINE.is_file() and Path(".dvc").is_dir()
    under_git = any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents))
    if not (set_up and under_git and importlib.util.find_spec("dvc")):
        return {}
    found = {}
    for name, stage in (pipeline_here().get("stages") or {}).items():
        if is_ours(stage) and name != GUARD:
            words = shlex.split(stage["cmd"])
            chosen = "--configfile" in words
            of = words[words.index("--configfile") + 1] if chosen else MAIN_CONFIG
            if Path(of) == config:
                found[name] = words[words.index("--") + 1 :]
    return found


@cache
def pipeline_here() -> dict[str, Any]:
    """What dvc.yaml holds; nothing where it cannot be read, which is said."""
    try:
        return load_pipeline()
    except PipelineError as error:
        warn("DVC is left aside", str(error))
        return {}


def settle(config: Path, *, killed: bool) -> bool:
    """Look at what was changed, in a process of its own: it reads the graph itself.

    Returns:
        Whether it was possible.
    """
    words = ["settle", "--config", str(config), *(["--killed"] if killed else [])]
    if code := _in_a_process(*words):
        warn(
            f"Snakemake's records and {LOCK} could not be made to agree",
            "above it says why; what snakemake plans now rests on its own records alone",
        )
    return not code


def enter(names: list[str]) -> bool:
    """Enter stages in dvc.lock, in a process of its own: it may fail and take its time.

    Returns:
        Whether all were entered.
    """
    code = _in_a_process("enter", *names) if names else 0
    if code:
        warn(LOCK_BEHIND, "above it says why; mend it and call `snakemake` again")
    return not code


def warn(what: str, why: str) -> None:
    """Say what is not as it should be; the run goes on."""
    print(f"WARNING: {what}: {why}", file=sys.stderr)


def _in_a_process(*words: str) -> int:
    command = [sys.executable, "-m", "zerotrain", "dvc", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode


def _stamp(config: Path, names: Iterable[str]) -> str:
    """What an entry depends on, by times and sizes."""
    from zerotrain.artifact import digest

    stages = pipeline_here()["stages"]
    outputs = outputs_of(config)
    paths = {str(config), str(PIPELINE), str(LOCK)}
    for name in names:
        paths.update(outputs.get(name, ()))
        for dep in stages[name].get("deps", ()):
            paths.add(dep)
            paths.update(map(str, Path(dep).rglob("*")) if Path(dep).is_dir() else ())
    found = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            found.append([path, stat.st_mtime_ns, stat.st_size])
    return digest(found)
