"""dvc.yaml, generated from the Snakemake graph: one DVC stage per job, named after its rule."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from zerotrain.artifact import write_whole
from zerotrain.artifact.documents import check_object
from zerotrain.artifact.layout import RunFolder
from zerotrain.artifact.source_commit import PACKAGE
from zerotrain.config.read import load_config, read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import SETTINGS
from zerotrain.data.dataset_folder import SAMPLES
from zerotrain.errors import PipelineError
from zerotrain.models.composed_base import local_folders
from zerotrain.pipeline.dvc.files import PIPELINE, read_document
from zerotrain.pipeline.dvc.jobs import in_order, stage_command, stage_name, workflow_of
from zerotrain.pipeline.graph.versions import stage_of
from zerotrain.pipeline.job_files import inputs_of

HEADER = """\
# Generated from the Snakemake graph by `zerotrain dvc generate`; edit the rules, not this file.
"""
TEMPLATE = "${"
"""What DVC reads as the beginning of a value to insert, in every text of dvc.yaml."""
VERSIONS = "workflow/zerotrain/artifact/stage_versions.py"
"""What DVC reads the versions of stages from."""
GUARD = "dvc_yaml"
"""The stage that fails if dvc.yaml is not current. It depends on all values of the configuration:
other stages depend on single values, and DVC does not notice when a missing value is added."""


def _file_keys(path: str) -> tuple[str, ...]:
    """Return the keys of the file behind a place in the run."""
    key = path.removeprefix("phases.0.train.")
    return (path,) if key == path else (f"train.{key}", f"phases.0.{key}")


READ_BY_SOME = ("max_sequence_length",)
"""Parameters of a rule that some of its jobs do not read: there they have no value."""
CONFIG_KEYS = {
    name: _file_keys(path)
    for settings in SETTINGS.values()
    for name, path in settings.paths(recorded=True).items()
} | {
    "data": ("data.*",),
    "phases": ("train", "launch", "phases.*"),
    "folder": ("resume_from_checkpoint",),
    "validation_prompts": tuple(
        f"{where}validation.{key}"
        for where in ("", "phases.*.")
        for key in ("prompts", "conditioning_images")
    ),
}
"""Keys of the configuration behind a rule's parameter, if they differ from its name; a star matches
every key, and in a list of phases those up to the job's own."""
WITHOUT_EFFECT = ("cache.shards", "data.name", "data.num_workers")
"""Keys that the stages do not depend on."""
PERSIST = ("cache", "cache_shards", "progress")
"""Folders that DVC keeps when their stage runs: each stage continues from its contents."""


def generate(config: Path, output: Path) -> None:
    """Write dvc.yaml for a run.

    Args:
        config: The run's configuration.
        output: File to write; the old text stays until the new text is complete.

    Raises:
        DiskError: the disk is full or read-only, or fails.
    """
    made = pipeline(config)
    if output.is_file():
        made["stages"] |= _others(load_pipeline(output))
    text = yaml.safe_dump(made, sort_keys=False, width=100, allow_unicode=True)
    write_whole(output, HEADER + text)


def load_pipeline(path: Path = PIPELINE) -> dict[str, Any]:
    """Read dvc.yaml.

    Raises:
        PipelineError: it is not valid YAML, or its stages have no names.
    """
    hint = f"remove {path}, and `zerotrain dvc generate` writes it"
    found = check_object(read_document(path, hint) or {}, path, hint=hint)
    check_object(found.get("stages") or {}, f"{path}: stages", hint=hint)
    return found


def is_ours(stage: Any) -> bool:
    """Return whether a stage was generated; users may add stages."""
    command = stage.get("cmd") if isinstance(stage, Mapping) else None
    return isinstance(command, str) and (
        command.startswith("snakemake --cores all") or " zerotrain dvc check " in command
    )


def _others(loaded: Mapping[str, Any]) -> dict[str, Any]:
    stages = loaded.get("stages") or {}
    return {name: stage for name, stage in stages.items() if not is_ours(stage)}


