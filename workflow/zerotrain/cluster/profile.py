"""A starting profile of Snakemake for a cluster, in which each entry has its reason."""

from __future__ import annotations

import builtins
import math
import textwrap
from keyword import kwlist
from pathlib import Path
from typing import Any

import yaml

from zerotrain.artifact import write_whole
from zerotrain.cluster.choice import Choice, preempt_mode
from zerotrain.cluster.slurm import Cluster, Partition
from zerotrain.cluster.trial import Trial
from zerotrain.errors import PipelineError
from zerotrain.scalar import one_line

FILE = "config.yaml"
WIDTH = 100
JOBS = 100
FIRST_LOOK = 40
"""The executor's own seconds until it first asks for the state of jobs."""
WARNING = 120
"""Seconds before the time limit at which a checkpoint is asked for."""
DAY = 24 * 60
UNKNOWN_LATENCY = 60
"""Seconds after which caches of NFS look again."""
LONGEST_STAGE = 2 * 480
"""Minutes that a stage may ask for at its last attempt (rules/cache_latents.smk)."""
TRAINING = "train_phase"
GPU_RULES = ("cache_latents", "evaluate")
NO_GPU_RULES = (
    *("prepare_dataset", "build_base", "build_shared_base", "build_base_of_data"),
    *("import_checkpoint", "export_weights"),
)
EVALUATED = {*dir(builtins), *kwlist, "input", "attempt", "threads", "wildcards"}
"""Names that Snakemake would take for something else."""
Entry = tuple[str, dict[str, Any]]


def refuse_present(folder: Path) -> None:
    """Keep what a user may have set.

    Raises:
        PipelineError: a profile lies there.
    """
    if (folder / FILE).exists():
        raise PipelineError(
            f"{folder / FILE} is there already and may hold what you have set",
            hint="name another folder with --output, or replace it with --force",
        )


def write_profile(folder: Path, text: str) -> None:
    """Write a profile's config.yaml.

    Raises:
        PipelineError: the folder cannot be written.
    """
    try:
        write_whole(folder / FILE, text)
    except OSError as error:
        raise PipelineError(
            f"{folder / FILE} cannot be written: {error.strerror}", hint="name a folder of yours"
        ) from error


def profile(cluster: Cluster, choice: Choice, trial: Trial | None) -> str:
    """The text of config.yaml.

    Args:
        cluster: What Slurm says.
        choice: Where jobs go.
        trial: What a job told, if one ran.
    """
    name = cluster.config.get("ClusterName", "this cluster")
    head = (
        f"Cluster {name}, Slurm {cluster.version}; written by `zerotrain cluster check`. It is "
        "merged with profiles/default. Change what you know better."
    )
    entries = [
        *_engine(cluster),
        *_failures(trial),
        ("What holds for every job.", {"default-resources": _defaults(cluster, choice)}),
        ("What holds for the jobs of one rule.", {"set-resources": _rules(choice)}),
    ]
    return "\n\n".join([_comment(head, ""), *(_block(entry, "") for entry in entries)]) + "\n"


