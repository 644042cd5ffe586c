"""`zerotrain switch`: what it finds and what it refuses."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from tests.builders import refusals
from tests.builders.states import publish_checkpoint
from tests.switch.conftest import (
    CONFIG,
    ROOT,
    export,
    finish,
    make_inputs,
    refusal,
    save,
    start_training,
)

from zerotrain import artifact
from zerotrain.config.read import read_config
from zerotrain.config.runs import find_config
from zerotrain.errors import PipelineError
from zerotrain.graph import reruns, snakemake
from zerotrain.graph.options import SwitchOptions
from zerotrain.graph.switch import (
    command as switch,
)
from zerotrain.graph.switch import point as switch_checks
from zerotrain.graph.switch import (
    point as switch_point,
)
from zerotrain.training.checkpointing import set_aside
from zerotrain.training.checkpointing.progress_folder import step_folder
from zerotrain.training.process import stop
from zerotrain.training.process.lock import read_owner
from zerotrain.training.process.stop import stop_training

pytestmark = pytest.mark.usefixtures("project")


def test_a_run_is_found_by_its_name_or_its_file() -> None:
    """Whatever the file is called, and wherever it lies."""
    mine = Path("config/flowers.yaml")
    assert find_config("flowers") == mine
    assert find_config("config/flowers.yaml") == mine
    assert find_config("./config/flowers.yaml") == mine
    mine.rename("config/config.yaml")
    assert find_config("flowers") == Path("config/config.yaml")
    Path("config/config.yaml").rename("elsewhere.yaml")
    assert find_config("elsewhere.yaml") == Path("elsewhere.yaml")


def test_a_run_that_no_file_or_several_have_is_refused() -> None:
    """With what there is; a file's name settles it; files that cannot be read are passed over."""
    Path("config/cats.yaml").write_text(
        CONFIG.replace("run: flowers", "run: cats"), encoding="utf-8"
    )
    Path("config/bad.yaml").write_text("run: [", encoding="utf-8")
    assert refusal("dogs") == (
        "ERROR: no file in config has the run dogs\n"
        "  Hint: runs here: cats (config/cats.yaml), flowers (config/flowers.yaml); a file of "
        "another folder is named as FILE.yaml"
    )
    Path("config/copy.yaml").write_text(CONFIG, encoding="utf-8")
    assert refusal() == (
        "ERROR: several files have the run flowers: config/copy.yaml, config/flowers.yaml\n"
        "  Hint: name one of these files instead"
    )
    assert find_config("config/copy.yaml") == Path("config/copy.yaml")
    assert refusal("nowhere.yaml").startswith("ERROR: nowhere.yaml: no such configuration file")


def test_a_preset_that_is_not_there_is_refused() -> None:
    """The known ones are those of config/launch, whatever they are."""
    known = ", ".join(sorted(path.stem for path in (ROOT / "config/launch").glob("*.yaml")))
    assert refusal(to="zero2_ofload") == (
        "ERROR: --to zero2_ofload: no such launch preset\n"
        f"  Hint: did you mean zero2_offload? presets in config/launch: {known}"
    )


def test_another_folder_than_the_projects_is_refused(project: Path) -> None:
    """Nothing lies where the paths say."""
    (project / "Snakefile").unlink()
    assert refusal() == (
        f"ERROR: {project}: no Snakefile here\n  Hint: call it in the folder of the project"
    )


def test_a_finished_run_is_refused() -> None:
    """There is no end for a new phase to take over; the lines to append are shown."""
    finish("plain", 300)
    finish("large", 700)
    assert refusal() == (
        "ERROR: config/flowers.yaml: the run flowers is finished: large ended at step 700\n"
        "  Hint: append a phase with a later end to config/flowers.yaml, and `snakemake --cores "
        "all train --configfile config/flowers.yaml` trains its steps alone:\n"
        "    - name: more\n      until: 1050\n      launch: PRESET"
    )


def test_a_phase_without_a_checkpoint_is_refused() -> None:
    """As when memory ran out at the first step: the launch can simply be changed."""
    finish("plain", 300)
    assert refusal() == (
        "ERROR: flowers/large: nothing has been saved that could be cut off\n"
        "  Hint: change its `launch:` in config/flowers.yaml and start again with `snakemake "
        "--cores all train --configfile config/flowers.yaml`: nothing is lost"
    )
    publish_checkpoint(Path("results/flowers/large/progress.stale-1/step-00000400"), 400)
    assert refusal().endswith(
        "nothing is lost; `zerotrain progress accept flowers/large` takes set-aside progress back"
    )


