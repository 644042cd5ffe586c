"""dvc.yaml, generated from the Snakemake graph: one DVC stage per job, named like its rule."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML

from zerotrain.artifact import write_whole
from zerotrain.composed_base import local_folders
from zerotrain.config import RunConfig, read_config
from zerotrain.dvc.jobs import in_order, stage_command, stage_name, workflow_of
from zerotrain.dvc.plots import artifacts_of, plots_of
from zerotrain.errors import PipelineError
from zerotrain.source_listing import listed
from zerotrain.sources import PACKAGE

PIPELINE = Path("dvc.yaml")
LOCK = Path("dvc.lock")
HEADER = """\
# Generated from the Snakemake graph by `zerotrain dvc generate`; edit the rules, not this file.
"""
GUARD = "dvc_yaml"
"""The stage that fails where this file is not current. It depends on all values of the file: others
depend on single ones, and DVC cannot wait for one that is not given yet."""
CONFIG_KEYS = {
    "data": ("data.*",),
    "num_cpu_threads_per_process": ("launch.num_cpu_threads_per_process",),
    "resolution": ("train.resolution", "phases.0.resolution"),
    "packing": ("train.packing", "phases.0.packing"),
    "batch": ("train.global_batch_size", "phases.0.global_batch_size"),
    "phases": ("train", "launch", "phases.*"),
    "folder": ("resume_from_checkpoint",),
    "param_groups": ("train.param_groups", "phases.0.param_groups"),
    "no_decay_norm_bias": ("train.no_decay_norm_bias", "phases.0.no_decay_norm_bias"),
    "allow": ("phases.0.allow",),
    "virtual_tokens": ("peft.num_virtual_tokens",),
    "validation_prompts": ("validation.prompts", "phases.*.validation.prompts"),
}
"""Keys of the configuration behind a rule's parameter, where it is not the key of the same name; a
star is each one, and of phases those up to the job's own."""
WITHOUT_EFFECT = ("data.name", "data.num_workers")
"""Keys that the rules leave out."""
PERSIST = ("cache", "progress")
"""Folders that DVC leaves where they lie when their stage runs: each goes on from what it holds."""


def generate(config: Path, output: Path) -> None:
    """Write dvc.yaml for a run.

    Args:
        config: The run's configuration.
        output: File to write; what it holds stays until the new text is whole.

    Raises:
        DiskError: the disk is full, read-only, or fails.
    """
    made = pipeline(config)
    if output.is_file():
        made["stages"] |= _others(load_pipeline(output))
    text = yaml.safe_dump(made, sort_keys=False, width=100, allow_unicode=True)
    write_whole(output, HEADER + text)


def load_pipeline(path: Path = PIPELINE) -> dict[str, Any]:
    """What dvc.yaml holds.

    Raises:
        PipelineError: it is no YAML.
    """
    try:
        return yaml.load(path.read_text(), Loader=yaml.CSafeLoader) or {}
    except yaml.YAMLError as error:
        raise PipelineError(
            f"{path}: {' '.join(str(error).split())}",
            hint=f"remove {path}, and `zerotrain dvc generate` writes it",
        ) from error


def is_ours(stage: Any) -> bool:
    """Whether a stage was generated; users may add their own."""
    command = str(stage.get("cmd", "")) if isinstance(stage, Mapping) else ""
    return command.startswith("snakemake --cores all") or " zerotrain dvc check " in command


def _others(loaded: Mapping[str, Any]) -> dict[str, Any]:
    stages = loaded.get("stages") or {}
    return {name: stage for name, stage in stages.items() if not is_ours(stage)}


def pipeline(config: Path) -> dict[str, Any]:
    """All of dvc.yaml: stages in the order in which they can run, plots, and artifacts.

    Raises:
        PipelineError: the package that runs is of another checkout.
    """
    if not PACKAGE.is_relative_to(Path.cwd()):
        raise PipelineError(
            f"{PACKAGE}: this zerotrain is not of the project that lies here",
            hint="`make setup` in this folder, or put its own first: `export PYTHONPATH=workflow`",
        )
    run = read_config(config)
    with workflow_of(config, forceall=True) as workflow:
        stages = _stages(workflow.dag.jobs, config, run)
    return {"stages": stages, "plots": plots_of(run), "artifacts": artifacts_of(run)}


def check(config: Path) -> None:
    """Refuse a dvc.yaml that is not of the configuration, the rules and the code as they are.

    Raises:
        PipelineError: it is not; how to mend it.
    """
    loaded, made = load_pipeline(), pipeline(config)
    if loaded != {**made, "stages": made["stages"] | _others(loaded)}:
        raise outdated(config)


