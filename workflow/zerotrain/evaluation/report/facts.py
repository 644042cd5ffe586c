"""The facts on a run that the page shows, read from the folders of its phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.layout import PhaseFolder
from zerotrain.errors import PipelineError
from zerotrain.evaluation.history import RunHistory, read_history
from zerotrain.evaluation.results import read_metrics
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.state.position import read_position
from zerotrain.state.ran_on import RanOn

POSITION = "checkpoint.json"
METRICS = "metrics.json"


@dataclass(frozen=True)
class PhaseFacts:
    """A phase, as far as it has come."""

    folder: Path
    metrics: Mapping[str, Any]
    """Empty before its evaluation."""
    evaluation: Artifact | None
    launch: ResolvedPhase | None
    """None if it was launched by hand."""
    ran_on: RanOn | None
    """What its last steps ran on; None without a checkpoint that has a position."""
    weights: Artifact | None

    @property
    def name(self) -> str:
        """Return the phase's name."""
        return self.folder.name

    @property
    def averaged(self) -> bool:
        """Return whether its weights are the averaged ones (EMA)."""
        return self.weights is not None and bool(self.weights.content.get("ema"))


@dataclass(frozen=True)
class RunFacts:
    """A run with its phases."""

    run: str
    phases: Sequence[PhaseFacts]
    """Phases that have started, in order."""
    later: Sequence[str]
    """Names of those that have not."""
    history: RunHistory

    @property
    def unmeasured(self) -> list[str]:
        """Return the names of phases that have started and are not evaluated."""
        return [phase.name for phase in self.phases if phase.evaluation is None]


def read_run(run: str, folders: Sequence[Path]) -> RunFacts:
    """Read a run as far as it has come.

    Args:
        run: Its name.
        folders: The folders of its phases, in order.

    Raises:
        PipelineError: a file of a phase is damaged.
    """
    there = [folder for folder in folders if _has_started(folder)]
    later = [folder.name for folder in folders if folder not in there]
    return RunFacts(run, [read_phase(folder) for folder in there], later, read_history(there))


def read_phase(folder: Path) -> PhaseFacts:
    """Read a phase; files of an evaluation and of a launch are compared with their hashes.

    Raises:
        PipelineError: a file is damaged, or an evaluation has no metrics.
    """
    phase = PhaseFolder(folder)
    evaluation = _read(phase.evaluation, "evaluation", verify=True)
    if _read(phase.launch, "launch", verify=True) is None:
        launch = None
    else:
        launch = read_run_yaml(phase.launch / "run.yaml")
    return PhaseFacts(
        folder=folder,
        metrics=_metrics(folder) if evaluation else {},
        evaluation=evaluation,
        launch=launch,
        ran_on=_ran_on(phase.checkpoint),
        weights=_read(phase.weights, "weights"),
    )


def _has_started(folder: Path) -> bool:
    phase = PhaseFolder(folder)
    return phase.progress.is_dir() or any(
        map(artifact.is_published, (phase.checkpoint, phase.state, phase.weights, phase.evaluation))
    )


def _read(folder: Path, kind: str, *, verify: bool = False) -> Artifact | None:
    if not artifact.is_published(folder):
        return None
    return artifact.read(folder, kind) if verify else artifact.read(folder, kind, verify=False)


def _metrics(folder: Path) -> dict[str, Any]:
    path = folder / METRICS
    if not path.is_file():
        raise PipelineError(
            f"{path}: missing, so phase {folder.name} has not been evaluated",
            hint="run `snakemake --cores all report`, which evaluates every phase first",
        )
    return {**read_metrics(path)}


def _ran_on(checkpoint: Path) -> RanOn | None:
    found = _read(checkpoint, "checkpoint")
    if found is None or POSITION not in found.files:
        return None
    return RanOn.of(read_position(found, POSITION))