@pytest.mark.parametrize(
    ("saved", "published", "name", "until"),
    [
        ({"plain": [100]}, {}, "plain", 300),
        ({"plain": [300], "large": [400]}, {"plain": 300}, "large", 700),
        # `until` was raised after the phase had ended, and the next one has progress of before.
        ({"plain": [200, 250], "large": [400]}, {"plain": 200}, "plain", 300),
        # What came before the phase that trained last was removed to save disk space.
        ({"large": [400]}, {}, "large", 700),
        ({}, {"plain": 300}, "large", 700),
    ],
)
def test_the_phase_that_trained_last_is_cut(saved, published, name, until) -> None:
    """The first that is not finished for its present `until` and has progress."""
    for phase, steps in saved.items():
        save(phase, *steps)
    for phase, step in published.items():
        finish(phase, step)
    file = Path("config/flowers.yaml")
    phase, found = switch_point.unfinished_phase(read_config(file), file)
    assert (phase.name, found) == (name, until)


def test_an_epoch_of_text_has_the_rows_of_the_cache(project: Path) -> None:
    """Which may be packed: the dataset does not tell how many there are."""
    file = project / "config/talk.yaml"
    file.write_text(
        "{run: talk, family: causal_lm, base: nano, data: {source: sums}, "
        "train: {max_length: 64, packing: true, global_batch_size: 4}, "
        "phases: [{name: a, until: 3 epochs}]}"
    )
    cache = project / "results/data/talk/cache/64"
    artifact.publish_manifest(cache, "cache", {"modality": "text", "epoch_size": 20})
    phase, until = switch_point.unfinished_phase(read_config(file), file)
    assert (phase.name, until) == ("a", 15)


def choose(at: str) -> int:
    """Choose a step of flowers/plain."""
    file = Path("config/flowers.yaml")
    config = read_config(file)
    return switch_point.choose_step(config, config.phases[0], at, 300, file)


def test_the_newest_checkpoint_is_taken_or_the_one_that_is_named() -> None:
    """Of a time when `until` was higher there may be later ones."""
    save("plain", 100, 200, 400)
    assert choose("last") == 200
    assert choose("100") == 100
    for at in ("150", "400", "first"):
        assert refusal(at=at) == (
            f"ERROR: --at {at}: no such step is saved of flowers/plain\n"
            "  Hint: saved: 100, 200; or `last`"
        )


def test_a_damaged_checkpoint_is_passed_over(capfd: pytest.CaptureFixture[str]) -> None:
    """Of itself with `last`, and refused where it is named; without a whole one there is none."""
    progress = save("plain", 100, 200)
    tensors = progress / "step-00000200/rank-00000-00000.safetensors"
    tensors.write_bytes(b"x" + tensors.read_bytes()[1:])
    assert choose("last") == 100
    said = capfd.readouterr().err
    assert said.startswith(f"{tensors}: sha256 ")
    assert said.endswith("; the checkpoint before it is taken\n")
    assert refusal(at="200").endswith("  Hint: choose another; saved: 100, 200")
    (progress / "step-00000100/checkpoint.json").unlink()
    assert refusal().startswith("ERROR: flowers/plain: no checkpoint is whole\n")


def test_a_phase_that_is_trained_to_its_end_is_refused() -> None:
    """A phase of no steps would follow."""
    save("plain", 200, 300)
    assert refusal() == (
        "ERROR: flowers/plain is trained to its end, step 300; it is not published yet\n"
        "  Hint: `snakemake --cores all train --configfile config/flowers.yaml` publishes it; to "
        "continue after it with another launch, append a phase to config/flowers.yaml, or cut it "
        "earlier: --at 200"
    )


def test_a_phase_at_its_end_whose_launch_was_changed_is_refused() -> None:
    """Training refuses to publish it, so the values to write back are named."""
    save("plain", 300, preset="zero1", mixed_precision="no", global_batch_size=8)
    assert refusal() == (
        "ERROR: flowers/plain is trained to its end, step 300; it is not published yet\n"
        "  Hint: it was trained under another launch than it has now: write the former one back in "
        "config/flowers.yaml (preset: zero1, global_batch_size: 8), and append a phase with a "
        "later end under the new one"
    )
    save("plain", 200)
    assert refusal().endswith("under the new one, or cut it earlier: --at 200")


def test_a_switch_to_what_it_is_under_is_refused() -> None:
    """It would be none."""
    save("plain", 200)
    assert refusal(to="torch").startswith("ERROR: flowers/plain trains under torch already\n")


def test_a_new_phase_that_is_not_valid_is_refused() -> None:
    """Before anything is written: a name that stands already, a preset that needs a folder."""
    save("plain", 200)
    assert (
        "with the new phase large, config/flowers.yaml: phases: the name 'large' stands twice"
        in (refusal(name="large"))
    )
    assert refusal(to="zero3_nvme").endswith(
        "  Hint: name the folder with --offload-path; config/flowers.yaml is as it was"
    )


def test_a_running_training_is_asked_to_stop(capfd: pytest.CaptureFixture[str]) -> None:
    """Once it has ended, the lock is free; the user reads whom we wait for."""
    progress = save("plain", 100)
    with start_training(progress) as child:
        assert stop_training(progress, 60)
        assert child.wait() == 0
    assert read_owner(progress) is None
    assert capfd.readouterr().err == (
        f"{progress}: pid {child.pid} on {socket.gethostname()} trains here; it is asked to stop "
        "after its step, with a checkpoint\n"
    )
    assert not stop_training(progress, 60)


