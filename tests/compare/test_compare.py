"""`zerotrain compare`: what its names stand for, its numbers, and the values that differ."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from tests.builders.compared import make_log, write_phase
from tests.builders.runs import make_run

from zerotrain import artifact
from zerotrain.data.sheets import draw_grid
from zerotrain.errors import PipelineError
from zerotrain.run.compare.command import compare, find_differences, make_rows, print_comparison
from zerotrain.run.compare.sides import Facts, find_sides, read_facts

PLAIN = make_log("plain", 0, [1.0, 0.5])
OFFLOAD = [*PLAIN, {"phase": "plain", "step": 20, "val_loss": 0.6}, *make_log("offload", 20, [0.4])]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two runs of two phases and of one; the longer one is sorted by its steps."""
    monkeypatch.chdir(tmp_path)
    write_phase("cats", "plain", PLAIN)
    write_phase("cats", "offload", OFFLOAD, preset="zero2_offload", start=20, until=30)
    write_phase("dogs", "plain", make_log("plain", 0, [2.0]), learning_rate=3e-4)
    for other in ("cats/base", "cats/logs", "cats/imported/state", "data/cats/cache"):
        Path("results", other).mkdir(parents=True)
    return tmp_path


def facts(*names: str) -> list[Facts]:
    """What the sides of a command line have."""
    return [read_facts(side) for side in find_sides(names)]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["cats", "dogs"], ["cats", "dogs"]),
        (["cats"], ["cats/plain", "cats/offload"]),
        (["dogs", "results/cats/offload/state", "dogs"], ["dogs", "cats/offload"]),
        (["./results/cats/", "results/dogs"], ["cats", "dogs"]),
        (["cats.yaml", "dogs"], ["cats", "dogs"]),
        (["both.yaml"], ["cats", "dogs"]),
    ],
)  # fmt: skip
def test_a_name_a_path_and_a_configuration_stand_for_their_runs(names: list[str], found: list[str]):
    """Each once, in the order of the command line; a run alone stands for its phases in order."""
    for run, phases in (("cats", ("plain", "offload")), ("dogs", ("plain",))):
        listed = [{"name": name, "until": 10 * n} for n, name in enumerate(phases, start=1)]
        Path(f"{run}.yaml").write_text(
            json.dumps(make_run(run=run, phases=listed)), encoding="utf-8"
        )
    Path("both.yaml").write_text("runs: [cats.yaml, dogs.yaml]", encoding="utf-8")
    assert [side.name for side in find_sides(names)] == found


