"""What is said of a trial job on a compute node."""

from __future__ import annotations

from zerotrain.cluster.findings import Finding
from zerotrain.cluster.slurm import Partition
from zerotrain.cluster.trial import Trial

LARGEST_SKEW = 1.0
"""Seconds: Snakemake compares times of files that here and there were written."""
SMALL_TEMPORARY = 20 * 10**9
"""Bytes that a node-local copy of a cache will soon pass."""
BUSY = ("Requested nodes are busy", "Immediate execution impossible")
"""What srun says of a job that waited in vain; of one that may never run it says other words."""


def of_trial(trial: Trial, partition: Partition) -> list[Finding]:
    """What a job on a compute node tells."""
    facts = trial.facts
    if "time" not in facts:
        return [_no_start(trial)]
    found = [Finding("ok", f"a job ran on {facts['host']} by `{' '.join(trial.command[:4])} ...`")]
    found += [_clock(trial), _folder(trial)]
    if "temporary" not in facts:
        return [*found, Finding("problem", f"the job ended early: {trial.failure}")]
    found += [_torch(trial, partition), _temporary(trial), _hub(trial)]
    return found


def _no_start(trial: Trial) -> Finding:
    if any(text in trial.failure for text in BUSY):
        return Finding(
            "warn",
            f"no node was free for a trial: {trial.failure}",
            "wait longer with --wait SECONDS, or look at the rest with --no-job; with --wait 1 "
            "Slurm says so where something else than full nodes is the reason",
        )
    if "Unable to allocate" in trial.failure:
        return Finding(
            "problem",
            f"Slurm refuses a trial job: {trial.failure}",
            "name another partition or account with --partition and --account; by hand: "
            f"`{' '.join(trial.command)}`",
        )
    return Finding(
        "problem",
        f"the project's Python does not start on a node: {trial.failure}",
        "install the project (make setup) on a folder that the nodes see, with a Python that they "
        f"have too; by hand: `{' '.join(trial.command)}`",
    )


def _clock(trial: Trial) -> Finding:
    skew = trial.skew_seconds or 0.0
    if abs(skew) <= LARGEST_SKEW:
        return Finding("ok", f"its clock and this one differ by {abs(skew):.2f} s or less")
    way = "ahead of" if skew > 0 else "behind"
    return Finding(
        "problem",
        f"its clock is {abs(skew):.1f} s {way} this one: Snakemake takes files for older than "
        "they are",
        "ask the administrators to set the clocks (NTP)",
    )


def _folder(trial: Trial) -> Finding:
    if trial.facts.get("asked_after") is None:
        return Finding(
            "problem",
            "the node does not see a file that was written here",
            "move the project to a file system that all nodes share (`df -T .` names this one's)",
        )
    if trial.seen_after is None:
        return Finding(
            "problem",
            "what the node wrote is not seen here",
            "move the project to a file system that all nodes share",
        )
    slower = max(trial.facts["asked_after"], trial.seen_after)
    return Finding("ok", f"the project's folder is shared: a file is seen after {slower:.1f} s")


def _torch(trial: Trial, partition: Partition) -> Finding:
    facts = trial.facts
    if facts["torch"]:
        return Finding(
            "problem", f"torch does not load there: {facts['torch']}", "`make setup`, then again"
        )
    if partition.gpu_nodes and facts["accelerator"] == "cpu":
        why = facts["unused"] or "the job got a GPU by Slurm, but there is none that torch knows"
        return Finding(
            "problem",
            f"torch computes on the CPU there: {why}",
            "`make setup` where a GPU is seen, or with the build of torch that fits it; "
            "`nvidia-smi` in a job of that partition shows driver and GPUs",
        )
    return Finding("ok", f"torch loads there and computes on {facts['machine']}")


def _temporary(trial: Trial) -> Finding:
    place, free = trial.facts["temporary"], trial.facts["temporary_free"]
    said = f"a job's own disk, {place}, has {free / 1e9:.0f} GB free"
    if free < SMALL_TEMPORARY:
        return Finding("warn", said, "too small for a cache or a swap folder: keep them shared")
    return Finding("ok", f"{said}: room for node-local scratch")


def _hub(trial: Trial) -> Finding:
    if trial.facts["hub"]:
        return Finding(
            "warn",
            f"compute nodes do not reach the hub ({trial.facts['hub']})",
            "call `zerotrain fetch` here before the jobs; see docs/hpc.md",
        )
    return Finding("ok", "compute nodes reach the hub")