def test_a_training_that_does_not_stop_is_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line every ten seconds; in the end the switch is refused, and nothing is changed."""
    progress = save("plain", 100)
    clock = iter(range(0, 1000, 6))
    with start_training(progress, "deaf") as child:
        monkeypatch.setattr(stop.time, "monotonic", lambda: next(clock))
        host = socket.gethostname()
        assert refusal(wait=30.0) == (
            f"ERROR: {progress}: pid {child.pid} on {host} still runs after 30 s; newest "
            "checkpoint: step 100; the configuration is as it was\n"
            "  Hint: it stops after its present step: call this again then, or with a longer --wait"
        )
        monkeypatch.undo()
        child.kill()
    told = f"waiting for pid {child.pid}; newest checkpoint: step 100\n"
    assert capfd.readouterr().err.count(told) == 2


def test_a_dry_run_and_a_refusal_stop_nothing() -> None:
    """A training that runs continues where a switch cannot succeed or is not meant."""
    progress = save("plain", 100)
    with start_training(progress) as child:
        said = switch.switch(SwitchOptions("flowers", "zero2", dry_run=True))
        assert said.splitlines()[-5:] == [
            "-  - {name: plain, until: 300, launch: torch, global_batch_size: 4}",
            "+  - {name: plain, until: 100, launch: torch, global_batch_size: 4}",
            "+  - {name: plain-zero2, until: 300, launch: zero2, global_batch_size: 4}",
            "   - {name: large, until: 700, launch: zero2_offload}",
            "snakemake --cores all --configfile config/flowers.yaml -- "
            "results/flowers/plain/state/manifest.json "
            "results/flowers/plain/weights/manifest.json: render_launch, train_phase, "
            "export_weights",
        ]
        assert Path("config/flowers.yaml").read_text(encoding="utf-8") == CONFIG
        refusal(to="torch")
        refusal(to="zero3_nvme")
        refusal(at="50")
        assert not (progress / "stop").exists()
        assert child.poll() is None
        (progress / "stop").touch()


def test_a_dry_run_says_what_snakemake_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer, not what a cut usually needs."""
    save("plain", 100)
    for jobs, said in (
        ({"train_phase": 1, "export_weights": 1}, "train_phase, export_weights"),
        ({}, "nothing to be done"),
    ):
        monkeypatch.setattr(reruns, "count_jobs", lambda runs, targets, jobs=jobs: jobs)
        done = switch.switch(SwitchOptions("flowers", "zero2", dry_run=True))
        assert done.endswith(f"plain/weights/manifest.json: {said}")


@pytest.mark.parametrize("failure", [PipelineError("no", hint="none"), KeyboardInterrupt()])
def test_a_switch_that_fails_accepts_nothing(monkeypatch, failure) -> None:
    """--accept holds for what the switch starts alone, and for these values: a killed one leaves
    nothing that accepts more. While Snakemake runs, no process holds the progress."""
    make_inputs()
    progress = save("plain", 100)
    config = read_config(Path("config/flowers.yaml"))
    accepted = artifact.digest(switch_checks.read_present(config, config.phases[0]).trains)
    found = []

    def make(config: Path, targets: list[str]) -> None:
        found.append(os.environ.get(set_aside.ENVIRONMENT))
        assert read_owner(progress) is None
        if len(found) == 2:
            raise failure
        export("plain", 100)

    monkeypatch.setattr(snakemake, "make", make)
    with pytest.raises(type(failure)):
        switch.switch(SwitchOptions("flowers", "zero2", accept=True))
    assert found == [None, accepted]
    assert set_aside.ENVIRONMENT not in os.environ
    assert Path("config/flowers.yaml").read_text(encoding="utf-8") == CONFIG
    assert read_owner(progress) is None
    assert not list(progress.glob("*.json"))

    switch.switch(SwitchOptions("flowers", "zero2", accept=True))
    assert found[2:] == [None, accepted]


def test_progress_of_other_making_is_refused() -> None:
    """Training would set it aside and restart: what differs is named, with both values."""
    make_inputs()
    config = read_config(Path("config/flowers.yaml"))
    progress = save("plain", 100)
    present = switch_checks.read_present(config, config.phases[0]).trains
    newest = step_folder(progress, 100)
    publish_checkpoint(newest, 100, trains=present)
    switch_checks.check_same_launch(config, config.phases[0])
    publish_checkpoint(newest, 100, trains={**present, "learning_rate": 7})
    said = refusals.refusal(switch_checks.check_same_launch, config, config.phases[0])
    assert said.startswith(f"ERROR: {progress}: was trained with other values than plain has now (")
    assert "learning_rate" in said
    assert "undo the change; or continue from these checkpoints in spite of it with" in said
    artifact.write_json(progress / set_aside.ACCEPTED, {"trains": present})
    switch_checks.check_same_launch(config, config.phases[0])
