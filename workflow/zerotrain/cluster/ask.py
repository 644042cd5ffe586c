"""Asking Slurm on the login node what the cluster is."""

from __future__ import annotations

import getpass
import shutil
import subprocess

from zerotrain.cluster.slurm import (
    Cluster,
    parse_accounts,
    parse_config,
    parse_nodes,
    parse_partitions,
)
from zerotrain.errors import PipelineError

ANSWER_SECONDS = 60.0
"""How long scontrol or sacct may take: a busy controller answers late."""


def ask_slurm() -> Cluster:
    """Ask the cluster that this login node belongs to.

    Raises:
        PipelineError: there is no Slurm here, or its controller does not answer.
    """
    for command in ("sinfo", "scontrol", "sbatch"):
        if shutil.which(command) is None:
            raise PipelineError(
                f"this machine has no Slurm: there is no command {command!r}",
                hint="call it on the login node; `module load slurm` first where the cluster "
                "keeps its commands in a module. Other engines: docs/hpc.md",
            )
    version = _answer("sinfo", "--version").split()[-1]
    config = parse_config(_answer("scontrol", "show", "config"))
    nodes = parse_nodes(_answer("scontrol", "show", "node", "-o"))
    partitions = parse_partitions(_answer("scontrol", "show", "partition", "-o"), nodes)
    unanswered: list[str] = []
    accounts: tuple[str, ...] = ()
    most = None
    accounting = True
    try:
        _answer("sacct", "-n", "-X", "-S", "now-1hours", "-o", "jobid")
    except PipelineError as error:
        accounting = False
        unanswered.append(error.what)
    else:
        try:
            # One accounting may keep the books of several clusters.
            own = f"cluster={config['ClusterName']}"
            wanted = "format=account,defaultaccount,maxsubmit"
            said = _answer("sacctmgr", "-nP", "show", "user", getpass.getuser(), "-s", own, wanted)
            accounts, most = parse_accounts(said)
        except PipelineError as error:
            unanswered.append(error.what)
    return Cluster(
        version, config, nodes, partitions, accounting, accounts, most, tuple(unanswered)
    )


def _answer(*command: str) -> str:
    """What a command of Slurm prints.

    Raises:
        PipelineError: it fails or does not answer.
    """
    line = " ".join(command)
    hint = "ask again when the cluster answers `sinfo`; `scontrol ping` says whether it is up"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
    except OSError as error:
        raise PipelineError(f"`{line}`: {error.strerror}", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        what = f"`{line}` has not answered in {ANSWER_SECONDS:.0f} s"
        raise PipelineError(what, hint=hint) from error
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()), f"code {done.returncode}")
        raise PipelineError(f"`{line}` fails: {said}", hint=hint)
    return done.stdout
