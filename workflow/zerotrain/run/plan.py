"""What a run consists of: by its configuration, or by its folders if that is missing or broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zerotrain.artifact.layout import RESULTS, RunFolder
from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase


@dataclass(frozen=True)
class PlannedPhase:
    """A phase of a run."""

    name: str
    preset: str
    """Empty: unknown."""
    until: int | None
    """Step of its end; None: counted in epochs and not rendered yet."""
    cache_size: int | None


@dataclass(frozen=True)
class RunPlan:
    """The stages that a run has."""

    run: str
    file: Path | None
    """Its configuration; None: no file of config/ has this run."""
    data: str
    phases: tuple[PlannedPhase, ...]
    imports: bool
    """Whether it continues an external checkpoint."""
    problem: str = ""
    """Why the configuration could not be read."""

    @property
    def cache_sizes(self) -> list[int]:
        """List the sizes of its caches."""
        return sorted({one.cache_size for one in self.phases if one.cache_size is not None})


class PlanReader:
    """Reads a run's plan again only if its configuration or a launch file has changed."""

    def __init__(self, run: str, file: Path | None) -> None:
        self._run, self._file = run, file
        self._stamp: object = None
        self._plan = RunPlan(run, file, run, (), imports=False)

    def read(self) -> RunPlan:
        """Return the current plan."""
        launches = sorted(RunFolder(self._run).path.glob("*/launch/run.yaml"))
        stamp = [stamp_of(path) for path in (*([self._file] if self._file else []), *launches)]
        if stamp != self._stamp:
            self._stamp, self._plan = stamp, read_plan(self._run, self._file)
        return self._plan


def read_plan(run: str, file: Path | None) -> RunPlan:
    """Read the plan of a run.

    Args:
        run: The run's name.
        file: Its configuration, if any.
    """
    problem = ""
    if file is not None:
        try:
            config = read_config(file)
        except (PipelineError, OSError) as error:
            problem = getattr(error, "what", str(error)).splitlines()[0]
        else:
            if config.run == run:
                return _of_config(config, file)
            problem = f"{file}: its run is {config.run}"
    phases = tuple(_of_folders(run))
    return RunPlan(run, file, run, phases, imports=False, problem=problem)


def rendered_phase(run: str, phase: str) -> ResolvedPhase | None:
    """Read a phase's run.yaml; None if it is missing, or is not what this version writes."""
    path = RESULTS / run / phase / "launch" / "run.yaml"
    try:
        return read_run_yaml(path)
    except (OSError, PipelineError):
        return None


def _of_config(config: RunConfig, file: Path) -> RunPlan:
    phases = tuple(
        PlannedPhase(
            phase.name,
            phase.launch.preset,
            _steps(phase.until),
            config.cache_size(phase),
        )
        for phase in config.phases
    )
    plan = RunPlan(config.run, file, config.data_name, phases, bool(config.resume_from_checkpoint))
    return replace(plan, phases=tuple(_with_rendered(config.run, one) for one in plan.phases))


def _steps(until: str) -> int | None:
    """Return an `until` that is counted in steps; None for one in epochs."""
    amount, _, unit = until.partition(" ")
    return int(amount) if unit == "steps" else None


def _with_rendered(run: str, phase: PlannedPhase) -> PlannedPhase:
    """Complete what only the launch files say: an end in epochs, the preset of `launch: auto`."""
    if phase.until is not None and phase.preset != "auto":
        return phase
    rendered = rendered_phase(run, phase.name)
    if rendered is None:
        return phase
    until = phase.until if phase.until is not None else rendered.derived.until_step
    return replace(phase, until=until, preset=rendered.launch.preset)


def _of_folders(run: str) -> Iterator[PlannedPhase]:
    found = []
    for path in RunFolder(run).path.glob("*/launch"):
        rendered = rendered_phase(run, path.parent.name)
        if rendered is None:
            found.append((0, PlannedPhase(path.parent.name, "", None, None)))
            continue
        until = rendered.derived.until_step
        size = rendered.train.max_length or rendered.train.resolution
        found.append((until, PlannedPhase(path.parent.name, rendered.launch.preset, until, size)))
    yield from (phase for _, phase in sorted(found, key=lambda one: (one[0], one[1].name)))


def stamp_of(path: Path) -> tuple[str, int, int]:
    """Return what changes when a file is written; a missing one has a stamp of its own."""
    try:
        found = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), found.st_mtime_ns, found.st_size