def _engine(cluster: Cluster) -> list[Entry]:
    most = cluster.most_jobs
    entries: list[Entry] = [
        ("Submit jobs by sbatch (snakemake-executor-plugin-slurm).", {"executor": "slurm"}),
        (
            f"Your limit of submitted jobs is {most}."
            if most is not None and most <= JOBS
            else "Jobs submitted at a time; Slurm queues them.",
            {"jobs": min(JOBS, most or JOBS)},
        ),
    ]
    if not cluster.accounting:
        entries.append(
            (
                "sacct does not answer here: by it the executor would wait for ever.",
                {"slurm-status-command": "squeue"},
            )
        )
        age = cluster.seconds("MinJobAge")
        if age is not None and age < 3 * FIRST_LOOK:
            entries.append(
                (
                    f"Slurm forgets a job {age} s after its end (MinJobAge). The executor turns to "
                    "sacct, which does not answer, if three times this is more.",
                    {"slurm-init-seconds-before-status-checks": max(1, age // 3)},
                )
            )
    entries.append(
        (
            "A job that is preempted or whose node dies is queued again by Slurm; training goes on "
            "from its newest checkpoint.",
            {"slurm-requeue": True},
        )
    )
    entries.append(
        (
            "What makes a job's environment: .venv, modules or conda, what `zerotrain fetch` has "
            "fetched. Copy the file and change it where one of the others is meant.",
            {"precommand": ". profiles/slurm/job-environment.sh"},
        )
    )
    return entries


def _failures(trial: Trial | None) -> list[Entry]:
    seen = trial and trial.seen_after is not None
    if trial and seen:
        slower = max(trial.seen_after or 0.0, trial.facts.get("asked_after") or 0.0)
        latency: Entry = (
            f"What a node writes was seen here after {slower:.1f} s; several times as long.",
            {"latency-wait": max(10, math.ceil(5 * slower))},
        )
    else:
        latency = (
            "Not measured: caches of NFS look again after 60 s at the latest.",
            {"latency-wait": UNKNOWN_LATENCY},
        )
    return [
        latency,
        (
            "A job that ends unfinished, at the time limit or for memory, is submitted again; "
            "training resumes.",
            {"retries": 3},
        ),
    ]


def _defaults(cluster: Cluster, choice: Choice) -> list[Entry]:
    one = choice.training
    entries: list[Entry] = [(_why(cluster, choice), {"slurm_partition": one.name})]
    if choice.account:
        why = "Your default account." if cluster.accounts[:1] == (choice.account,) else "As named."
        entries.append((why, {"slurm_account": choice.account}))
    why = (
        "Rules ask for the memory that the planner forecasts, because it is spoken of here; the "
        "value is of rules that state none."
    )
    entries.append((why, {"mem_mb": 2000}))
    return entries


def _why(cluster: Cluster, choice: Choice) -> str:
    one = choice.training
    what = "It has GPUs" if one.gpu_nodes else "No partition with GPUs is open to you"
    rest = "is not preempted" if preempt_mode(one, cluster) == "OFF" else "may be preempted"
    limit = "no time limit" if one.minutes is None else f"a limit of {one.minutes} minutes"
    return f"{what}, {limit}, and {rest}."


def _rules(choice: Choice) -> list[Entry]:
    one, other = choice.training, choice.other
    entries: list[Entry] = []
    for rule in (TRAINING, *GPU_RULES, *NO_GPU_RULES):
        place = other if rule in NO_GPU_RULES else one
        values: list[Entry] = []
        if place.name != one.name:
            values.append(("It uses no GPU.", {"slurm_partition": place.name}))
        if rule == TRAINING:
            values += _training(one)
        elif place.minutes is not None and place.minutes < LONGEST_STAGE:
            why = f"Its own minutes, more at each attempt, may pass the limit of {place.name}."
            values.append((why, {"runtime": place.minutes}))
        if rule not in NO_GPU_RULES and not one.gpu_nodes:
            values.append((f"{one.name} has no GPUs.", {"gres": "none"}))
        if values:
            entries.append(("", {rule: values}))
    return entries


def _training(one: Partition) -> list[Entry]:
    minutes = DAY if one.minutes is None else one.minutes
    limit = "has no limit, and a day is soon given" if one.minutes is None else "ends jobs then"
    return [
        (f"Minutes; {one.name} {limit}.", {"runtime": minutes}),
        (
            f"SIGTERM {WARNING} s before: training writes a checkpoint and ends unfinished; raise "
            "it where a checkpoint takes longer.",
            {"slurm_extra": f"--signal=TERM@{WARNING}"},
        ),
    ]


def _block(entry: Entry, indent: str) -> str:
    """An entry under its reason; values that are entries themselves stand below, indented."""
    why, values = entry
    lines = [_comment(why, indent)] if why else []
    for key, value in values.items():
        if isinstance(value, list):
            lines.append(f"{indent}{key}:")
            lines += [_block(below, indent + "  ") for below in value]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    """A value in YAML. Snakemake evaluates texts of resources as Python where it can: `all.q`."""
    if isinstance(value, str) and not value.startswith(("--", ". ")):
        plain = value.isidentifier() and value not in EVALUATED
        value = value if plain else repr(value)
    return yaml.safe_dump(value, width=WIDTH).removesuffix("\n...\n").strip()


def _comment(text: str, indent: str) -> str:
    return textwrap.fill(
        one_line(text), WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )
