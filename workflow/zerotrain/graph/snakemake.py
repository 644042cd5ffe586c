"""Calls of Snakemake on a run, as a user would make them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from zerotrain.config.runs import config_option
from zerotrain.errors import PipelineError
from zerotrain.machine.child_process import supervise

LOCKS = Path(".snakemake/locks")
"""Files with the paths that a Snakemake works on; those of a killed one stay."""


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
