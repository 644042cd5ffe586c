"""A sweep of 200 runs planned by `snakemake -n`, resources of every job printed.

    python benchmarks/sweep.py             # from the project's root, in its environment

The runs are config/config.yaml with one phase and learning rates of their own. They are planned
without stored forecasts once, then several times with them; what each job asks for is compared with
what the planner says. Then all folders are made of small files with their recipes, and plans with
nothing to do are timed. The last line is JSON: seconds, the medians and the intervals.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.artifact import publish, read_manifest
from zerotrain.artifact.recipe import Recipe
from zerotrain.config import stage_settings
from zerotrain.config.read import read_config
from zerotrain.config.runs import read_runs
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.graph.artifacts import Artifacts, Planned, digests
from zerotrain.graph.runs import Runs
from zerotrain.graph.sweep import sweep
from zerotrain.launch.planner.forecasts import machine_memory
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.stages.render_launch import render_launch
from zerotrain.training.checkpointing import conditions
from zerotrain.training.checkpointing.preflight import read_inputs

RUNS = 200
REPEATS = 5
GOAL_SECONDS = 5.0
COPIED = ("Snakefile", "rules", "config", "profiles", "envs", "workflow/zerotrain", "data")
ASKED = ["--default-resources", "mem_mb=1000", "disk_mb=1000"]
POSITION = {
    "run": "", "phase": "", "step": 300, "samples": 300, "optimizer": "adamw",
    "optimizer_step": 300, "param_groups": [], "lr_scheduler": "constant",
    "lr_scheduler_steps": 300, "rng": {}, "engine": {}, "ran_on": {}, "history": [],
}  # fmt: skip
FILES = 10
"""In each folder: launch has 3, weights of SDXL 20."""
JOB = re.compile(r"^rule (\w+):.*?^    resources: ([^\n]*)", re.MULTILINE | re.DOTALL)


def make_runs(folder: Path) -> None:
    """Make a copy of the project with the sweep's configurations."""
    for name in COPIED:
        source = Path(name)
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, folder / name)
    text = (folder / "config/config.yaml").read_text()
    second = text[text.index("  - name: offload") : text.index("evaluate:")]
    one = folder / "one.yaml"
    one.write_text(text.replace(second, "\n"))
    rates = ",".join(f"{1e-4 + number * 1e-6:.7f}" for number in range(RUNS))
    sweep(one, [f"train.learning_rate={rates}"], folder / "config/lr")


def planned(folder: Path, *words: str) -> tuple[float, str]:
    """Seconds of a dry run, and what it printed."""
    command = ["snakemake", "-n", "train", "--configfile", "config/lr.yaml", *ASKED, *words]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def mismatches(folder: Path, said: str) -> tuple[int, int]:
    """Jobs whose memory the planner tells, and those of them that ask for another."""
    run = read_config(folder / "one.yaml")
    wanted = machine_memory(run, run.phases[0].name)
    jobs = [(rule, text) for rule, text in JOB.findall(said) if rule in wanted]
    wrong = [
        rule for rule, text in jobs if f"mem_mb={-(-wanted[rule] // 2**20)}," not in f"{text},"
    ]
    return len(jobs), len(wrong)


def make_results(folder: Path) -> None:
    """Make everything of all runs as far as a plan reads it: launch files and recipes are the real
    ones, and each folder has FILES small files."""
    with contextlib.chdir(folder):
        artifacts = Artifacts(Runs(read_runs(Path("config/lr.yaml"))))
        for planned in artifacts.planned.values():
            known = {
                name: read_manifest(one, None).identity for name, one in planned.inputs.items()
            }
            recipe = stage_settings.recipe(planned.stage, planned.settings).with_inputs(
                {**known, **digests(planned.settings, planned.folders[0])}
            )
            make_artifact(planned, recipe)
            for path in planned.files:
                path.write_text("{}")


def make_artifact(planned: Planned, recipe: Recipe) -> None:
    """Publish the folders of one job."""
    output, inputs = planned.folders[0], planned.inputs
    if planned.stage == "prepare_dataset":
        prepare_dataset(planned.run.data, output, recipe=recipe)
        return
    if planned.stage == "render_launch":
        settings = LaunchSettings.of(planned.run, planned.phase)
        preset = Path("config/launch/torch.yaml")
        render_launch(settings, inputs["dataset"], preset, None, None, output, recipe=recipe)
        return
    content: dict[str, Any] = {"parts": {"unet": "0"}}
    names = [f"{number}.bin" for number in range(FILES)]
    if planned.stage == "train_phase":
        read = read_inputs(inputs["launch"], inputs["base"], inputs["cache"], None)
        content = conditions.manifest_content(read.trains)
        recipe = replace(recipe, inputs={})
        names.append("checkpoint.json")
    for folder in planned.folders:
        parents = {name: read_manifest(inputs[name], None) for name in inputs if name == "dataset"}
        kind = "cache" if planned.stage == "cache_latents" else folder.name
        with publish(folder, kind, recipe=recipe, parents=parents) as draft:
            for name in names:
                (draft.folder / name).write_text(json.dumps(POSITION))
            draft.content = content


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_runs(folder)
        first, _ = planned(folder)
        said = planned(folder, "--verbose")[1]
        times = [planned(folder)[0] for _ in range(REPEATS)]
        jobs, wrong = mismatches(folder, said)
        make_results(folder)
        planned(folder)  # which sets file times
        current, text = planned(folder)
        assert "Nothing to be done" in text, text
        again = [current, *(planned(folder)[0] for _ in range(REPEATS - 1))]
    median, nothing = statistics.median(times), statistics.median(again)
    print(f"{RUNS} runs, {len(JOB.findall(said))} jobs printed; goal {GOAL_SECONDS} s")
    print(f"without stored forecasts {first:.2f} s, with them {median:.2f} s")
    print(f"with everything made {nothing:.2f} s")
    print(f"memory of {jobs} jobs compared with the planner's: {wrong} differ")
    print(
        json.dumps(
            {
                "plan_seconds": round(median, 2),
                "interval": [round(min(times), 2), round(max(times), 2)],
                "first_seconds": round(first, 2),
                "runs": RUNS,
                "jobs_compared": jobs,
                "jobs_that_differ": wrong,
                "made_seconds": round(nothing, 2),
                "made_interval": [round(min(again), 2), round(max(again), 2)],
            }
        )
    )


if __name__ == "__main__":
    main()
