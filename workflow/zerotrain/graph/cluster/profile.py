"""A starter Snakemake profile for a cluster; each entry states its reason."""

from __future__ import annotations

import builtins
import textwrap
from keyword import kwlist
from pathlib import Path

import yaml
from jinja2 import Environment, StrictUndefined

from zerotrain.artifact import write_whole
from zerotrain.config.scalar import one_line
from zerotrain.errors import PipelineError
from zerotrain.graph.cluster.choice import Choice, preempt_mode
from zerotrain.graph.cluster.slurm import Cluster
from zerotrain.graph.cluster.trial import Trial

FILE = "config.yaml"
TEMPLATE = Path(__file__).with_name("profile.yaml.j2")
WIDTH = 100
JOBS = 100
FIRST_LOOK = 40
"""Seconds until the executor first queries the state of jobs."""
WARNING = 120
"""Seconds before the time limit at which a checkpoint is requested."""
DAY = 24 * 60
UNKNOWN_LATENCY = 60
"""Seconds after which NFS caches are refreshed."""
LONGEST_STAGE = 2 * 480
"""Minutes that a stage may request at its last attempt (rules/cache_latents.smk)."""
TRAINING = "train_phase"
GPU_RULES = ("encode_shard", "cache_latents", "evaluate")
NO_GPU_RULES = (
    *("prepare_dataset", "build_base", "build_shared_base"),
    *("import_checkpoint", "export_weights"),
)
EVALUATED = {*dir(builtins), *kwlist, "input", "attempt", "threads", "wildcards"}
"""Names that Snakemake would evaluate as something other than text."""


def check_absent(folder: Path) -> None:
    """Check that no profile would be overwritten.

    Raises:
        PipelineError: there is a profile already.
    """
    if (folder / FILE).exists():
        raise PipelineError(
            f"{folder / FILE} is there already and may hold what you have set",
            hint="name another folder with --output, or replace it with --force",
        )


def write_profile(folder: Path, text: str) -> None:
    """Write a profile's config.yaml.

    Raises:
        PipelineError: the folder is not writable.
    """
    try:
        write_whole(folder / FILE, text)
    except OSError as error:
        raise PipelineError(
            f"{folder / FILE} cannot be written: {error.strerror}", hint="name a folder of yours"
        ) from error


def render_profile(cluster: Cluster, choice: Choice, trial: Trial | None) -> str:
    """Render config.yaml.

    Args:
        cluster: Slurm's description of the cluster.
        choice: The partitions and the account of jobs.
        trial: The report of the trial job, if one ran.
    """
    seen_after = trial.seen_after if trial else None
    if trial and seen_after is not None:
        seen_after = max(seen_after, trial.facts.get("asked_after") or 0.0)
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=lambda value: one_line(str(value)),
    )
    environment.filters |= {"comment": _comment, "scalar": _scalar}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        **{name: value for name, value in globals().items() if name.isupper()},
        cluster=cluster,
        choice=choice,
        one=choice.training,
        job_age=cluster.seconds("MinJobAge"),
        preempted=preempt_mode(choice.training, cluster) != "OFF",
        seen_after=seen_after,
    )


def _scalar(value: str) -> str:
    """Format a text as YAML; quote what Snakemake could evaluate as Python, such as `all.q`."""
    if not value.startswith("--"):
        plain = value.isidentifier() and value not in EVALUATED
        value = value if plain else repr(value)
    return yaml.safe_dump(value, width=WIDTH).removesuffix("\n...\n").strip()


def _comment(text: str, indent: str = "") -> str:
    margin = f"{indent}# "
    return (
        textwrap.fill(text.strip(), WIDTH, initial_indent=margin, subsequent_indent=margin) + "\n"
    )
