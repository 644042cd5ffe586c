"""A published checkpoint stays as long as it is what the phase trains, whatever else is gone."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import Training

from zerotrain import artifact
from zerotrain.artifact import MANIFEST
from zerotrain.errors import PipelineError
from zerotrain.state.position import read_position
from zerotrain.training.checkpointing import published
from zerotrain.training.checkpointing.progress_folder import saved_steps


class Published:
    """A phase of three steps and its published checkpoint."""

    def __init__(self, training: Any) -> None:
        self.training = training
        self.progress: Path = training.progress("plain")
        self.output: Path = training.folder / "plain" / "checkpoint"
        self.publish()

    def publish(self) -> None:
        """Publish the newest rolling checkpoint."""
        step = saved_steps(self.progress)[-1]
        rolling = artifact.read(self.progress / f"step-{step:08d}", "checkpoint")
        published.publish(
            rolling, self.output, self.training.inputs("plain"), self.progress, early=False
        )

    def keep(self, until: int = 3, **changes: Any) -> bool:
        """Whether it is kept, by a phase of these values."""
        self.training.phase("plain", "torch", until, **changes)
        return published.keep(self.output, self.progress, self.training.inputs("plain"))

    def is_current(self) -> bool:
        """Whether a plan would keep it."""
        launch = self.training.folder / "plain" / "launch"
        folders = (self.training.base, self.training.cache, None, self.progress, self.output)
        return published.is_current(launch, *folders)

    def manifest(self) -> bytes:
        """The bytes of its manifest."""
        return (self.output / MANIFEST).read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, inputs: Path, server: Any) -> Path:
    """The folder of a run whose phase has trained its three steps."""
    training = Training(tmp_path_factory.mktemp("published"), inputs, server)
    training.run("plain", "torch", 3)
    return training.folder


@pytest.fixture
def phase(trained: Path, training: Training) -> Published:
    """A published phase."""
    shutil.copytree(trained, training.folder, dirs_exist_ok=True)
    return Published(training)


def test_it_is_kept_without_its_progress(phase: Published) -> None:
    """Nothing is trained and no byte changes; another value, a later end or a damage train."""
    before = phase.manifest()
    shutil.rmtree(phase.progress)
    assert phase.keep()
    assert phase.keep(gradient_checkpointing=True, save_every=2)
    assert phase.manifest() == before
    damaged = next(phase.output.glob("*.safetensors"))
    damaged.rename(damaged.with_suffix(".away"))
    damaged.write_bytes(b"")
    with pytest.raises(PipelineError, match="the phase's published checkpoint is damaged"):
        phase.keep()
    assert phase.manifest() == before


@pytest.mark.slow
def test_a_later_end_continues_from_it(phase: Published) -> None:
    """It is put back into the progress, and its steps are not trained again."""
    shutil.rmtree(phase.progress)
    assert not phase.keep(until=5)
    assert saved_steps(phase.progress) == [3]
    phase.training.prepare("plain")
    phase.training.train("plain")
    assert len(phase.training.losses("plain")) == 5
    position = read_position(
        artifact.read(phase.progress / "step-00000005", "checkpoint"), "checkpoint.json"
    )
    assert position.history == []


def test_the_same_checkpoint_is_published_once(phase: Published) -> None:
    """Another source or launch changes no byte of its manifest, which names neither."""
    before = phase.manifest()
    assert b"commit" not in before.replace(b"records/made_by.json", b"")
    phase.training.phase("plain", "torch", 3, log_every=2)
    phase.publish()
    assert phase.manifest() == before
    made_by = json.loads((phase.output / "records/made_by.json").read_text())
    assert made_by.keys() == {"commit", "version"}


def test_an_edit_follows_on_change(phase: Published, capsys: pytest.CaptureFixture[str]) -> None:
    """Without progress as with it: its steps are refused, continued or set aside, never lost."""
    before, recorded = phase.manifest(), phase.training.inputs("plain").trains
    edit: dict[str, Any] = {"learning_rate": 1e-4}
    shutil.rmtree(phase.progress)
    assert not phase.keep(**edit, on_change="stop")
    with pytest.raises(PipelineError, match=r"learning_rate 0.001 -> 0.0001.*on_change: stop"):
        phase.training.prepare("plain")
    assert phase.manifest() == before
    shutil.rmtree(phase.progress)
    assert not phase.keep(**edit, on_change="continue")
    phase.training.prepare("plain")
    phase.publish()
    assert phase.manifest() == before
    assert json.loads(before)["content"]["trains"] == recorded
    said = capsys.readouterr().err
    assert "finished with its former values (learning_rate 0.001 -> 0.0001); nothing is" in said
    assert phase.is_current()
    shutil.rmtree(phase.progress)
    assert not phase.keep(**edit)
    phase.training.prepare("plain")
    assert saved_steps(phase.progress) == []
    (stale,) = phase.progress.parent.glob("progress.stale-*")
    assert saved_steps(stale) == [3]
    assert "`zerotrain progress accept" in capsys.readouterr().err


def test_a_lower_end_follows_on_change(
    phase: Published, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps are of no use to it: refused, or moved aside with the way back."""
    before = phase.manifest()
    shutil.rmtree(phase.progress)
    for on_change in ("stop", "continue"):
        with pytest.raises(PipelineError, match="until 3 -> 2") as caught:
            phase.keep(2, on_change=on_change)
        assert f"train.on_change: {on_change}" in caught.value.what
        assert phase.manifest() == before
    assert not phase.keep(2)
    said = capsys.readouterr().err
    assert not phase.output.exists()
    aside = phase.output.parent / "before-retrain-1"
    assert f"(until 3 -> 2): they are moved to {aside}, and training restarts" in said
    subprocess.run(said.partition("run `")[2].partition("`")[0], shell=True, check=True)
    assert phase.manifest() == before
    assert phase.keep()


def test_one_that_ended_early_continues_to_a_later_end(phase: Published) -> None:
    """Only where train.on_change says so."""
    manifest = json.loads(phase.manifest())
    manifest["content"] |= {"until": 5, "validation": None}
    artifact.write_json(phase.output / MANIFEST, manifest)
    shutil.rmtree(phase.progress)
    assert phase.keep(5)
    with pytest.raises(PipelineError, match="until 5 -> 6"):
        phase.keep(6, on_change="stop")
    assert not phase.keep(6, on_change="continue")
    assert saved_steps(phase.progress) == [3]
