"""dvc.yaml, generated from the Snakemake graph: one DVC stage per job, named like its rule."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML

from zerotrain.composed_base import local_folders
from zerotrain.config import RunConfig, read_config
from zerotrain.dvc.jobs import in_order, stage_command, stage_name, workflow_of

PIPELINE = Path("dvc.yaml")
LOCK = Path("dvc.lock")
HEADER = """\
# Generated from the Snakemake graph by `zerotrain dvc generate`; edit the rules, not this file.
"""
CONFIG_KEYS = {
    "num_cpu_threads_per_process": ("launch",),
    "resolution": ("train", "phases"),
    "phases": ("train", "launch", "phases"),
    "batch": ("train", "phases"),
    "folder": ("resume_from_checkpoint",),
    "packing": ("train",),
    "virtual_tokens": ("peft",),
    "validation_prompts": ("validation",),
}
"""Keys of the configuration behind a rule's parameter, where it is not the key of the same name."""
PERSIST = ("cache", "progress")
"""Folders that DVC leaves where they lie when their stage runs: each goes on from what it holds."""


def generate(config: Path, output: Path) -> None:
    """Write dvc.yaml for a run.

    Args:
        config: The run's configuration.
        output: File to write.
    """
    text = yaml.safe_dump(pipeline(config), sort_keys=False, width=100, allow_unicode=True)
    output.write_text(HEADER + text)


def pipeline(config: Path) -> dict[str, Any]:
    """All of dvc.yaml: stages in the order in which they can run, plots, and artifacts."""
    run = read_config(config)
    with workflow_of(config, forceall=True) as workflow:
        stages = _stages(workflow.dag.jobs, config, run)
    return {"stages": stages, "plots": _plots(run), "artifacts": _artifacts(run)}


def is_current(loaded: Mapping[str, Any], jobs: Iterable[Any], config: Path) -> bool:
    """Whether dvc.yaml says of these jobs, and of the phases, what would be written now.

    Args:
        loaded: What dvc.yaml holds.
        jobs: Some jobs of the graph.
        config: The run's configuration.
    """
    run = read_config(config)
    known = loaded.get("stages") or {}
    stages = _stages(jobs, config, run)
    return (
        all(known.get(name) == stage for name, stage in stages.items())
        and loaded.get("plots") == _plots(run)
        and loaded.get("artifacts") == _artifacts(run)
    )


def _stages(jobs: Iterable[Any], config: Path, run: RunConfig) -> dict[str, Any]:
    given = YAML(typ="safe").load(config.read_text())
    return {stage_name(job): _stage(job, config, run, given) for job in in_order(jobs)}


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
    """The keys that the file gives and the job depends on; of the phases those up to its own, and
    where it has none the first."""
    named = {key for name in job.params.keys() for key in CONFIG_KEYS.get(name, (name,))}  # noqa: SIM118
    keys = sorted(named & set(given))
    if "phases" in keys:
        phase = getattr(job.wildcards, "phase", run.phases[0].name)
        count = [one.name for one in run.phases].index(phase) + 1
        keys.remove("phases")
        keys += [f"phases.{number}" for number in range(count)]
    if "validation_prompts" in job.params.keys():  # noqa: SIM118
        phases = enumerate(given["phases"])
        keys += [f"phases.{number}.validation" for number, one in phases if "validation" in one]
    return keys


def dependencies(job: Any, run: RunConfig) -> list[str]:
    """The inputs of a job. A user's folder stands for its files, so that DVC sees a new one."""
    paths = {os.path.relpath(path) for path in job.input}
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


def _plots(run: RunConfig) -> list[dict[str, Any]]:
    """Curves over the steps of the whole run, which the last phase's evaluation holds, and what
    each phase made."""
    last = f"results/{run.run}/{run.phases[-1].name}/evaluation"
    curves = {
        "Training loss": ("loss.csv", "loss", "loss"),
        "Learning rate": ("loss.csv", "learning_rate", "learning rate"),
        "Host memory": ("records/memory.csv", "host_bytes", "bytes"),
        "Device memory": ("records/memory.csv", "device_bytes", "bytes"),
    }
    plots: list[dict[str, Any]] = [
        {title: {"x": "step", "y": {f"{last}/{file}": column}, "y_label": label}}
        for title, (file, column, label) in curves.items()
    ]
    if not run.is_text:
        plots += [
            {f"results/{run.run}/{phase.name}/evaluation/grid.png": None} for phase in run.phases
        ]
    return plots


def _artifacts(run: RunConfig) -> dict[str, Any]:
    """The run's weights, by phase, for DVC's model registry."""
    return {
        f"{run.run}-{phase.name}": {
            "path": f"results/{run.run}/{phase.name}/weights",
            "type": "model",
            "desc": f"{run.family} weights of run {run.run} after phase {phase.name}.",
            "labels": [run.family, "lora" if run.lora else "full"],
        }
        for phase in run.phases
    }
