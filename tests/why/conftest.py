"""A run whose artifacts have manifests with the recipes that stages would write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from tests.conftest import ROOT

from zerotrain import artifact
from zerotrain.artifact import read_manifest
from zerotrain.artifact.layout import CONFIGS
from zerotrain.artifact.recipe import Difference
from zerotrain.config import MAIN_CONFIG, stage_settings
from zerotrain.config.runs import read_runs
from zerotrain.data import files
from zerotrain.graph.artifacts import Artifacts, Planned, digests
from zerotrain.graph.reruns import Reruns, plan
from zerotrain.graph.runs import Runs
from zerotrain.graph.why.causes import Causes, find_causes
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.training.checkpointing import published

NAMES = ("cat", "dog", "fox")


class BuiltRun:
    """A run of two phases in the working directory.

    Attributes:
        config: Its configuration, to be edited.
        trained: What the training of a phase finds.
    """

    def __init__(self) -> None:
        self.config: dict[str, Any] = {
            "run": "tiny",
            "base": "nano",
            "data": {"images": "photos"},
            "train": {"resolution": 64, "learning_rate": 0.001},
            "phases": [
                {"name": "plain", "until": 300, "launch": "torch"},
                {"name": "offload", "until": 700, "launch": "zero2_offload"},
            ],
        }
        self.trained: dict[str, list[Difference]] = {}
        shutil.copytree(ROOT / "config/launch", CONFIGS / "launch")
        Path("photos").mkdir()
        for number, name in enumerate(NAMES):
            self.draw(name, number)

    def draw(self, name: str, colour: int) -> None:
        """Write an image with its caption."""
        Image.new("RGB", (64, 64), (colour, 0, 0)).save(f"photos/{name}.png")
        Path(f"photos/{name}.txt").write_text(f"a {name}", encoding="utf-8")

    def artifacts(self) -> Artifacts:
        """The artifacts of the configuration as it is now."""
        MAIN_CONFIG.write_text(yaml.safe_dump(self.config))
        files.forget_walks()
        return Artifacts(Runs(read_runs(MAIN_CONFIG)))

    def build(self, *stages: str) -> None:
        """Make the folders of these stages, or of all."""
        for one in self.artifacts().planned.values():
            if not stages or one.stage in stages:
                _make(one)

    def reruns(self, target: str = "train") -> Reruns:
        """What would run for a target."""
        self.artifacts()  # writes the configuration
        return plan(read_runs(MAIN_CONFIG), [target])

    def running(self, target: str = "train") -> list[str]:
        """The names of what would run."""
        return [one.planned.name for one in self.reruns(target).running]

    def causes(self) -> Causes:
        """Why it runs."""
        found = self.reruns()
        whole = len(found.running) == len(found.needed)
        return find_causes(found.running, nothing_made=whole)

    def sentences(self) -> dict[str, list[str]]:
        """The sentence of each cause, with the names of what has it itself."""
        return {one.text: [each.planned.name for each in one.having] for one in self.causes().every}


def _make(planned: Planned) -> None:
    identities = {name: read_manifest(one, None).identity for name, one in planned.inputs.items()}
    known = identities | digests(planned.settings, planned.folders[0])
    if planned.stage == "train_phase":
        known = {}  # its launch files say what it trains
    recipe = stage_settings.recipe(planned.stage, planned.settings).with_inputs(known)
    if planned.stage == "prepare_dataset":
        prepare_dataset(planned.run.data, planned.folders[0], recipe=recipe)
    else:
        for folder in planned.folders:
            with artifact.publish(folder, folder.name, recipe=recipe) as draft:
                (draft.folder / "payload.bin").write_bytes(b"payload")
                if planned.stage == "train_phase":
                    end = int(planned.run.phase(planned.phase).until.split()[0])
                    (draft.folder / "checkpoint.json").write_text(json.dumps({"step": end}))
                draft.content = {"recipe": recipe.as_json()}
    for file in planned.files:
        file.write_text("{}")
    for record in (planned.log, planned.benchmark):
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text("s\n2.0\n")


@pytest.fixture
def unmade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltRun:
    """A run of which nothing is made."""
    monkeypatch.chdir(tmp_path)
    run = BuiltRun()
    monkeypatch.setattr(
        published,
        "differences",
        lambda inputs, progress, checkpoint: run.trained.get(progress.parent.name, []),
    )
    return run


@pytest.fixture
def run(unmade: BuiltRun) -> BuiltRun:
    """A run of which everything is made."""
    unmade.build()
    return unmade
