"""What a target needs, and what of that would run: Snakemake's plan, without Snakemake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zerotrain.artifact.layout import RunFolder
from zerotrain.config.run import RunConfig
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError
from zerotrain.graph.artifacts import Artifacts, Planned
from zerotrain.graph.currency import Currency, refresh
from zerotrain.graph.runs import Runs

CACHE = (
    *("prepare_dataset", "build_base", "build_shared_base"),
    "cache_latents",
)
TRAINED = (*CACHE, "render_launch", "train_phase", "export_weights")
TARGETS: Mapping[str, tuple[str, ...]] = {
    "dataset": ("prepare_dataset",),
    "base": ("prepare_dataset", "build_base"),
    "cache": CACHE,
    "launch": ("prepare_dataset", "render_launch"),
    "checkpoints": TRAINED,
    "weights": TRAINED,
    "evaluation": (*TRAINED, "evaluate"),
    "train": (*TRAINED, "evaluate", "report"),
}
"""The rules whose results each rule of rules/targets.smk names."""
OF_PHASE = ("export_weights", "evaluate")
"""The rules that make what a phase is trained for."""


def plan(runs: Mapping[str, RunConfig], targets: Sequence[str]) -> Reruns:
    """Return what would run for targets.

    Args:
        runs: The runs, by their files.
        targets: As find_target takes them.

    Raises:
        PipelineError: there is no such target.
    """
    every = [*Artifacts(Runs(runs)).planned.values()]
    wanted = [one for target in targets for one in find_target(target, every)]
    return Reruns(refresh(needed_for(wanted, every)), wanted)


def count_jobs(runs: Mapping[str, RunConfig], targets: Sequence[str]) -> dict[str, int]:
    """Count what would run for targets by rule, as `snakemake -n` does, from files as they are now.

    Args:
        runs: The runs, by their files.
        targets: As find_target takes them.

    Raises:
        PipelineError: there is no such target.
    """
    return dict(Counter(one.planned.rule for one in plan(runs, targets).running))


def needed_for(wanted: Iterable[Planned], every: Sequence[Planned]) -> list[Planned]:
    """List artifacts and all that they are made from, in the order of the graph."""
    maker = {folder: one for one in every for folder in one.folders}
    needed, waiting = set[Path](), [*wanted]
    while waiting:
        one = waiting.pop()
        if one.settings_file not in needed:
            needed.add(one.settings_file)
            waiting += [maker[path] for path in one.sources if path in maker]
    return [one for one in every if one.settings_file in needed]


class Reruns:
    """The artifacts that would run for a target.

    Args:
        found: What was found of each artifact that the target needs, in the order of the graph.
        wanted: The artifacts that the target names.
    """

    def __init__(self, found: Sequence[Currency], wanted: Iterable[Planned]) -> None:
        maker = {folder: one for one in found for folder in one.planned.folders}
        names = {one.settings_file for one in wanted}
        named = {one for one in found if one.planned.settings_file in names}
        self._before = {
            one: [*dict.fromkeys(maker[path] for path in one.planned.sources if path in maker)]
            for one in found
        }
        self.needed = [*found]
        """What the target names and all that is made before it, in the order of the graph."""
        self._after: dict[Currency, list[Currency]] = {one: [] for one in self.needed}
        for one in self.needed:
            for path in dict.fromkeys(one.planned.sources):
                if path in maker and path not in one.planned.ancient:
                    self._after[maker[path]].append(one)
        runs = {
            one for one in self.needed if one.differences or (one in named and one.missing_outputs)
        }
        waiting = [*runs]
        while waiting:
            one = waiting.pop()
            # An intermediate result that is missing is made where something reads it.
            missing = {other for other in self._before[one] if other.missing_outputs}
            new = ({*self._after[one]} | missing) - runs
            runs |= new
            waiting += new
        self.running = [one for one in self.needed if one in runs]
        """Those that would run, in the order of the graph."""

    def before(self, one: Currency) -> list[Currency]:
        """List the artifacts that one is made from."""
        return self._before[one]

    def following(self, first: Iterable[Currency]) -> list[Currency]:
        """List these artifacts and all that run after them, in the order of the graph."""
        reached: set[Currency] = set()
        waiting = [*first]
        while waiting:
            one = waiting.pop()
            if one not in reached:
                reached.add(one)
                waiting += self._after[one]
        return [one for one in self.running if one in reached]


def find_target(target: str, every: Sequence[Planned]) -> list[Planned]:
    """Return the artifacts that a target names.

    Args:
        target: A rule, a stage, a file or a folder of the results, or a phase.
        every: The artifacts of the runs.

    Raises:
        PipelineError: there is no such target.
    """
    found = [one for one in every if _is_of_phase(target, one)]
    found = found or [one for one in every if _names(target, one)]
    if not found:
        phases = dict.fromkeys(one.phase for one in every if one.phase)
        raise PipelineError(
            f"{target}: neither a rule nor a file that a rule makes, nor a phase",
            hint=known_names(target, [*TARGETS, *phases], "targets"),
        )
    return found


def _is_of_phase(target: str, one: Planned) -> bool:
    """Return whether a target is a phase that this is a result of."""
    run = one.run.run
    known = (one.phase, f"{run}/{one.phase}", str(RunFolder(run).path / one.phase))
    return one.rule in OF_PHASE and target in known


def _names(target: str, one: Planned) -> bool:
    if target == "base" and one.rule == "prepare_dataset":
        return one.run.is_preset
    if target == "checkpoints" and one.rule == "export_weights":
        return one.phase != one.run.phases[-1].name  # the next phase starts from it
    if target in TARGETS:
        return one.rule in TARGETS[target]
    return target in (one.stage, one.rule) or Path(target) in [*one.outputs, *one.folders]
