"""What a profile's precommand exports is there in every process of a job, on each of its nodes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.cluster.conftest import PROFILE, Project

ENVIRONMENT = Path("profiles/slurm/job-environment.sh")
ROOT = Path(__file__).parents[2]
SNAKEFILE = """\
rule all:
    input: "one.txt", "two.txt"

rule one:
    output: "one.txt"
    shell: "echo $HF_HUB_CACHE > {output}"

rule two:
    output: "two.txt"
    resources: nodes=2, tasks=2, mpi="srun"
    shell:
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --export=ALL"
        " sh -c 'echo $SLURM_NODEID $HF_HUB_CACHE' > {output}"
"""
WAYS = {
    "1. ": (".venv/bin/activate", "WAY=venv"),
    "2. ": ("/etc/profile.d/modules.sh", "module() { WAY=$*; }"),
    "3. ": ("$HOME/miniforge3/etc/profile.d/conda.sh", "conda() { WAY=$*; }"),
}


@pytest.mark.slow
def test_a_job_of_one_node_and_one_of_two_have_it(project: Project) -> None:
    """Through Snakemake's own step, which keeps little of SLURM_*, and the srun within a rule."""
    (project.folder / "fetched").mkdir()
    (project.folder / "fetched" / "env.sh").write_text("export HF_HUB_CACHE=/shared/hub\n")
    project.environment.pop("HF_HUB_CACHE", None)
    (project.folder / "Probe").write_text(SNAKEFILE)
    project.snakemake(*PROFILE, "--snakefile", "Probe", "--retries", "0")
    assert (project.folder / "one.txt").read_text() == "/shared/hub\n"
    lines = sorted((project.folder / "two.txt").read_text().splitlines())
    assert lines == ["0 /shared/hub", "1 /shared/hub"]


@pytest.mark.parametrize(
    ("way", "expected"), [("1. ", "venv"), ("2. ", "venv"), ("3. ", "activate zerotrain")]
)
def test_each_way_works_in_the_shell_of_jobs(tmp_path: Path, way: str, expected: str) -> None:
    """.venv as it is; modules and conda where their line is taken in and that of .venv out."""
    script = ""
    blocks = (ROOT / ENVIRONMENT).read_text().split("\n\n")
    for block in blocks:
        lines = block.splitlines()
        if any(line.startswith(f"# {way}") for line in lines):
            script += lines[-1].removeprefix("# ") + "\n"
    assert script.count("\n") == 1
    for place, content in WAYS.values():
        stands_in = tmp_path / Path(place).name
        stands_in.write_text(content + "\n")
        script = script.replace(place, str(stands_in))
    done = subprocess.run(
        ["/bin/sh", "-c", f'{script} echo "$WAY"'],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == expected
