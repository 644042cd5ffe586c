"""A short job on a compute node: folder, clock, Python, GPUs and the way to the hub from there."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.cluster.slurm import Partition
from zerotrain.cluster.trial_node import ANSWERED, ASKED, seconds_until
from zerotrain.errors import PipelineError

MINUTES = 5
"""Limit of the job; it takes some seconds, of which importing torch takes most."""


@dataclass
class Trial:
    """What came back."""

    command: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    """What zerotrain.cluster.trial_node said."""
    skew_seconds: float | None = None
    """The node's clock against this one; late by what the answer took to come."""
    seen_after: float | None = None
    """Seconds until what the node wrote was seen here."""
    failure: str = ""
    """Why the job did not end well."""


def try_job(partition: Partition, folder: Path, account: str | None, wait_s: float) -> Trial:
    """Run the job and listen to it.

    Args:
        partition: Where it runs.
        folder: A folder of the project, which the node must see.
        account: Whom Slurm bills; None: its default.
        wait_s: Seconds that the job may wait in the queue; then it is withdrawn.

    Raises:
        PipelineError: the folder cannot be written.
    """
    command = ["srun", "--quiet", f"--partition={partition.name}", f"--time={MINUTES}"]
    command += ["--nodes=1", "--ntasks=1", f"--immediate={wait_s:.0f}", "--job-name=cluster-check"]
    command += [f"--account={account}"] if account else []
    command += ["--cpus-per-task=1", "--mem=4G"]  # Left out, it may be all that the node has.
    command += ["--gres=gpu:1"] if partition.gpu_nodes else []
    with _shared(folder) as shared, tempfile.TemporaryFile("w+", errors="replace") as errors:
        word = secrets.token_hex(8)
        trial = Trial([*command, sys.executable, "-m", "zerotrain.cluster.trial_node", str(shared)])
        try:
            job = subprocess.Popen(
                trial.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,  # no pipe, which nobody would empty while the job speaks
                text=True,
            )
        except OSError as error:
            trial.failure = f"srun: {error.strerror}"
            return trial
        with job:
            (shared / ASKED).write_text(word)
            try:
                _listen(job, shared, trial)
            except BaseException:
                job.terminate()
                raise
        if job.returncode:
            errors.seek(0)
            lines = [line for line in errors if line.strip()]
            trial.failure = lines[-1].strip() if lines else f"srun ended with code {job.returncode}"
    return trial


def _listen(job: subprocess.Popen[str], shared: Path, trial: Trial) -> None:
    for line in job.stdout or ():
        arrived = time.time()
        try:
            said = json.loads(line)
        except ValueError:  # what a prolog or a shell's start-up file prints
            continue
        trial.facts |= said
        if "time" in said:
            trial.skew_seconds = said["time"] - arrived
        if "answered" in said:
            trial.seen_after = seconds_until(shared / ANSWERED)


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[Path]:
    """A folder of its own beside the project's files, removed at the end."""
    try:
        shared = Path(tempfile.mkdtemp(prefix=".cluster-check-", dir=folder)).absolute()
    except OSError as error:
        raise PipelineError(
            f"{folder.absolute()} cannot be written: {error.strerror}",
            hint="call it in the folder of the project, on a file system that the nodes share",
        ) from error
    try:
        yield shared
    finally:
        shutil.rmtree(shared, ignore_errors=True)
