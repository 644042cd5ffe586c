"""Calls of Snakemake on a run, as a user would make them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from zerotrain.config.command_options import MAIN_CONFIG
from zerotrain.errors import PipelineError
from zerotrain.machine.child_process import supervise

LOCKS = Path(".snakemake/locks")
"""Files with the paths that a Snakemake works on; those of a killed one stay."""
NOTHING = "Nothing to be done"
"""Snakemake's message if no job would run."""


def check_project() -> None:
    """Check that the working directory is a project.

    Raises:
        PipelineError: it has no Snakefile.
    """
    if not Path("Snakefile").is_file():
        raise PipelineError(
            f"{Path.cwd()}: no Snakefile here", hint="call it in the folder of the project"
        )


def command(config: Path, targets: Sequence[str]) -> str:
    """Return the command that makes the targets."""
    return shlex.join(["snakemake", *_words(config, targets)])


def train_command(config: Path) -> str:
    """Return the command that trains a run to its end."""
    return shlex.join(["snakemake", "--cores", "all", "train", *config_option(config)])


def config_option(config: Path) -> list[str]:
    """Return the option that names a configuration; nothing for the default one."""
    return [] if config == MAIN_CONFIG else ["--configfile", str(config)]


def plan(config: Path, targets: Sequence[str]) -> dict[str, int]:
    """Return the number of jobs that Snakemake would run, by rule.

    Raises:
        PipelineError: Snakemake cannot plan, with its message, or does not print the plan.
    """
    # A profile may hide the jobs; `--quiet host` hides only the host and overrides that.
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--quiet", "host", *_words(config, targets)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise PipelineError(
            f"snakemake cannot plan it:\n{done.stdout.strip()}",
            hint="fix the problem above, and run this again",
        )
    if NOTHING in done.stdout:
        return {}
    found = re.search(r"^(\d+) stages? would run: (.+)$", done.stdout, re.M)
    counts = re.findall(r"(\d+) (\w+)", found[2]) if found else []
    jobs = {rule: int(count) for count, rule in counts}
    if not found or int(found[1]) != sum(jobs.values()):
        raise PipelineError(
            f"snakemake does not say which jobs it would run:\n{done.stdout.strip()}",
            hint="take what changes its output (`verbose`, `logger`) out of your Snakemake profile "
            "or SNAKEMAKE_PROFILE, and call this again",
        )
    return jobs


def make(config: Path, targets: Sequence[str]) -> None:
    """Make the targets with Snakemake; its output is visible, and signals are forwarded to it.

    Raises:
        PipelineError: Snakemake failed.
    """
    code = supervise([sys.executable, "-m", "snakemake", *_words(config, targets)], log=None)
    if code:
        raise PipelineError(
            f"`{command(config, targets)}` ended with code {code}; above it says why",
            hint="fix it and run this again; where another snakemake works in this folder, wait "
            "until it has ended",
        )


def _words(config: Path, targets: Sequence[str]) -> list[str]:
    # Without `--`, --configfile would swallow the targets.
    return ["--cores", "all", *config_option(config), "--", *targets]
