"""`zerotrain cluster check`: ask, choose, try, write."""

from __future__ import annotations

from pathlib import Path

from zerotrain.cluster.ask import ask_slurm
from zerotrain.cluster.choice import choose
from zerotrain.cluster.findings import Finding, of_cluster
from zerotrain.cluster.profile import FILE, profile, refuse_present, write_profile
from zerotrain.cluster.trial import try_job
from zerotrain.cluster.trial_findings import of_trial
from zerotrain.config.read import read_config


def check(
    config: Path | None,
    output: Path | None,
    *,
    force: bool = False,
    partition: str | None = None,
    account: str | None = None,
    wait_s: float | None = 60.0,
) -> tuple[list[Finding], Path | None]:
    """Look at the cluster of this login node.

    Args:
        config: A run whose phases the cluster is to hold.
        output: Folder of a profile to write.
        force: Whether to replace a profile.
        partition: Where to train; None: the one that fits best.
        account: Whom Slurm bills; None: the user's default one.
        wait_s: Seconds that the trial job may be queued; None: no job.

    Returns:
        What was found, and the profile's file.

    Raises:
        PipelineError: no Slurm, no such partition, a configuration that is wrong, a profile that
            is there already.
    """
    run = read_config(config) if config else None
    if output and not force:
        refuse_present(output)
    cluster = ask_slurm()
    choice = choose(cluster, partition, account)
    findings = of_cluster(cluster, choice)
    trial = None
    if wait_s is not None:
        trial = try_job(choice.training, Path(), choice.account, wait_s)
        findings += of_trial(trial, choice.training)
    if run:
        from zerotrain.cluster.phases import of_phases  # torch, for the forecast of memory

        findings += of_phases(run, choice.training)
    if output is None:
        return findings, None
    write_profile(output, profile(cluster, choice, trial))
    return findings, output / FILE