def pipeline(config: Path) -> dict[str, Any]:
    """Build the content of dvc.yaml: stages in execution order, plots, and artifacts.

    Raises:
        PipelineError: the running package belongs to another checkout, or a name holds `${`.
    """
    if not PACKAGE.is_relative_to(Path.cwd()):
        raise PipelineError(
            f"{PACKAGE}: this zerotrain does not belong to the project here",
            hint="`make setup` in this folder, or put its own first: `export PYTHONPATH=workflow`",
        )
    run = read_config(config)
    with workflow_of(config, forceall=True) as workflow:
        stages = _stages(workflow.dag.jobs, config, run)
    made = {"stages": stages, "plots": plots_of(run), "artifacts": artifacts_of(run)}
    for text in _texts(made):
        if TEMPLATE in text:
            raise PipelineError(
                f"{text!r}: holds {TEMPLATE}, which DVC would replace by a value of params.yaml",
                hint="rename the file or folder, and correct the configuration",
            )
    return made


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of dvc.yaml, keys included."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def check(config: Path) -> None:
    """Check that dvc.yaml matches the current configuration, rules and code.

    Raises:
        PipelineError: it does not match; the hint tells how to fix it.
    """
    loaded, made = load_pipeline(), pipeline(config)
    if loaded != {**made, "stages": made["stages"] | _others(loaded)}:
        raise outdated(config)


def outdated(config: Path) -> PipelineError:
    """Return the error for an outdated dvc.yaml."""
    return PipelineError(
        f"{PIPELINE}: it is not of {config}, the rules and the code as they are now",
        hint=f"`zerotrain dvc generate {shlex.quote(str(config))}`, and call DVC again",
    )


def is_current(loaded: Mapping[str, Any], jobs: Iterable[Any], config: Path) -> bool:
    """Return whether dvc.yaml equals what would be generated now for these jobs and the phases.

    Args:
        loaded: The content of dvc.yaml.
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
    """List the stages of dvc.yaml that equal what would be generated now; arguments as above."""
    known = loaded.get("stages") or {}
    stages = _stages(jobs, config, read_config(config))
    return {name for name, stage in stages.items() if known.get(name) == stage}


def _stages(jobs: Iterable[Any], config: Path, run: RunConfig) -> dict[str, Any]:
    given = load_config(config)
    guard = {
        "desc": "Fails where this file is not of the configuration and the rules as they are.",
        # With the code here: DVC's queue works in copies of the project.
        "cmd": f"PYTHONPATH=workflow python -m zerotrain dvc check "
        f"--config {shlex.quote(str(config))}",
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
    params = [{str(config): keys}] if (keys := _params(job, run, given)) else []
    if versioned := stage_of(job):
        params.append({VERSIONS: [f"VERSIONS.{versioned}"]})
    if params:
        stage["params"] = params
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
    """List the keys that the file sets and the job depends on."""
    names = [one.name for one in run.phases]
    last = names.index(job.wildcards.phase) if "phase" in job.wildcards.keys() else len(names)  # noqa: SIM118
    read = [n for n, value in job.params.items() if value is not None or n not in READ_BY_SOME]
    wanted = {key for name in read for key in CONFIG_KEYS.get(name, (name,))}
    found = {key for pattern in wanted for key in _keys(given, pattern.split("."), last)}
    return sorted(found - set(WITHOUT_EFFECT))


def _keys(value: Any, parts: Sequence[str], last: int) -> list[str]:
    """List the keys that a pattern matches; of lists only up to this index."""
    if not parts or not isinstance(value, dict | list):
        return [""]
    inner = {str(i): one for i, one in enumerate(value)} if isinstance(value, list) else value
    chosen = list(inner)[: last + 1 if isinstance(value, list) else None]
    chosen = [key for key in chosen if parts[0] in ("*", key)]
    return [
        f"{key}.{rest}".rstrip(".") for key in chosen for rest in _keys(inner[key], parts[1:], last)
    ]


def dependencies(job: Any, run: RunConfig) -> list[str]:
    """List the inputs of a job; a user's folder as a whole, so that DVC notices a new file."""
    paths = {os.path.relpath(path) for path in inputs_of(job)}
    parts = run.data.parts
    folders = (folder for part in parts for folder in (part.images, *part.other_folders))
    named = (*folders, run.data.path)
    data = [Path(name).expanduser() for name in named if name]
    for folder in (*data, *local_folders(run.base)):
        root = os.path.relpath(folder)
        inside = {path for path in paths if path.startswith(f"{root}/")}
        if inside:
            paths = paths - inside | {root}
    return sorted(paths)


