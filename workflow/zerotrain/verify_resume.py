"""`zerotrain verify resume`: whether a phase that is killed and resumed ends in the same bits.

The phase is trained twice by the real stage, in a scratch folder: 2N steps undisturbed; and N
steps with a checkpoint, kill -9 a little later, and from the checkpoint to the same end.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from zerotrain import graph
from zerotrain.config import Phase, RunConfig, read_config
from zerotrain.errors import PipelineError
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.scratch_training import Ending, ScratchTraining
from zerotrain.switch_point import RESULTS, imported_state, phase_folder

LONGER = 4
"""The run that is killed would end after so many times N steps, so that the kill comes before."""


@dataclass(frozen=True)
class Verdict:
    """What a verification found."""

    lines: list[str]
    equal: bool


def verify_resume(config: Path, phase: str | None = None, steps: int = 10) -> Verdict:
    """Train 2 x `steps` steps undisturbed and with a kill in between, and compare all bits.

    Args:
        config: The run's configuration.
        phase: Name of a phase; default: the first.
        steps: N, from the step at which the phase begins.

    Raises:
        PipelineError: an input cannot be made, or a training fails.
    """
    parsed = read_config(config)
    chosen = parsed.phase(phase) if phase else parsed.phases[0]
    inputs = _inputs(parsed, chosen)
    _make(config, inputs)
    RESULTS.mkdir(exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".verify-{parsed.run}-{chosen.name}-", dir=RESULTS))
    try:
        verdict = _compare(place, inputs, steps)
    except PipelineError as error:
        raise PipelineError(f"{error.what}; {place} is kept", hint=error.hint) from error
    if verdict.equal:
        shutil.rmtree(place)
        return verdict
    return replace(verdict, lines=[*verdict.lines, f"both trainings are kept in {place}"])


def _inputs(config: RunConfig, phase: Phase) -> dict[str, Path]:
    """The folders that the phase is trained from, by the stage's options."""
    found = {
        "launch": phase_folder(config, phase) / "launch",
        "base": RESULTS / config.run / "base",
        "cache": RESULTS / "data" / config.data_name / "cache" / str(config.cache_size(phase)),
    }
    before = config.phase_before(phase.name)
    start = phase_folder(config, before) / "state" if before else imported_state(config)
    return {**found, "start": start} if start else found


def _make(config: Path, inputs: dict[str, Path]) -> None:
    """Let Snakemake make what is missing or out of date, but train no other phase."""
    if not Path("Snakefile").is_file():
        raise PipelineError(
            f"{Path.cwd()}: no Snakefile here", hint="call it in the folder of the project"
        )
    targets = [f"{folder}/manifest.json" for folder in inputs.values()]
    jobs = graph.plan(config, targets)
    if "train_phase" in jobs:
        raise PipelineError(
            f"the phase goes on from {inputs['start']}, which is not trained yet",
            hint=f"train it with `{graph.command(config, targets)}`, or verify an earlier phase",
        )
    if jobs:
        graph.make(config, targets)


def _compare(place: Path, inputs: dict[str, Path], steps: int) -> Verdict:
    phase = read_run_yaml(inputs["launch"] / "run.yaml")
    first = phase.start_step
    middle = (first // steps + 1) * steps  # checkpoints come at multiples
    end = middle + steps
    _say(
        f"{phase.run}/{phase.phase}: {phase.preset}, {phase.num_processes} process(es), precision "
        f"{phase.mixed_precision}, {phase.gradient_accumulation_steps} accumulation(s) a step"
    )
    once = ScratchTraining(place / "undisturbed", inputs)
    once.write_launch(phase, until=end, save_every=end)
    once.train()
    _say(f"undisturbed: steps {first} to {end}")
    twice = ScratchTraining(place / "killed", inputs)
    twice.write_launch(phase, until=first + LONGER * steps, save_every=steps)
    reached = twice.kill_after(middle)
    twice.write_launch(phase, until=end, save_every=end)
    twice.train()
    _say(f"killed by SIGKILL at step {reached}, resumed from step {middle} to {end}")
    return _judge(once.ending(end), twice.ending(end))


def _judge(once: Ending, twice: Ending) -> Verdict:
    equal = once == twice
    last = max(once.losses)
    lines = [
        f"{name:11} sha256 {ending.digest}  loss {ending.losses.get(last)!r}"
        for name, ending in (("undisturbed", once), ("resumed", twice))
    ]
    if equal:
        said = f"{len(once.tensors)} tensors and the losses of {len(once.losses)} steps"
        return Verdict([*lines, f"EXACT: {said} are equal in every bit"], equal)
    steps = sorted({*once.losses, *twice.losses})
    differing = [step for step in steps if once.losses.get(step) != twice.losses.get(step)]
    names = list(dict.fromkeys([*once.tensors, *twice.tensors]))
    apart = [name for name in names if once.tensors.get(name) != twice.tensors.get(name)]
    what = [
        f"first loss that differs: step {differing[0]}, "
        f"{once.losses.get(differing[0])!r} and {twice.losses.get(differing[0])!r}"
        if differing
        else "no loss differs",
        f"first tensor that differs: {apart[0]}; {len(apart)} of {len(names)} do"
        if apart
        else "no tensor differs",
    ]
    for key in sorted(once.position):
        if once.position[key] != twice.position[key]:
            what.append(f"{key}: {once.position[key]} and {twice.position[key]}")
    return Verdict([*lines, "NOT EXACT: the resumed training ends in other bits", *what], equal)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