def outdated(config: Path) -> PipelineError:
    """What to say of a dvc.yaml that is not current."""
    return PipelineError(
        f"{PIPELINE}: it is not of {config}, the rules and the code as they are now",
        hint=f"`zerotrain dvc generate --config {config}`, and call DVC again",
    )


def is_current(loaded: Mapping[str, Any], jobs: Iterable[Any], config: Path) -> bool:
    """Whether dvc.yaml says of these jobs, and of the phases, what would be written now.

    Args:
        loaded: What dvc.yaml holds.
        jobs: Some jobs of the graph.
        config: The run's configuration.
    """
    jobs, run = list(jobs), read_config(config)
    wanted = {GUARD, *(stage_name(job) for job in in_order(jobs))}
    return (
        wanted == current_stages(loaded, jobs, config)
        and loaded.get("plots") == plots_of(run)
        and loaded.get("artifacts") == artifacts_of(run)
    )


def current_stages(loaded: Mapping[str, Any], jobs: Iterable[Any], config: Path) -> set[str]:
    """Names of the stages of which dvc.yaml says what would be written now; arguments as above."""
    known = loaded.get("stages") or {}
    stages = _stages(jobs, config, read_config(config))
    return {name for name, stage in stages.items() if known.get(name) == stage}


def _stages(jobs: Iterable[Any], config: Path, run: RunConfig) -> dict[str, Any]:
    given = YAML(typ="safe").load(config.read_text())
    guard = {
        "desc": "Fails where this file is not of the configuration and the rules as they are.",
        # Of the code that lies here: DVC's queue works in copies of the project.
        "cmd": f"PYTHONPATH=workflow python -m zerotrain dvc check --config {config}",
        "deps": ["Snakefile", "rules"],
        "params": [{str(config): None}],
    }
    of_jobs = {stage_name(job): _stage(job, config, run, given) for job in in_order(jobs)}
    return {GUARD: guard} | of_jobs


def _stage(job: Any, config: Path, run: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    outputs = [str(path) for path in job.output]
    stage: dict[str, Any] = {
        "desc": (job.rule.docstring or "").split("\n")[0].format(wildcards=job.wildcards),
        "cmd": stage_command(job, config),
        "deps": dependencies(job, run),
    }
    if params := _params(job, run, given):
        stage["params"] = [{str(config): params}]
    stage["outs"] = [
        {out: {"persist": True}} if set(PERSIST) & set(Path(out).parts) else out
        for path in outputs
        if not path.endswith("metrics.json")
        for out in _outs(path)
    ]
    if metrics := [path for path in outputs if path.endswith("metrics.json")]:
        stage["metrics"] = metrics
    return stage


def _params(job: Any, run: RunConfig, given: Mapping[str, Any]) -> list[str]:
    """The keys that the file gives and the job depends on."""
    names = [one.name for one in run.phases]
    last = names.index(job.wildcards.phase) if "phase" in job.wildcards.keys() else len(names)  # noqa: SIM118
    wanted = {key for name in job.params.keys() for key in CONFIG_KEYS.get(name, (name,))}  # noqa: SIM118
    found = {key for pattern in wanted for key in _keys(given, pattern.split("."), last)}
    return sorted(found - set(WITHOUT_EFFECT))


def _keys(value: Any, parts: Sequence[str], last: int) -> list[str]:
    """Names of the values that a pattern stands for; of lists up to this index."""
    if not parts or not isinstance(value, dict | list):
        return [""]
    inner = {str(i): one for i, one in enumerate(value)} if isinstance(value, list) else value
    chosen = list(inner)[: last + 1 if isinstance(value, list) else None]
    chosen = [key for key in chosen if parts[0] in ("*", key)]
    return [
        f"{key}.{rest}".rstrip(".") for key in chosen for rest in _keys(inner[key], parts[1:], last)
    ]


def dependencies(job: Any, run: RunConfig) -> list[str]:
    """The inputs of a job. A user's folder stands for its files, so that DVC sees a new one."""
    paths = {os.path.relpath(path) for path in listed(map(str, job.input))}
    data = [Path(name).expanduser() for name in (run.data.images, run.data.path) if name]
    for folder in (*data, *local_folders(run.base)):
        root = os.path.relpath(folder)
        inside = {path for path in paths if path.startswith(f"{root}/")}
        if inside:
            paths = paths - inside | {root}
    return sorted(paths)


def _outs(manifest: str) -> list[str]:
    """What DVC stores for a manifest: its folder; a dataset's manifest stands beside its caches,
    and beside a checkpoint lies the progress that its training would go on from."""
    folder = Path(manifest).parent
    if folder.parent.name == "data":
        return [manifest]
    beside = [str(folder.with_name("progress"))] if folder.name == "checkpoint" else []
    return [str(folder), *beside]
