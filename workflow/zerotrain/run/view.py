"""The one reader of a run: what its configuration plans, and how far each stage and phase is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerotrain.artifact.layout import RunFolder, files_of
from zerotrain.run.curves import Curves
from zerotrain.run.phase import FAILED, RUNNING, STOPPED, TRAINED, WAITING, PhaseView
from zerotrain.run.plan import PlanReader, RunPlan, stamp_of
from zerotrain.run.processes import find_processes
from zerotrain.run.stages import DONE, FINISHED, QUEUED, Stage, StageReader
from zerotrain.training.reporting.log_lines import read_lines

AFTER_TRAINING = ("evaluate", "report")
"""Rules without which a run counts as trained."""


class RunView:
    """A run as it is at the last `look`; each value is read when it is asked for."""

    def __init__(
        self, run: str, file: Path | None = None, *, folders: Sequence[Path] | None = None
    ) -> None:
        """Set up a reader.

        Args:
            run: The run's name.
            file: Its configuration; default: the first of config/ that has the run.
            folders: The folders of its phases, in order; default: those of its plan.
        """
        self.run, self.folder = run, RunFolder(run)
        self._folders = folders
        if file is None and folders is None:
            file = next(iter(files_of(run)), None)
        self._plans = PlanReader(run, file)
        self._stages = StageReader()
        self._phases: dict[Path, PhaseView] = {}
        self._curves: tuple[object, Curves] = None, Curves([])
        self.look()

    def look(self) -> None:
        """Begin a new moment: what has changed since the last one is read again."""
        self._plan: RunPlan | None = None
        self._listed: list[PhaseView] | None = None
        for phase in self._phases.values():
            phase.moment += 1

    @property
    def plan(self) -> RunPlan:
        """Return what the run consists of."""
        self._plan = self._plan or self._plans.read()
        return self._plan

    @property
    def phases(self) -> list[PhaseView]:
        """List its phases, in order, also those that have not started."""
        if self._listed is None:
            planned = {}
            if self._folders is None:
                planned = {self.folder.phase(one.name).path: one for one in self.plan.phases}
            folders = list(planned) if self._folders is None else self._folders
            self._listed = [self._phases.setdefault(path, PhaseView(path)) for path in folders]
            for phase in self._listed:
                phase.planned = planned.get(phase.folder)
        return self._listed

    @property
    def started(self) -> list[PhaseView]:
        """List the phases of which something was trained."""
        return [phase for phase in self.phases if phase.has_started]

    @property
    def later(self) -> list[str]:
        """Return the names of the phases that have not started."""
        return [phase.name for phase in self.phases if not phase.has_started]

    @property
    def unmeasured(self) -> list[str]:
        """Return the names of phases that have started and are not evaluated."""
        return [phase.name for phase in self.started if phase.evaluation is None]

    @property
    def curves(self) -> Curves:
        """Return what the run logged, up to its newest phase that has a log.

        Raises:
            PipelineError: a line of the log is not an object with a phase and a step.
        """
        logs = [log for phase in self.phases if (log := phase.log)]
        engines = {phase.name: values for phase in self.phases if (values := phase.engine)}
        stamp = [stamp_of(log) for log in logs[-1:]], engines
        if self._curves[0] != stamp:
            lines = list(read_lines(logs[-1])) if logs else []
            self._curves = stamp, Curves(lines, engines)
        return self._curves[1]

    @property
    def current(self) -> PhaseView | None:
        """Return the phase that trains; else the last one of which something is logged."""
        logged = [phase for phase in self.phases if phase.log]
        trains = next((phase for phase in logged if phase.trainer), None)
        return trains or (logged[-1] if logged else None)

    @property
    def stages(self) -> list[Stage]:
        """List its stages in the order of the graph, with their states."""
        return self._stages.read(self.plan, self.phases)

    def state_of(self, stages: Sequence[Stage]) -> str:
        """Return the state of the run whose stages have these states.

        running, queued, failed, trained (its evaluations or its report are missing), stopped,
        waiting (nothing was made yet: a recipe and no run) or finished.
        """
        states = {one.state for one in stages}
        for state in (RUNNING, QUEUED):
            if state in states:
                return state
        if states == {DONE}:
            return FINISHED
        if find_processes().start_for(self.run) is not None:
            return RUNNING  # Snakemake is between two stages, or plans
        if FAILED in states:
            return FAILED
        of_phases = [one for one in stages if one.phase and one.rule not in AFTER_TRAINING]
        if of_phases and all(one.state == DONE for one in of_phases):
            return TRAINED
        return STOPPED if states - {WAITING} else WAITING

    @property
    def state(self) -> str:
        """Return the run's state."""
        return self.state_of(self.stages)
