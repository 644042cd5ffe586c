"""A short job on a compute node: checks folder, clock, Python, GPUs and access to the hub."""

from __future__ import annotations

import contextlib
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

from zerotrain.artifact.documents import DocumentError, check_object, parse_json
from zerotrain.errors import PipelineError
from zerotrain.graph.cluster.slurm import Partition
from zerotrain.graph.cluster.trial_node import ANSWERED, ASKED, seconds_until
from zerotrain.machine.regular_file import write_text

MINUTES = 5
"""Time limit of the job; it takes seconds, most of them to import torch."""


@dataclass
class Trial:
    """The report of the job."""

    command: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    """The output of zerotrain.graph.cluster.trial_node."""
    skew_seconds: float | None = None
    """The node's clock minus this one, less the time that the answer took to arrive."""
    seen_after: float | None = None
    """Seconds until the node's file was visible here."""
    failure: str = ""
    """Why the job failed."""


def try_job(partition: Partition, folder: Path, account: str | None, wait_s: float) -> Trial:
    """Run the job and read its report.

    Args:
        partition: The partition that it runs in.
        folder: A folder of the project, which the node has to see.
        account: The account that Slurm bills; None: the default.
        wait_s: Seconds that the job may wait in the queue before it is withdrawn.

    Raises:
        PipelineError: the folder is not writable.
    """
    command = ["srun", "--quiet", f"--partition={partition.name}", f"--time={MINUTES}"]
    command += ["--nodes=1", "--ntasks=1", f"--immediate={wait_s:.0f}", "--job-name=cluster-check"]
    command += [f"--account={account}"] if account else []
    command += ["--cpus-per-task=1", "--mem=4G"]  # the default may be all of the node's
    command += ["--gres=gpu:1"] if partition.gpu_nodes else []
    with (
        _shared(folder) as shared,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
    ):
        word = secrets.token_hex(8)
        trial = Trial(
            [*command, sys.executable, "-m", "zerotrain.graph.cluster.trial_node", str(shared)]
        )
        try:
            job = subprocess.Popen(
                trial.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,  # a pipe would fill up while the job's output is read
                text=True,
            )
        except OSError as error:
            trial.failure = f"srun: {error.strerror}"
            return trial
        with job:
            write_text(shared / ASKED, word)
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
            facts = check_object(parse_json(line, "srun"), "srun")
        except DocumentError:  # output of a prolog or of a shell's start-up file
            continue
        trial.facts |= facts
        if "time" in facts:
            trial.skew_seconds = facts["time"] - arrived
        if "answered" in facts:
            trial.seen_after = seconds_until(shared / ANSWERED)


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[Path]:
    """Create a temporary folder next to the project's files, and remove it at the end."""
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
