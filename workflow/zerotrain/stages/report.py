"""report: a run on one self-contained page."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from zerotrain import artifact
from zerotrain.config import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import explained
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.page import PhaseFacts, render_page

KIND = "report"
LAUNCH_FACTS = (
    *("preset", "engine", "zero_stage", "offload_optimizer", "num_processes"),
    *("num_cpu_threads_per_process", "mixed_precision", "start_step", "until_step"),
    *("resolution", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps"),
    *("optimizer", "learning_rate", "lr_scheduler", "lr_scheduler_args", "lr_warmup_steps"),
    *("lr_scheduler_steps", "objective", "caption_dropout_probability"),
)


def report(config: RunConfig, folders: list[Path], output: Path) -> None:
    """Publish index.html (grid, curves, metrics, launch of each phase); say where things lie.

    Args:
        config: The run's configuration.
        folders: Folders of the phases, in order.
        output: Folder to publish.

    Raises:
        PipelineError: a phase has not been evaluated.
    """
    facts = [_phase(folder) for folder in folders]
    parents = {
        folder.name: artifact.read(folder / "evaluation", "evaluation", verify=False)
        for folder in folders
    }
    with artifact.publish(output, KIND, parents=parents) as draft:
        page = render_page(config.run, _summary(config), facts)
        (draft.folder / "index.html").write_text(page, encoding="utf-8")
        draft.content = {"run": config.run, "phases": [folder.name for folder in folders]}
    last = facts[-1]
    prompt = parents[folders[-1].name].content["prompts"][0]
    print(
        f"report   {output / 'index.html'}\n"
        f"weights  {last.weights}\n"
        f"grid     {folders[-1] / 'evaluation' / 'grid.png'}\n"
        f"metrics  {folders[-1] / 'metrics.json'}\n"
        f"curves   tensorboard --logdir {shlex.quote(str(folders[-1].parent))}\n"
        f"use it   {shlex.join(['zerotrain', 'sample', str(last.weights), prompt])}"
    )


def _phase(folder: Path) -> PhaseFacts:
    evaluation = artifact.read(folder / "evaluation", "evaluation")
    metrics = folder / "metrics.json"
    if not metrics.is_file():
        raise PipelineError(
            f"{metrics}: missing, so phase {folder.name} has not been evaluated",
            hint="run `snakemake --cores all report`, which evaluates every phase first",
        )
    return PhaseFacts(
        name=folder.name,
        metrics=json.loads(metrics.read_text()),
        grid=evaluation.path("grid.png").read_bytes(),
        loss=evaluation.path("loss.png").read_bytes(),
        learning_rate=evaluation.path("learning_rate.png").read_bytes(),
        launch=_launch(folder / "launch" / "run.yaml"),
        weights=folder / "weights",
    )


def _launch(path: Path) -> list[tuple[str, str, str]]:
    """Name, value and source of each launch fact; none if the phase was launched by hand."""
    if not path.is_file():
        return []
    return [
        (name, str(value), f"{source}: {reason}" if reason else source)
        for name, value, source, reason in explained(read_run_yaml(path))
        if name.partition(".")[0] in LAUNCH_FACTS and value != {}
    ]


def _summary(config: RunConfig) -> list[tuple[str, str]]:
    evaluate = config.evaluate
    return [
        ("family", config.family),
        ("base", config.base + (f" at {config.revision}" if config.revision else "")),
        ("data", config.data.images or config.data.source),
        ("seed", str(config.seed)),
        (
            "sampling",
            f"{evaluate.num_inference_steps} steps, guidance {evaluate.guidance_scale:g}, "
            f"scheduler {evaluate.scheduler}",
        ),
    ]
