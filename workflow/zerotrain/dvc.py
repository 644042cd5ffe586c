"""dvc.yaml, generated from the Snakemake graph: one DVC stage per job, named like its rule.

Snakemake owns the graph; DVC stores what it makes and runs it stage by stage. `--allowed-rules`
keeps a stage from running what other stages stand for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from zerotrain.composed_base import local_folders
from zerotrain.config import RunConfig, read_config

HEADER = """\
# Generated from the Snakemake graph by `zerotrain dvc generate`; edit the rules, not this file.
"""

CONFIG_KEYS = {
    "num_cpu_threads_per_process": ("launch",),
    "resolution": ("train", "phases"),
    "phases": ("train", "launch", "phases"),
}
"""Keys of the configuration behind a rule's parameter, where it is not the key of the same name."""


def generate(config: Path, output: Path) -> None:
    """Write dvc.yaml for a run.

    Args:
        config: The run's configuration.
        output: File to write.
    """
    text = HEADER + yaml.safe_dump({"stages": stages(config)}, sort_keys=False, width=100)
    output.write_text(text)


def stages(config: Path) -> dict[str, Any]:
    """The stages of a run by name, in the order in which they can run."""
    run = read_config(config)
    given = [key for key in _keys_in(config) if key in RunConfig.model_fields]
    jobs = [job for job in _jobs(config) if job.output]
    return {_name(job): _stage(job, config, run, given) for job in jobs}


def _jobs(config: Path) -> list[Any]:
    """All jobs of the graph of `snakemake train`, sorted by what they need.

    Snakemake's interface shows the graph only as text; the job objects lie behind its private
    `_workflow`, so Snakemake is pinned and a test holds this function to its result.
    """
    from snakemake.api import (
        ConfigSettings,
        DAGSettings,
        OutputSettings,
        ResourceSettings,
        SnakemakeApi,
    )
    from snakemake.settings.enums import Quietness

    with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
        interface = api.workflow(
            resource_settings=ResourceSettings(cores=1),
            config_settings=ConfigSettings(configfiles=[config]),
            snakefile=Path("Snakefile"),
        )
        interface.dag(DAGSettings(targets={"train"}, forceall=True))
        workflow: Any = interface._workflow
        workflow._prepare_dag(
            forceall=True, ignore_incomplete=True, lock_warn_only=True, nolock=True
        )
        workflow._build_dag()
        waiting = sorted(workflow.dag.jobs, key=lambda job: (job.rule.name, str(job.wildcards)))
        ordered: list[Any] = []
        while waiting:
            ready = [
                job
                for job in waiting
                if not set(map(str, job.input)) & {str(o) for w in waiting for o in w.output}
            ]
            ordered += ready
            waiting = [job for job in waiting if job not in ready]
        return ordered


def _keys_in(config: Path) -> list[str]:
    from ruamel.yaml import YAML

    return list(YAML(typ="safe").load(config.read_text()))


def _name(job: Any) -> str:
    return "-".join([job.rule.name, *map(str, job.wildcards)])


def _stage(job: Any, config: Path, run: RunConfig, given: list[str]) -> dict[str, Any]:
    command = "snakemake --cores all"
    if config != Path("config/config.yaml"):
        command += f" --configfile {config}"
    outputs = [str(path) for path in job.output]
    stage: dict[str, Any] = {
        "desc": (job.rule.docstring or "").split("\n")[0].format(wildcards=job.wildcards),
        "cmd": f"{command} --allowed-rules {job.rule.name} -- {' '.join(outputs)}",
        "deps": dependencies(job, run),
    }
    keys = {key for name in job.params.keys() for key in CONFIG_KEYS.get(name, (name,))}  # noqa: SIM118
    if params := sorted(keys & set(given)):
        stage["params"] = [{str(config): params}]
    # DVC removes outputs before a stage runs; the cache is built from what it holds already.
    outs = [_out(path) for path in outputs if not path.endswith("metrics.json")]
    stage["outs"] = [{out: {"persist": True}} if "/cache/" in out else out for out in outs]
    metrics = [path for path in outputs if path.endswith("metrics.json")]
    if metrics:
        stage["metrics"] = metrics
    return stage


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


def _out(manifest: str) -> str:
    """What DVC stores: the folder of a manifest; a dataset's manifest stands beside its caches."""
    folder, grandparent = Path(manifest).parent, Path(manifest).parent.parent
    return manifest if grandparent.name == "data" else str(folder)
