"""A project whose run has two phases, and what a switch finds in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.builders.states import publish_checkpoint

from zerotrain import artifact
from zerotrain.config.read import read_config
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.errors import PipelineError
from zerotrain.graph import reruns
from zerotrain.graph.options import SwitchOptions
from zerotrain.graph.switch import command as switch
from zerotrain.graph.switch import point as switch_checks
from zerotrain.launch.files import write_run_yaml
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.training.checkpointing.progress_folder import step_folder

ROOT = Path(__file__).parents[2]
CONFIG = """\
run: flowers
base: nano
data: {images: photos}
phases:
  - {name: plain, until: 300, launch: torch, global_batch_size: 4}
  - {name: large, until: 700, launch: zero2_offload}
"""
HOLD = """
import pathlib, sys, time
from zerotrain.training.process import stop
from zerotrain.training.process.lock import take
progress = pathlib.Path(sys.argv[1])
lock = take(progress)
print("held", flush=True)
for _ in range(600):
    if (progress / "stop").exists() and "deaf" not in sys.argv:
        break
    time.sleep(0.05)
else:
    sys.exit("nobody has asked it to stop")
lock.release()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose run has two phases, nothing made; Snakemake plans what a cut needs."""
    jobs = dict.fromkeys(switch_checks.PUBLISHING, 1)
    monkeypatch.setattr(reruns, "count_jobs", lambda runs, targets: jobs)
    (tmp_path / "Snakefile").touch()
    shutil.copytree(ROOT / "config/launch", tmp_path / "config/launch")
    (tmp_path / "config/flowers.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(phase: str, *steps: int, **engine: object) -> Path:
    """Rolling checkpoints of a phase."""
    progress = Path("results/flowers") / phase / "progress"
    for step in steps:
        publish_checkpoint(
            step_folder(progress, step), step, phase=phase, engine={"preset": "torch", **engine}
        )
    return progress


def make_inputs() -> None:
    """What the first phase is trained from, and its launch."""
    config = read_config(Path("config/flowers.yaml"))
    results = Path("results/flowers")
    cache = Path("results/data/flowers/cache") / str(config.phases[0].train.resolution)
    for name, folder in {"base": results / "base", "cache": cache}.items():
        with artifact.publish(folder, name) as draft:
            draft.content = {"parts": {}}
    with artifact.publish(results / "plain/launch", "launch") as draft:
        preset = read_preset(ROOT / "config/launch/torch.yaml")
        write_run_yaml(
            resolve_phase(LaunchSettings.of(config, "plain"), preset, 906),
            draft.folder / "run.yaml",
        )


def finish(phase: str, step: int) -> None:
    """The checkpoint of a finished phase."""
    publish_checkpoint(Path("results/flowers") / phase / "checkpoint", step, phase=phase)


def export(phase: str, step: int) -> None:
    """What Snakemake publishes of a phase that ends at a step."""
    finish(phase, step)
    for kind in ("state", "weights"):
        with artifact.publish(Path("results/flowers") / phase / kind, kind) as draft:
            draft.content = {"step": step}
            artifact.write_json(draft.folder / "state.json", {"step": step})


def refusal(run: str = "flowers", to: str | None = "zero2", **options: object) -> str:
    """The sentence with which a switch is refused; the configuration stays as it was."""
    files = contents()
    with pytest.raises(PipelineError) as caught:
        switch.switch(SwitchOptions(run, to, **options))  # type: ignore[arg-type]
    assert contents() == files
    return str(caught.value)


def contents() -> dict[Path, bytes]:
    """What lies in the folder of configurations, drafts too."""
    return {path: path.read_bytes() for path in Path("config").rglob("*") if path.is_file()}


def start_training(progress: Path, *words: str) -> subprocess.Popen[str]:
    """A process that holds the lock until it is asked to stop."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(progress), *words], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    assert child.stdout.readline() == "held\n"
    return child
