"""Whether `zerotrain switch` would only end a phase, or what it depends on has changed since."""

from __future__ import annotations

import json
import os
from pathlib import Path

from zerotrain import artifact, graph
from zerotrain.config import Phase, RunConfig
from zerotrain.errors import PipelineError
from zerotrain.switch_point import RESULTS, imported_state, phase_folder
from zerotrain.training.progress_folder import FINGERPRINT

PUBLISHING = ("render_launch", "train_phase", "export_weights")
"""The rules that a cut needs, each once; that anything else would run means that it changed."""


def refuse_other_jobs(
    text: bytes, file: Path, config: RunConfig, phase: Phase, targets: list[str]
) -> dict[str, int]:
    """Refuse where Snakemake would do more than end the phase: what it depends on has changed.

    Returns:
        The jobs that end the phase, by rule.

    Raises:
        PipelineError: naming the jobs that would run beside them.
    """
    draft = file.with_name(f".{file.name}.switch-{os.getpid()}")
    try:
        draft.write_bytes(text)
        jobs = graph.plan(draft, targets)
    finally:
        draft.unlink(missing_ok=True)
    other = sorted(rule for rule, count in jobs.items() if rule not in PUBLISHING or count > 1)
    if other:
        inputs = [f"{folder}/manifest.json" for folder in _inputs(config, phase).values()]
        raise PipelineError(
            f"{file}: what {phase.name} depends on has changed since it was trained: "
            f"{', '.join(other)} would run first; {file} is as it was",
            hint=f"undo the change; or bring it up to date with `{graph.command(file, inputs)}` "
            "(first with -n, which shows the reasons) and call this again",
        )
    return jobs


def _inputs(config: RunConfig, phase: Phase) -> dict[str, Path]:
    """What a phase's training reads, apart from its launch."""
    cache = RESULTS / "data" / config.data_name / "cache" / str(config.cache_size(phase))
    before = config.phase_before(phase.name)
    start = phase_folder(config, before) / "state" if before else imported_state(config)
    inputs = {"base": RESULTS / config.run / "base", "cache": cache}
    return {**inputs, "state": start} if start else inputs


def refuse_other_making(config: RunConfig, phase: Phase) -> None:
    """Refuse where train_phase would set the progress aside and train afresh.

    Raises:
        PipelineError: naming what differs.
    """
    folder = phase_folder(config, phase)
    progress = folder / "progress"
    found = progress / FINGERPRINT
    former = json.loads(found.read_text()) if found.is_file() else {}
    if former.get("accepted"):
        return
    from zerotrain.launch.run_yaml import read_run_yaml
    from zerotrain.stages.train_phase import fingerprint

    parents = {
        "start" if kind == "state" else kind: artifact.read(read_from, kind, verify=False)
        for kind, read_from in _inputs(config, phase).items()
    }
    present = fingerprint(read_run_yaml(folder / "launch" / "run.yaml"), parents)
    differing = [
        key for key in sorted({*present, *former}) if present.get(key, ...) != former.get(key, ...)
    ]
    if differing:
        raise PipelineError(
            f"{progress}: was trained under other conditions than it has now (differs in: "
            f"{', '.join(differing)}), so training would start afresh",
            hint="undo the change; or go on from these checkpoints in spite of it with --accept",
        )
