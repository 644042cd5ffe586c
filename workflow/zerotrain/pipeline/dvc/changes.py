"""Changes that make the origin of outputs unknown: between two calls of snakemake, and during one.

Snakemake and DVC hash a job's inputs after the job has ended. If a value is edited during a
training, they would record the outputs as made with the edited value.

What is known from the last call is in the journal, .snakemake/agreement.json:

{"looked": time at which metadata and dvc.lock last agreed, "seen": {output without a record: its
time} and "lock": [time, size] of dvc.lock when metadata was last written, "entered": digest of what
was last committed to dvc.lock, "running": {"pid", "host", "began", "given"} of the run in progress}
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from zerotrain.artifact import write_whole
from zerotrain.artifact.documents import read_object
from zerotrain.config.read import load_config
from zerotrain.errors import PipelineError
from zerotrain.pipeline.job_files import inputs_of

MISSING = object()
JOURNAL = Path(".snakemake/agreement.json")


def read_journal() -> dict[str, Any]:
    """Read the journal; return an empty mapping if it is missing or invalid."""
    try:
        found = read_object(JOURNAL)
        found["looked"] = float(found.get("looked", 0.0))
        if running := found.get("running"):
            found["running"] = {key: running[key] for key in ("pid", "host", "began", "given")}
        found["seen"] = dict(found.get("seen", {}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return found


def update_journal(**values: Any) -> None:
    """Update values of the journal."""
    write_whole(JOURNAL, json.dumps({**read_journal(), **values}))


def note_running(given: str) -> None:
    """Record that a run starts: if it is killed, its results are not in dvc.lock.

    Args:
        given: Digest of the configuration's values.
    """
    me = psutil.Process()
    process = {"pid": me.pid, "host": socket.gethostname(), "began": me.create_time()}
    update_journal(running={**process, "given": given})


def lock_stamp() -> list[int] | None:
    """Return the time and size of dvc.lock; None if it is missing."""
    try:
        stat = os.stat("dvc.lock")
    except OSError:
        return None
    return [stat.st_mtime_ns, stat.st_size]


def is_alive(running: Mapping[str, Any]) -> bool:
    """Return whether the recorded run is in progress, in a process other than this one."""
    if running["host"] != socket.gethostname():
        return any(Path(".snakemake/locks").glob("*.lock"))
    try:
        process = psutil.Process(running["pid"])
        return process.create_time() == running["began"] and process.pid != os.getpid()
    except psutil.NoSuchProcess:
        return False


class ConcurrentEdits:
    """A run's configuration and the time when it was read.

    Args:
        config: The run's configuration.
    """

    def __init__(self, config: Path) -> None:
        self._config = config
        self.began = time.time()
        self._values = _read(config)
        self.given = digest_of(config)

    def config_edited(self) -> bool:
        """Return whether a value of the configuration has changed since the run started."""
        return self.given != digest_of(self._config)

    def edited(self, workflow: Any, job: Any, stage: Mapping[str, Any]) -> dict[str, float]:
        """Return a job's inputs that were edited after the job, or the run, started.

        Args:
            workflow: Snakemake's workflow object.
            job: A job that has run, or that was up to date.
            stage: Its stage in dvc.yaml.

        Returns:
            The time of each edit, by file or key of the configuration.
        """
        began = began_and_ended(workflow, job)[0] if workflow.dag.finished(job) else self.began
        edits = {path: changed_at(path) for path in inputs_of(job)}
        edits = {path: when for path, when in edits.items() if when > began}
        now, then = _read(self._config), changed_at(str(self._config))
        for keys in (one.get(str(self._config), ()) for one in stage.get("params") or ()):
            edits |= {key: then for key in keys if _at(now, key) != _at(self._values, key)}
        return edits


def edited_during(workflow: Any, job: Any, times: Iterable[float] = ()) -> bool:
    """Return whether one of these times, or a change of the job's inputs, is within its run."""
    began, ended = began_and_ended(workflow, job)
    changes = list(times) or [changed_at(path) for path in inputs_of(job)]
    return any(began < change <= ended for change in changes)


def began_and_ended(workflow: Any, job: Any) -> tuple[float, float]:
    """Return when a finished job started and ended, from Snakemake's records."""
    records = [workflow.persistence.metadata(path) for path in job.output]
    return min(one.starttime for one in records), max(one.endtime for one in records)


def digest_of(config: Path) -> str:
    """Hash a configuration's values, as given in the file."""
    text = json.dumps(_read(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def changed_at(path: str) -> float:
    """Return when a file was last changed on this disk (its ctime); 0.0 if it is missing."""
    try:
        return os.stat(path).st_ctime
    except OSError:
        return 0.0


def _read(config: Path) -> Any:
    try:
        return load_config(config)
    except PipelineError:
        return None  # the file is being edited


def _at(given: Any, key: str) -> Any:
    """Look up a value by its name in dvc.yaml, such as `phases.0` or `train`."""
    for part in key.split("."):
        try:
            given = given[int(part)] if isinstance(given, list) else given[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return MISSING
    return given
