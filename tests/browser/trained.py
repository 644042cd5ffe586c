"""A small run whose captions are of all scripts, trained for real from images to a report."""

from __future__ import annotations

from pathlib import Path

import yaml
from tests.browser.checks import CAPTIONS
from tests.builders.commands import run_in_project
from tests.builders.images import write_pictures
from tests.conftest import copy_quick_project

RUN = "scripts"


def train_shortly(folder: Path) -> Path:
    """Train a few steps of plain PyTorch and of ZeRO-2 with offload; the folder of the results."""
    project = copy_quick_project(folder)
    prompts = [*CAPTIONS.values()]
    write_pictures(project / "pictures", prompts, side=32, count=12)
    config = {
        "run": RUN,
        "base": "nano",
        "data": {"images": "pictures", "num_workers": 0},
        "train": {"resolution": 32, "global_batch_size": 4},
        "launch": {"num_cpu_threads_per_process": 1},
        "phases": [
            {"name": "plain", "until": 6, "launch": "torch"},
            {"name": "offload", "until": 12, "launch": "zero2_offload"},
        ],
        "evaluate": {
            "prompts": prompts, "images_per_prompt": 2, "num_inference_steps": 2, "batch_size": 12
        },
    }  # fmt: skip
    (project / "config/scripts.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    run_in_project(
        project, "snakemake", "--cores", "2", "report", "--configfile", "config/scripts.yaml"
    )
    return project / "results" / RUN
