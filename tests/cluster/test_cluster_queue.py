"""The queue of a real Slurm, as `zerotrain watch` reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.conftest import wait_until
from tests.cluster.virtual_slurm import VirtualSlurm

from zerotrain.run.processes import jobs_here


@pytest.mark.slow
def test_a_job_is_found_by_its_folder_and_rule(
    cluster: VirtualSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its id and the reason for which it waits; then it runs."""
    words = ("sbatch", "--parsable", "--mem=100", "--output=/dev/null", "--wrap", "sleep 60")
    place = ("--chdir", str(tmp_path), "--comment", "rule_train_phase_wildcards_plain")
    held = cluster.ask(*words, *place, "--hold")
    cluster.ask(*words, "--chdir", "/", "--comment", "rule_report")
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    [job] = jobs_here(tmp_path)
    assert (job.id, job.waits, job.reason) == (held, True, "JobHeldUser")
    assert (job.rule, job.wildcards) == ("train_phase", "plain")
    cluster.ask("scontrol", "release", held)
    wait_until(lambda: [one.state for one in jobs_here(tmp_path)] == ["RUNNING"], "its start")
