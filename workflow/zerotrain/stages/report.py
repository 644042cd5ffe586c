"""report: a run on one self-contained page."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.config import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.evaluation.answers import ANSWERS, Answer, read_answers
from zerotrain.launch.facts import launch_facts
from zerotrain.page import PhaseFacts, render_page
from zerotrain.tracker_names import ALL, TENSORBOARD

KIND = "report"


def report(config: RunConfig, folders: list[Path], output: Path) -> None:
    """Publish index.html (grid, curves, metrics, launch of each phase); say where things lie.

    Args:
        config: The run's configuration.
        folders: Folders of the phases, in order.
        output: Folder to publish.

    Raises:
        PipelineError: a phase has not been evaluated.
    """
    facts = [_phase(folder, config) for folder in folders]
    parents = {
        folder.name: artifact.read(folder / "evaluation", "evaluation", verify=False)
        for folder in folders
    }
    with artifact.publish(output, KIND, parents=parents) as draft:
        page = render_page(config.run, _summary(config), facts)
        (draft.folder / "index.html").write_text(page, encoding="utf-8")
        draft.content = {"run": config.run, "phases": [folder.name for folder in folders]}
    last = facts[-1]
    shown = "grid     " if last.grid else "answers  "
    made = folders[-1] / "evaluation" / ("grid.png" if last.grid else ANSWERS)
    act = "sample" if last.grid else "generate"
    prompt = parents[folders[-1].name].content["prompts"][0]
    print(
        f"report   {output / 'index.html'}\n"
        f"weights  {last.weights}\n"
        f"{shown}{made}\n"
        f"metrics  {folders[-1] / 'metrics.json'}\n"
        f"curves   {_curves(config, folders)}\n"
        f"use it   {shlex.join(['zerotrain', act, str(last.weights), prompt])}"
    )


def _curves(config: RunConfig, folders: list[Path]) -> str:
    phases = [config.phase(phase.name) for phase in config.phases]
    named = {name for phase in phases for name in phase.train.report_to}
    if named & {ALL, TENSORBOARD}:
        return f"tensorboard --logdir {shlex.quote(str(folders[-1].parent))}"
    return str(folders[-1] / "state" / "records" / "metrics.jsonl")


def _phase(folder: Path, config: RunConfig) -> PhaseFacts:
    evaluation = artifact.read(folder / "evaluation", "evaluation")
    launch, metrics = folder / "launch", folder / "metrics.json"
    if launch.is_dir():  # a phase that was launched by hand has none
        artifact.read(launch, "launch")
    if not metrics.is_file():
        raise PipelineError(
            f"{metrics}: missing, so phase {folder.name} has not been evaluated",
            hint="run `snakemake --cores all report`, which evaluates every phase first",
        )
    return PhaseFacts(
        name=folder.name,
        metrics=json.loads(metrics.read_text()),
        grid=_bytes(evaluation, "grid.png"),
        answers=_answers(evaluation),
        loss=evaluation.path("loss.png").read_bytes(),
        learning_rate=evaluation.path("learning_rate.png").read_bytes(),
        launch=launch_facts(launch / "run.yaml"),
        weights=folder / "weights",
        seq2seq=config.family == "seq2seq_lm",
    )


def _bytes(evaluation: Artifact, name: str) -> bytes | None:
    return evaluation.path(name).read_bytes() if name in evaluation.files else None


def _answers(evaluation: Artifact) -> list[Answer]:
    return read_answers(evaluation.path(ANSWERS)) if ANSWERS in evaluation.files else []


def _summary(config: RunConfig) -> list[tuple[str, str]]:
    evaluate = config.evaluate
    scale = "default" if evaluate.guidance_scale is None else f"{evaluate.guidance_scale:g}"
    sampling = (
        f"{evaluate.num_inference_steps} steps, guidance {scale}, scheduler {evaluate.scheduler}"
    )
    return [
        ("family", config.family),
        ("base", config.base + (f" at {config.revision}" if config.revision else "")),
        ("data", config.data.images or config.data.path or config.data.source),
        ("seed", str(config.seed)),
        ("sampling", "greedy" if config.is_text else sampling),
    ]
