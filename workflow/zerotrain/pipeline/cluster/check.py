"""`zerotrain cluster check`: query Slurm, choose a partition, try a job, write a profile."""

from __future__ import annotations

from pathlib import Path

from zerotrain.config.read import read_config
from zerotrain.pipeline.cluster.choice import choose
from zerotrain.pipeline.cluster.findings import Finding, of_cluster, of_trial
from zerotrain.pipeline.cluster.profile import FILE, check_absent, render_profile, write_profile
from zerotrain.pipeline.cluster.slurm import ask_slurm
from zerotrain.pipeline.cluster.trial import try_job


def check(
    config: Path | None,
    output: Path | None,
    *,
    force: bool = False,
    partition: str | None = None,
    account: str | None = None,
    wait_s: float | None = 60.0,
) -> tuple[list[Finding], Path | None]:
    """Examine the cluster of this login node.

    Args:
        config: A run whose phases the cluster must fit.
        output: Folder of a profile to write.
        force: Whether to replace a profile.
        partition: The partition for training; None: the one that fits best.
        account: The account that Slurm bills; None: the user's default.
        wait_s: Seconds that the trial job may be queued; None: no trial job.

    Returns:
        The findings, and the profile's file.

    Raises:
        PipelineError: there is no Slurm or no such partition, the configuration is invalid, or the
            profile exists already.
    """
    run = read_config(config) if config else None
    if output and not force:
        check_absent(output)
    cluster = ask_slurm()
    choice = choose(cluster, partition, account)
    findings = of_cluster(cluster, choice)
    trial = None
    if wait_s is not None:
        trial = try_job(choice.training, Path(), choice.account, wait_s)
        findings += of_trial(trial, choice.training)
    if run:
        from zerotrain.pipeline.cluster.phases import of_phases  # imports torch, to forecast memory

        findings += of_phases(run, choice.training)
    if output is None:
        return findings, None
    write_profile(output, render_profile(cluster, choice, trial))
    return findings, output / FILE
