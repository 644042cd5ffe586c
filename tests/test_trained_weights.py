"""RUN and RUN/PHASE stand for the newest weights that there are, and it is reported which."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from PIL import Image
from tests.builders.states import publish_checkpoint

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.export.options import ExportOptions
from zerotrain.export.sample import save_image
from zerotrain.run import runs
from zerotrain.run.runs import exportable, find_trained, usable_weights

CONFIG = "run: digits\nbase: nano\n"


def publish(folder: str, kind: str, step: int) -> None:
    with artifact.publish(Path("results") / folder, kind) as draft:
        draft.content = {"step": step}


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of two published phases, and one whose first phase trains."""
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    Path("config/digits.yaml").write_text(CONFIG, encoding="utf-8")
    publish("digits/plain/weights", "weights", 300)
    publish("digits/plain/progress/step-00000300", "checkpoint", 300)
    publish("digits/offload/weights", "weights", 700)
    publish("digits/offload/progress/step-00000700", "checkpoint", 700)
    publish("flowers/plain/progress/step-00000100", "checkpoint", 100)
    publish("flowers/plain/progress/step-00000200", "checkpoint", 200)
    publish("flowers/large/launch", "launch", 0)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("digits", "results/digits/offload/weights"),
        ("results/digits", "results/digits/offload/weights"),
        ("./results/digits/", "results/digits/offload/weights"),
        ("digits/plain", "results/digits/plain/weights"),
        ("results/digits/plain", "results/digits/plain/weights"),
        ("flowers", "results/flowers/plain/progress/step-00000200"),
        ("flowers/plain", "results/flowers/plain/progress/step-00000200"),
    ],
)
def test_the_newest_weights_are_found(name: str, folder: str) -> None:
    """Published weights before the rolling checkpoint of their step; else what trains."""
    found = find_trained(Path(name))
    assert found is not None
    assert str(found.folder) == folder


def test_a_phase_that_trains_on_is_ahead_of_its_weights() -> None:
    """Its `until` was raised: the newest checkpoint is what it has learned by now."""
    publish("digits/offload/progress/step-00000900", "checkpoint", 900)
    found = find_trained(Path("digits"))
    assert str(found) == (
        "digits/offload: rolling checkpoint of step 900 "
        "(results/digits/offload/progress/step-00000900)"
    )


@pytest.mark.parametrize(
    "name", ["results/digits/plain/weights", "elsewhere", "/models/sdxl", "a/b/c.safetensors"]
)
def test_a_path_stays_what_it_is(name: str) -> None:
    """What is there by that name is opened; a path of another form is left to be refused."""
    Path("elsewhere").mkdir()
    assert find_trained(Path(name)) is None


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("digts", "digts: no such file or folder, and no run or phase with weights in results",
         "did you mean digits? there are weights of: digits/offload, digits/plain, "
         "flowers/plain"),
        ("digits/plian", "digits/plian: no such file or folder, and no run or phase with weights "
         "in results", "did you mean digits/plain? there are weights of: digits/offload, "
         "digits/plain, flowers/plain"),
        ("flowers/large", "flowers/large: it has neither weights nor a rolling checkpoint yet",
         "did you mean flowers/plain? there are weights of: digits/offload, digits/plain, "
         "flowers/plain"),
    ],
)  # fmt: skip
def test_what_has_no_weights_is_refused_with_what_has(name: str, what: str, hint: str) -> None:
    """The nearest name, and all there are."""
    with pytest.raises(PipelineError) as caught:
        find_trained(Path(name))
    assert (caught.value.what, caught.value.hint) == (what, hint)


EXPORT = "zerotrain.export.command.export_command"


@pytest.fixture
def recorded() -> None:
    """The newest rolling checkpoint of flowers says what it was trained with."""
    folder = Path("results/flowers/plain/progress/step-00000200")
    publish_checkpoint(folder, 200, trains={"family": "sdxl", "lora": None})


def test_a_rolling_checkpoint_is_exported_for_the_time_of_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recorded: None
) -> None:
    """Without a configuration: those of a sweep lie in another folder. Nothing is left behind."""
    asked = []

    def export(options: ExportOptions) -> None:
        asked.append((options.checkpoint, options.config, options.family, options.base))
        options.output.mkdir()

    monkeypatch.setattr(EXPORT, export)
    before = sorted(Path("results").rglob("*"))
    with usable_weights(Path("flowers")) as folder:
        assert folder.is_dir()
    rolling = Path("results/flowers/plain/progress/step-00000200")
    assert asked == [(rolling, None, "sdxl", Path("results/flowers/base"))]
    assert sorted(Path("results").rglob("*")) == before
    assert capsys.readouterr().err == (
        "using flowers/plain: rolling checkpoint of step 200 "
        "(results/flowers/plain/progress/step-00000200)\n"
    )


def test_a_checkpoint_of_unknown_values_is_refused() -> None:
    """Its manifest is damaged."""
    rolling = "results/flowers/plain/progress/step-00000200"
    with (
        pytest.raises(PipelineError, match=f"{rolling}: manifest.json: trains is no object"),
        usable_weights(Path("flowers")),
    ):
        pass


def test_an_export_without_a_configuration_is_not_announced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(PipelineError, match="no file in config has the run flowers"):
        exportable(Path("flowers"), None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_use_leaves_no_model(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, recorded: None
) -> None:
    """After SIGTERM nothing is there; what SIGKILL leaves is removed by the next use."""

    def export(options: ExportOptions) -> None:
        options.output.mkdir()

    monkeypatch.setattr(EXPORT, export)
    before = sorted(Path("results").rglob("*"))
    process = multiprocessing.get_context("fork").Process(target=_kill_in_use, args=(number,))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == (143 if number == signal.SIGTERM else -number)
    if number == signal.SIGKILL:
        assert sorted(Path("results").rglob("*")) != before
        with usable_weights(Path("flowers")):
            pass
    assert sorted(Path("results").rglob("*")) == before


def _kill_in_use(number: int) -> None:
    with usable_weights(Path("flowers")):
        os.kill(os.getpid(), number)


def test_an_export_takes_the_newest_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    """Published weights say themselves what they are; a checkpoint needs the configuration."""
    weights = Path("results/digits/offload/weights")
    assert exportable(Path("digits"), None) == (weights, None)
    assert "using digits/offload: weights of step 700" in capsys.readouterr().err
    (runs.RESULTS / "digits/plain/weights/manifest.json").unlink()
    rolling = Path("results/digits/plain/progress/step-00000300")
    assert exportable(Path("digits/plain"), None) == (rolling, Path("config/digits.yaml"))


def test_no_other_image_is_replaced(tmp_path: Path) -> None:
    """Other weights make another image of the same prompt and seed: it gets the next number."""
    file = tmp_path / "samples" / "a-cat-0.png"
    file.parent.mkdir()
    red, blue = (Image.new("RGB", (2, 2), colour) for colour in ("red", "blue"))
    assert save_image(red, file) == file
    assert save_image(red, file) == file
    assert save_image(blue, file).name == "a-cat-0-2.png"
    assert save_image(blue, file).name == "a-cat-0-2.png"
    assert [path.name for path in sorted(file.parent.iterdir())] == ["a-cat-0-2.png", "a-cat-0.png"]
    assert save_image(blue, file, overwrite=True) == file
    assert file.read_bytes() == (file.parent / "a-cat-0-2.png").read_bytes()