def _outs(manifest: str) -> list[str]:
    """List what DVC stores for a manifest: its folder. For a dataset it is the manifest and the
    folder of its samples, as its caches are next to them; for a checkpoint also the progress
    folder, from which training resumes."""
    folder = Path(manifest).parent
    if folder.parent.name == "data":
        return [manifest, str((folder / SAMPLES).parent)]
    progress = [str(folder.with_name("progress"))] if folder.name == "checkpoint" else []
    return [str(folder), *progress]


def plots_of(run: RunConfig) -> list[dict[str, Any]]:
    """Return the curves over all steps, from the last phase's evaluation, and of each phase the
    metrics and the grid."""
    folders = [RunFolder(run.run).phase(phase.name).evaluation for phase in run.phases]
    curves: dict[str, tuple[str, str | list[str], str]] = {
        "Training loss": ("loss.csv", "loss", "loss"),
        **_validation(run),
        "Learning rate": ("loss.csv", "learning_rate", "learning rate"),
        "Host memory": ("records/memory.csv", "host_bytes", "bytes"),
        "Device memory": ("records/memory.csv", "device_bytes", "bytes"),
    }
    plots: list[dict[str, Any]] = [
        {title: {"x": "step", "y": {f"{folders[-1]}/{file}": column}, "y_label": label}}
        for title, (file, column, label) in curves.items()
    ]
    plots += [
        {
            f"{title} of each phase": {
                "template": "scatter",
                "x": "step",
                "y": {f"{folder}/metrics.csv": metric for folder in folders},
                "y_label": title.lower(),
            }
        }
        for metric, title in _plotted_metrics(run).items()
    ]
    if not run.is_text:
        plots += [{str(folder / "grid.png"): None} for folder in folders]
    return plots


def _validation(run: RunConfig) -> dict[str, tuple[str, str | list[str], str]]:
    """Return the curve of the validations by its title; empty for a run without any."""
    validated = [phase for phase in run.phases if phase.validation]
    if not validated:
        return {}
    averaged = any(phase.train.use_ema for phase in validated)
    columns = ["val_loss", "val_loss_ema"] if averaged else "val_loss"
    return {"Validation loss": ("validation.csv", columns, "loss")}


def _plotted_metrics(run: RunConfig) -> dict[str, str]:
    """Return the metrics that every evaluation of a run has, with their titles."""
    metrics = {"train_loss": "Training loss"}
    if run.data.holdout:
        metrics["val_loss"] = "Held-out loss"
    if run.evaluate.judge != "none" and not run.is_text:
        metrics["prompt_accuracy"] = "Prompt accuracy"
    if run.is_text and run.data.holdout:
        metrics["exact_match"] = "Exact match"
    return metrics


def artifacts_of(run: RunConfig) -> dict[str, Any]:
    """Return the run's weights, by phase, for DVC's model registry."""
    return {
        f"{run.run}-{phase.name}": {
            "path": str(RunFolder(run.run).phase(phase.name).weights),
            "type": "model",
            "desc": f"{run.family} weights of run {run.run} after phase {phase.name}.",
            "labels": [run.family, "lora" if run.lora else "full"],
        }
        for phase in run.phases
    }
