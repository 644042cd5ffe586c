"""Snakemake and DVC both keep books on what was made from what. Here they are made to agree.

Snakemake's books (.snakemake/) tell an output by its time; DVC's (dvc.lock) by its content. So:

- After `snakemake` has run, the stages that it knows to be fresh are entered in dvc.lock.
- Before it plans, what somebody has put behind its back is looked at (`zerotrain.dvc.records`):
  outputs that DVC brought back, inputs of new content under an old time, a run that was killed
  before it could enter what it had made.

Inside a stage of DVC neither is done: there DVC judges, and its stages force what they call. Where
DVC is not installed or not set up, or dvc.yaml is of another run, Snakemake is left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from zerotrain.dvc import jobs
from zerotrain.dvc.jobs import MAIN_CONFIG, in_order, stage_name

PIPELINE = Path("dvc.yaml")
LOCK = Path("dvc.lock")
BOOK = Path(".snakemake/agreement.json")
"""When the books last agreed, and the run that is under way: {"looked": time, "seen": {output: its
time}, "entered": digest, "running": {"pid", "host", "began"}}."""


def keep(workflow: Any, config: Path) -> None:
    """What the Snakefile calls as it is read: settle before it plans, enter at its end.

    Args:
        workflow: Snakemake's workflow object.
        config: The run's configuration.
    """
    if jobs.LOOKING or not workflow.is_main_process or "DVC_STAGE" in os.environ:
        return
    outputs = outputs_of(config)
    if not outputs:
        return
    book = read_book()
    running = book.get("running")
    if running and _lives(running):
        return  # its jobs are half done, and it settles itself
    if running or disturbed(outputs, book):
        settle(config, killed=bool(running))
    atexit.register(_enter_at_exit, workflow, config, outputs)


def outputs_of(config: Path) -> dict[str, list[str]]:
    """The outputs of each stage, where DVC is in use and its pipeline is that of this run."""
    set_up = PIPELINE.is_file() and Path(".dvc").is_dir()
    under_git = any((folder / ".git").exists() for folder in Path("x").resolve().parents)
    if not (set_up and under_git and importlib.util.find_spec("dvc")):
        return {}
    import yaml

    loaded = yaml.load(PIPELINE.read_text(), Loader=yaml.CSafeLoader) or {}
    found = {}
    for name, stage in (loaded.get("stages") or {}).items():
        words = shlex.split(str(stage.get("cmd", "")))
        if words[:1] != ["snakemake"] or "--" not in words:
            continue
        of = words[words.index("--configfile") + 1] if "--configfile" in words else MAIN_CONFIG
        if Path(of) == config:
            found[name] = words[words.index("--") + 1 :]
    return found


def disturbed(outputs: Mapping[str, Iterable[str]], book: Mapping[str, Any]) -> bool:
    """Whether outputs or inputs were changed in a way that Snakemake would not notice."""
    from snakemake.persistence.file import FilePersistence

    persistence = FilePersistence(nolock=True)
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


def read_book() -> dict[str, Any]:
    """When the books last agreed; empty where they never did."""
    try:
        found = json.loads(BOOK.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_book(**values: Any) -> None:
    """Change the book."""
    BOOK.parent.mkdir(exist_ok=True)
    new = BOOK.with_name(f"{BOOK.name}.{os.getpid()}")
    new.write_text(json.dumps({**read_book(), **values}))
    new.replace(BOOK)


def note_running() -> None:
    """A run begins: were it killed, what it made would not be entered."""
    me = psutil.Process()
    write_book(running={"pid": me.pid, "host": socket.gethostname(), "began": me.create_time()})


def _lives(running: Mapping[str, Any]) -> bool:
    if running["host"] != socket.gethostname():
        return any(Path(".snakemake/locks").glob("*.lock"))
    try:
        process = psutil.Process(running["pid"])
        return process.create_time() == running["began"] and process.pid != os.getpid()
    except psutil.NoSuchProcess:
        return False


def _enter_at_exit(workflow: Any, config: Path, outputs: Mapping[str, list[str]]) -> None:
    if workflow._executor_plugin is None or workflow.dryrun or workflow._dag is None:
        return
    dag = workflow.dag
    if dag.rules_allowed_for_needrun or len(workflow.rerun_triggers) < 5:
        return  # then Snakemake has not looked at everything
    fresh = [
        stage_name(job) for job in in_order(dag.jobs) if dag.finished(job) or not dag.needrun(job)
    ]
    fresh = [name for name in fresh if name in outputs]
    stamp = _stamp(config, fresh, outputs)
    if stamp != read_book().get("entered"):
        enter(fresh)
        stamp = _stamp(config, fresh, outputs)
    write_book(running=None, looked=time.time(), entered=stamp)


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