def test_a_run_of_another_project_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By its path, which is its name."""
    Path("here").mkdir()
    monkeypatch.chdir("here")
    write_phase("dogs", "plain", PLAIN)
    other = tmp_path / "results/dogs"
    assert [one.name for one in facts("dogs", str(other))] == ["dogs", str(other)]
    assert [one.name for one in facts("dogs", "../results/dogs")] == ["dogs", "../results/dogs"]


@pytest.mark.parametrize(
    ("names", "what", "hint"),
    [
        (["cast"], "cast: no such run or phase", "did you mean cats?"),
        (["cats/ofload"], "cats/ofload: no such", "did you mean cats/offload?"),
        (["data/cats"], "data/cats: no such", "phases here: cats/offload, cats/plain, dogs/plain"),
        (["dogs"], "dogs: one phase, and nothing", "name another run or phase"),
        (["cats/plain"], "cats/plain: one phase, and nothing", "name another run or phase"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(names: list[str], what: str, hint: str):
    """So is a single phase."""
    with pytest.raises(PipelineError) as refused:
        find_sides(names)
    assert what in refused.value.what
    assert hint in refused.value.hint


def test_the_time_of_a_run_adds_up_over_its_phases():
    """A phase alone begins at 0, and a validation has the time of the step before it."""
    run, phase = facts("cats", "cats/offload")
    assert run.curves.points("loss") == [(10, 5.0, 1.0), (20, 10.0, 0.5), (30, 15.0, 0.4)]
    assert run.curves.points("val_loss") == [(20, 10.0, 0.6)]
    assert phase.curves.points("loss") == [(30, 5.0, 0.4)]
    assert run.logged == {
        "step": 30,
        "samples": 40,
        "train_seconds": 15.0,
        "last_loss": 0.4,
        "last_val_loss": 0.6,
        "lowest_val_loss": 0.6,
    }


def differences(*names: str) -> dict[str, list[object]]:
    """The values that differ, by key."""
    return {one.key: [*one.values] for one in find_differences(facts(*names))}


def test_only_values_that_differ_are_listed():
    """Of a run, the values of its phases in order; names and equal values are left out."""
    assert differences("cats", "dogs") == {
        "preset": [["torch", "zero2_offload"], ["torch"]],
        "engine": [["torch", "deepspeed"], ["torch"]],
        "zero_stage": [[0, 2], [0]],
        "offload_optimizer": [["none", "cpu"], ["none"]],
        "start_step": [[0, 20], [0]],
        "until_step": [[20, 30], [20]],
        "learning_rate": [[1e-3], [3e-4]],
    }


def test_a_value_that_was_resolved_otherwise_differs():
    """run.yaml has the values that were resolved then; no configuration names this one."""
    file = Path("results/dogs/plain/launch/run.yaml")
    written = "nan_action: {value: stop, source: default}"
    assert written in file.read_text(encoding="utf-8")
    file.write_text(
        file.read_text(encoding="utf-8").replace(
            written, "nan_action: {value: skip, source: default}"
        ),
        encoding="utf-8",
    )
    assert differences("cats/plain", "dogs")["nan_action"] == [["stop"], ["skip"]]


def test_a_section_differs_by_its_keys_and_where_it_is_off_as_a_whole():
    """A preset's values of DeepSpeed's file are no difference to a phase without DeepSpeed."""
    lora = {"rank": 4, "alpha": 4.0}
    deepspeed = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    write_phase("a", "only", [], lora=lora, lr_scheduler_args={})
    write_phase("b", "only", [], lora={**lora, "rank": 8}, lr_scheduler_args={"power": 2.0})
    write_phase("c", "only", [], lora=None, lr_scheduler_args={}, deepspeed=deepspeed)
    assert differences("a", "b", "c") == {
        "lora": [[lora], [{**lora, "rank": 8}], [None]],
        "lora.rank": [[4], [8], None],
        "lr_scheduler_args.power": [["absent"], [2.0], ["absent"]],
    }


def evaluate(folder: Path, dataset: Path, **settings: object) -> None:
    """Publish an evaluation with these settings of the same dataset."""
    parents = {"dataset": artifact.read(dataset, "dataset")}
    with artifact.publish(folder / "evaluation", "evaluation", parents=parents) as draft:
        draft.content = {"prompts": [], "evaluate": settings}
    (folder / "metrics.json").write_text(
        json.dumps({"step": 7, "val_loss": 0.5, "train_seconds": 9.0, "forward_seconds": 2.0,
                    "peak_host_bytes": len(folder.name)})
    )  # fmt: skip


def test_metrics_of_a_run_are_those_of_its_last_phase_and_what_all_took():
    """Data and settings of the evaluations are compared, too, where they are recorded."""
    with artifact.publish(Path("results/data/cats"), "dataset") as draft:
        draft.made_by = {"data": {"holdout": 0.1}}
    dataset = Path("results/data/cats")
    evaluate(Path("results/cats/plain"), dataset, guidance_scale=3.0)
    evaluate(Path("results/cats/offload"), dataset, guidance_scale=5.0)
    run, plain, dogs = facts("cats", "cats/plain", "dogs")
    assert run.metrics == {"val_loss": 0.5, "forward_seconds": 4.0, "peak_host_bytes": 7}
    assert plain.metrics == {"val_loss": 0.5, "forward_seconds": 2.0, "peak_host_bytes": 5}
    assert dogs.metrics == {}
    assert dogs.missing == ["dogs is not evaluated yet: it has neither samples nor metrics"]
    found = differences("cats", "cats/plain", "dogs")
    assert found["evaluate.guidance_scale"] == [[5.0], [3.0], None]
    assert "data.holdout" not in found


def test_damaged_metrics_are_named():
    """A file that a full disk cut off."""
    evaluate_file = Path("results/dogs/plain/metrics.json")
    publish_samples(evaluate_file.parent, ["a dog"], "blue")
    evaluate_file.write_text('{"val_loss": 0.', encoding="utf-8")
    with pytest.raises(PipelineError, match=r"results/dogs/plain/metrics.json: not valid JSON"):
        facts("dogs", "cats")


def publish_samples(folder: Path, prompts: list[str], colour: str) -> None:
    """Publish an evaluation with a grid of one image for each prompt."""
    with artifact.publish(folder / "evaluation", "evaluation") as draft:
        rows = [[Image.new("RGB", (64, 64), colour)] for _ in prompts]
        draw_grid(prompts, rows).save(draft.folder / "grid.png")
        draft.content = {"prompts": prompts, "evaluate": {}}
    (folder / "metrics.json").write_text("{}")


def test_the_page_shows_samples_in_rows_and_needs_nothing_else(capsys):
    """A prompt that one side lacks has the other's images alone; foreign text is escaped."""
    publish_samples(Path("results/cats/plain"), ["a <script>alert(1)</script> cat", "a dog"], "red")
    publish_samples(Path("results/dogs/plain"), ["a dog"], "blue")
    compare(["cats/plain", "dogs", "cats/offload"], None, as_json=False)
    assert capsys.readouterr().out.endswith("page  results/compare.html\n")
    page = Path("results/compare.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert 'src="http' not in page
    assert "a &lt;script&gt;alert(1)&lt;/script&gt; cat" in page
    rows = re.findall(r'(?s)<div class="row".*?</h4>(.*?)(?=<div class="row"|</section>)', page)
    assert [re.findall(r"<figcaption[^>]*>([^<]*)<span", row) for row in rows] == [
        ["cats/plain", "dogs"],
        ["cats/plain"],
    ]
    assert "cats/offload is not evaluated yet" in page
    assert page.count("<picture>") == 4  # two curves, by step and by time
    assert "No side has the curve validation loss." in page


@pytest.mark.parametrize("count", [2, 5])
def test_the_table_fits_80_columns_and_is_plain_in_a_pipe(
    count: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Names and keys are not cut; sides that do not fit follow below."""
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"a-run-with-a-long-name-{n}" for n in range(count)]
    for n, name in enumerate(names):
        write_phase(name, "plain", PLAIN, disk_low_threshold=f"{n} GB")
    sides = facts(*names)
    missing = [sentence for side in sides for sentence in side.missing]
    print_comparison(names, make_rows(sides, find_differences(sides)), missing)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    joined = "".join(shown.split())
    assert all(f"{n}GB" in joined for n in range(count))
    assert joined.count("disk_low_threshold") == (1 if count == 2 else 2)


def test_json_has_the_same_numbers(capsys: pytest.CaptureFixture[str]):
    """Curves point by point: step, seconds, value."""
    compare(["cats", "dogs"], None, as_json=True)
    made = json.loads(capsys.readouterr().out)
    cats, dogs = made["sides"]
    assert cats["curves"]["loss"] == [[10, 5.0, 1.0], [20, 10.0, 0.5], [30, 15.0, 0.4]]
    assert dogs["log"] == {"step": 10, "samples": 40, "train_seconds": 5.0, "last_loss": 2.0}
    assert {"group": "phases", "key": "learning_rate", "values": [[1e-3], [3e-4]]} in (
        made["differences"]
    )
