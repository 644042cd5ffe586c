"""Calling Snakemake on a run, as a user would."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from zerotrain.config.find import CONFIGS
from zerotrain.errors import PipelineError
from zerotrain.supervise import supervise

DEFAULT_CONFIG = CONFIGS / "config.yaml"
"""What the Snakefile reads where no file is named."""
NOTHING = "Nothing to be done"
"""What Snakemake says in place of a table of jobs."""


def command(config: Path, targets: Sequence[str]) -> str:
    """What a user types to make the targets."""
    return shlex.join(["snakemake", *_words(config, targets)])


def train_command(config: Path) -> str:
    """What a user types to train a run to its end."""
    chosen = "" if config == DEFAULT_CONFIG else f" --configfile {shlex.quote(str(config))}"
    return f"snakemake --cores all train{chosen}"


def plan(config: Path, targets: Sequence[str]) -> dict[str, int]:
    """The number of jobs of each rule that Snakemake would run.

    Raises:
        PipelineError: it cannot plan, and the message is its own; or it does not say what it plans.
    """
    # A profile may have hushed the table of jobs; to be quiet about the host alone undoes that.
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
    table = done.stdout.partition("Job stats:\n")[2].partition("\n\n")[0]
    jobs = {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.M)}
    nothing = not table and NOTHING in done.stdout
    if jobs.pop("total", None if not nothing else 0) != sum(jobs.values()):
        raise PipelineError(
            f"snakemake does not say which jobs it would run:\n{done.stdout.strip()}",
            hint="take what changes its output (`quiet`, `logger`) out of your Snakemake profile "
            "or SNAKEMAKE_PROFILE, and call this again",
        )
    return jobs


def make(config: Path, targets: Sequence[str]) -> None:
    """Let Snakemake make the targets; what it prints is seen. A signal is handed on to it.

    Raises:
        PipelineError: it failed.
    """
    code = supervise([sys.executable, "-m", "snakemake", *_words(config, targets)], log=None)
    if code:
        raise PipelineError(
            f"`{command(config, targets)}` ended with code {code}; above it says why",
            hint="fix it and run this again; where another snakemake works in this folder, wait "
            "until it has ended",
        )


def _words(config: Path, targets: Sequence[str]) -> list[str]:
    # Without the two dashes --configfile would swallow the targets.
    chosen = [] if config == DEFAULT_CONFIG else ["--configfile", str(config)]
    return ["--cores", "all", *chosen, "--", *targets]
