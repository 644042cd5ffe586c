"""What `zerotrain switch` checks: that it would only end a phase, and, at last, that it has."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from zerotrain import artifact, graph
from zerotrain.artifact.leftovers import beside
from zerotrain.config import Phase, RunConfig, read_config
from zerotrain.config.edit import Split
from zerotrain.disk_errors import writing
from zerotrain.errors import PipelineError
from zerotrain.switch_point import RESULTS, imported_state, phase_folder, published_end
from zerotrain.training.progress_folder import FINGERPRINT

PUBLISHING = ("render_launch", "train_phase", "export_weights")
"""The rules that a cut needs, each once; that anything else would run means that it changed."""


def refuse_other_jobs(
    text: str, file: Path, config: RunConfig, phase: Phase, targets: list[str], folder: Path
) -> dict[str, int]:
    """Refuse where Snakemake would do more than end the phase: what it depends on has changed.

    Args:
        text: The configuration with the switch.
        file: Its file, for messages.
        config: The run.
        phase: The phase to end.
        targets: What ends it.
        folder: Where a copy of the text may lie meanwhile.

    Returns:
        The jobs that end the phase, by rule.

    Raises:
        PipelineError: naming the jobs that would run beside them.
    """
    draft = beside(folder / file.name, "new")
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(text.encode())
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


def holds_split(config: RunConfig, split: Split) -> bool:
    """Whether a configuration has a switch: the phase that ends, and directly after it the new."""
    for ended, following in pairwise(config.phases):
        if (ended.name, ended.until) == (split.phase, f"{split.step} steps"):
            new = (following.name, following.launch.preset)
            return new == (split.name, split.launch["preset"])
    return False


def check_switched(file: Path, split: Split) -> None:
    """Check what a switch promises: its configuration, and what was exported at its step.

    Raises:
        PipelineError: saying what is there instead.
    """
    config = read_config(file)
    folder = RESULTS / config.run / split.phase
    again = f"run the same command again; what {folder} holds is kept"
    if not holds_split(config, split):
        found = ", ".join(f"{one.name} until {one.until}" for one in config.phases)
        raise PipelineError(
            f"{file}: was edited during the switch and has lost it: its phases are {found}",
            hint=again,
        )
    end = published_end(folder / "checkpoint")
    if end != split.step:
        raise PipelineError(
            f"{folder}/checkpoint: ends at step {end}; the switch was to end it at {split.step}",
            hint=again,
        )
    # The best of the phase may be an earlier one than that of its end.
    trained = json.loads((folder / "checkpoint/checkpoint.json").read_text())["step"]
    state = artifact.read(folder / "state", "state", verify=False)
    weights = artifact.read(folder / "weights", "weights", verify=False)
    steps = {
        state.folder: json.loads(state.path("state.json").read_text())["step"],
        weights.folder: weights.content["step"],
    }
    for part, step in steps.items():
        if step != trained:
            raise PipelineError(
                f"{part}: is of step {step}; the checkpoint that was to be exported is of step "
                f"{trained}",
                hint=again,
            )
