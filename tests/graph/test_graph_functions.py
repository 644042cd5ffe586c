"""What rules take, as functions of a job's wildcards: runs, inputs, parameters, resources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.errors import EXIT_USER_ERROR
from zerotrain.pipeline.graph import resources as graph_resources
from zerotrain.pipeline.graph.inputs import JobInputs
from zerotrain.pipeline.graph.parameters import JobParameters, option
from zerotrain.pipeline.graph.resources import GIB, UNKNOWN, JobResources
from zerotrain.pipeline.graph.runs import Runs, config_file

TEXT = """
run: one
base: nano
data: {source: digits, name: shared}
train: {resolution: 32, learning_rate: 1e-3, global_batch_size: 4}
launch: {num_cpu_threads_per_process: 3}
phases:
  - {name: plain, until: 10, launch: torch}
  - {name: big, until: 20, resolution: 64, launch: {preset: zero2, num_processes: 2}}
"""


class Wildcards(dict[str, str]):
    """Wildcards as Snakemake gives them: by key and by attribute."""

    __getattr__ = dict.__getitem__


@pytest.fixture
def run() -> Callable[..., RunConfig]:
    """A run with some values set otherwise, by section."""

    def get(**changes: Any) -> RunConfig:
        values = yaml.safe_load(TEXT)
        for key, value in changes.items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
        return parse_config(values, "a.yaml")

    return get


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ends_with(message: str, capsys: pytest.CaptureFixture[str], call: Callable[[], Any]) -> None:
    """Check that a call ends the process as a mistake of the user's does."""
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert message in said
    assert "Hint: " in said


def test_one_run_is_named_by_its_rules_and_several_are_a_wildcard(run) -> None:
    """So that the rules of one run can be targets; a dataset's job is of the first run of it."""
    one = Runs({"a.yaml": run()})
    assert (one.results, one.data, one.shared) == (
        "results/one", "results/data/shared", "results/one",
    )  # fmt: skip
    assert one.of(Wildcards()).run == "one"
    two = Runs({"a.yaml": run(), "b.yaml": run(run="two")})
    assert (two.results, two.data, two.shared) == (
        "results/{run}", "results/data/{data}", "results/{data}",
    )  # fmt: skip
    assert two.of(Wildcards(run="two")).run == "two"
    assert two.of(Wildcards(data="shared")).run == "one"
    assert two.phase_of(Wildcards(run="two", phase="big")).name == "big"
    assert two.wildcards == {
        "run": "one|two", "data": "shared", "phase": "plain|big", "size": r"\d+",
    }  # fmt: skip


def test_the_file_is_the_one_that_is_named() -> None:
    """Else config/config.yaml."""
    assert config_file([]) == "config/config.yaml"
    assert config_file(["./other.yaml"]) == "other.yaml"


def test_values_of_another_place_end_snakemake(run, capsys) -> None:
    """The stages would not see them; the file as it is, and as it is parsed, is accepted."""
    Path("a.yaml").write_text(TEXT, encoding="utf-8")
    runs = Runs({"a.yaml": run()})
    as_read = yaml.safe_load(TEXT)
    runs.check_values(as_read, ["a.yaml"])
    runs.check_values(as_read | {"seed": 0}, ["a.yaml"])
    told = "seed comes from --config or a second --configfile"
    ends_with(told, capsys, lambda: runs.check_values(as_read | {"seed": 7}, ["a.yaml"]))
    told = "learning_rate comes from --config"
    ends_with(told, capsys, lambda: runs.check_values(as_read | {"learning_rate": 1}, ["a.yaml"]))
    told = "a.yaml: b.yaml comes from --config or a second --configfile"
    ends_with(told, capsys, lambda: runs.check_values(as_read, ["a.yaml", "b.yaml"]))


def test_the_base_of_a_dataset_has_one_path(run) -> None:
    """Its own once there is one; else that of the run of its name."""
    runs = Runs({"a.yaml": run()})
    own = "results/data/shared/base/manifest.json"
    assert runs.base_of_data("shared") == own
    named = Runs({"a.yaml": run(run="shared")})
    assert named.base_of_data("shared") == "results/shared/base/manifest.json"
    Path("results/data/shared/base").mkdir(parents=True)
    assert named.base_of_data("shared") == own


def test_a_phase_takes_what_comes_before_it(run) -> None:
    """Its cache by size, its preset, its base where it has buckets, and the state before it."""
    inputs = JobInputs(Runs({"a.yaml": run()}), updates=False)
    plain, big = Wildcards(phase="plain"), Wildcards(phase="big")
    assert inputs.phase_cache(big) == "results/data/shared/cache/64/manifest.json"
    assert inputs.launch_cache(big) == []
    assert inputs.phase_preset(big) == "config/launch/zero2.yaml"
    assert inputs.preset_choice(big) == []
    assert inputs.launch_base(plain) == []
    assert inputs.launch_base(big) == "results/one/base/manifest.json"
    assert inputs.phase_start(plain) == []
    assert inputs.phase_start(big) == ["results/one/plain/state/manifest.json"]
    assert inputs.base_dataset(plain) == "results/data/shared/manifest.json"
    assert inputs.base_files(plain) == []
    assert inputs.of_phases("metrics.json")(plain) == [
        "results/one/plain/metrics.json", "results/one/big/metrics.json",
    ]  # fmt: skip


def test_targets_name_the_files_of_every_run(run) -> None:
    """Datasets and caches once, phases each, or but for the last."""
    inputs = JobInputs(Runs({"a.yaml": run(), "b.yaml": run(run="two")}), updates=False)
    assert inputs.datasets() == inputs.datasets(of_presets=True)
    assert inputs.datasets() == ["results/data/shared/manifest.json"]
    assert inputs.caches() == [
        f"results/data/shared/{name}/manifest.json" for name in ("base", "cache/32", "cache/64")
    ]
    assert inputs.of_runs("report/m", "{phase}/w", phases=slice(-1)) == [
        "results/one/report/m", "results/one/plain/w", "results/two/report/m",
        "results/two/plain/w",
    ]  # fmt: skip


def test_an_external_checkpoint_is_its_files(run, capsys) -> None:
    """In their order, with an optimizer next to a file; a name that Snakemake takes for a pattern
    is refused, and so is no file."""
    resumed = run(base="sdxl", resume_from_checkpoint={"folder": "old", "names": "names.txt"})
    inputs = JobInputs(Runs({"a.yaml": resumed}), updates=False)
    jobs = Wildcards(phase="plain")
    assert inputs.phase_start(jobs) == ["results/one/imported/state/manifest.json"]
    assert inputs.names_file(jobs) == "names.txt"
    Path("old").mkdir()
    ends_with("old: no such folder", capsys, lambda: inputs.external_checkpoint(jobs))
    for name in ("b", "a"):
        (Path("old") / name).touch()
    assert inputs.external_checkpoint(jobs) == ["old/a", "old/b"]
    for name in ("cat_000000500.safetensors", "optimizer.pt"):
        (Path("new") / name).parent.mkdir(exist_ok=True)
        (Path("new") / name).touch()
    saved = run(base="sdxl", resume_from_checkpoint={"folder": "new/cat_000000500.safetensors"})
    of_file = JobInputs(Runs({"a.yaml": saved}), updates=False)
    assert of_file.external_checkpoint(jobs) == [
        "new/cat_000000500.safetensors",
        "new/optimizer.pt",
    ]
    (Path("old") / "a{b}").touch()
    ends_with("its name holds a brace", capsys, lambda: inputs.external_checkpoint(jobs))
    Path("sdxl").mkdir()
    (Path("sdxl") / "model_index.json").touch()
    assert inputs.base_files(jobs) == ["sdxl/model_index.json"]
    assert inputs.base_dataset(jobs) == []


def test_parameters_are_the_values_of_the_runs_sections(run) -> None:
    """As JSON; of a preset alone what a real model is taken without."""
    parameters = JobParameters(Runs({"a.yaml": run(), "b.yaml": run(run="two", seed=4)}))
    first, second = Wildcards(run="one", phase="plain"), Wildcards(run="two", phase="plain")
    assert parameters.config_file(second, None) == "b.yaml"
    export, base = parameters.settings("export_weights"), parameters.settings("build_base")
    assert export["lora"](first) is None
    assert export["export"](first)["dtype"] == run().export.dtype
    assert base["num_cpu_threads_per_process"](first) == 3
    assert (base["resolution"](first), base["seed"](second)) == (32, 4)
    assert parameters.settings("report") == {}
    assert [*parameters.settings("render_launch")][-1] == "max_sequence_length"
    assert "name" not in parameters.data(first)
    real = JobParameters(Runs({"a.yaml": run(base="sdxl")}))
    assert real.settings("build_base")["seed"](Wildcards()) is None


def test_a_phase_is_recorded_without_what_comes_after_it(run) -> None:
    """With every value of it, those of other phases too where a stage reads them."""
    parameters = JobParameters(Runs({"a.yaml": run()}))
    found = parameters.settings("render_launch")["phases"](Wildcards(phase="plain"))
    assert [one["name"] for one in found] == ["plain"]
    assert found[0]["train"]["on_change"] == "restart"
    asked = Runs({"a.yaml": run(train={"resolution": 32, "on_change": "continue"})})
    parameters = JobParameters(asked)
    found = parameters.settings("render_launch")["phases"](Wildcards(phase="big"))
    assert [one["train"]["on_change"] for one in found] == ["continue", "continue"]


def test_an_option_is_left_out_with_its_input() -> None:
    """A command's option for what a job may lack."""
    given = option("--start", "start")
    assert given(None, SimpleNamespace(start=[])) == ""
    assert given(None, SimpleNamespace(start="a/manifest.json")) == "--start a/manifest.json"


def workflow(
    default: list[str] | None = None, *, gres: str | None = None, remote: bool = False
) -> Any:
    """Snakemake's workflow object with what a profile sets."""
    chosen = {"train_phase": {"gres": SimpleNamespace(raw=gres)}} if gres else None
    settings = SimpleNamespace(
        default_resources=default, resources=None, overwrite_resources=chosen
    )
    return SimpleNamespace(resource_settings=settings, remote_exec=remote)


def test_threads_and_machines_are_those_of_the_launch(run) -> None:
    """A phase of several machines has a launcher on each; one of one machine wants no nodes."""
    several = {"preset": "zero2", "machines": 2, "processes_per_machine": 2}
    phases = [{"name": "plain", "until": 10, "launch": "torch"},
              {"name": "big", "until": 20, "global_batch_size": 4, "launch": several}]  # fmt: skip
    resources = JobResources(Runs({"a.yaml": run(phases=phases)}), workflow())
    plain, big = Wildcards(phase="plain"), Wildcards(phase="big")
    assert resources.stage_threads(plain) == 3
    assert [resources.phase_threads(one) for one in (plain, big)] == [3, 6]
    assert [resources.phase_gres(one) for one in (plain, big)] == ["gpu:1", "gpu:2"]
    assert [resources.machines(one) for one in (plain, big)] == [None, 2]
    assert [resources.multi_node("srun")(one) for one in (plain, big)] == [None, "srun"]
    assert [resources.minutes(60)(plain, attempt) for attempt in (1, 2, 3)] == [60, 120, 120]


def test_memory_is_forecast_where_a_profile_asks(run, monkeypatch, capsys) -> None:
    """Twice as much after a failure, but for a training that was warned of its time limit; one
    warning where it is unknown."""
    runs = Runs({"a.yaml": run()})
    plain, big = Wildcards(phase="plain"), Wildcards(phase="big")
    assert JobResources(runs, workflow()).memory("evaluate") == {}
    assert JobResources(runs, workflow(["mem_mb"], remote=True)).memory("evaluate") == {}
    asked: list[bool] = []

    def forecasts(wanted: Any) -> dict[Any, Any]:
        phases = [*wanted]
        asked.extend(cpu for *_, cpu in phases)
        known = {"bytes": {"evaluate": 5 * GIB, "train_phase": 6 * GIB, "cache_latents": GIB}}
        return {
            (one.run, phase.name, cpu): known if phase.name == "plain" else {"unknown": "no model"}
            for one, phase, cpu in phases
        }

    monkeypatch.setattr("zerotrain.launch.planner.forecasts.forecasts", forecasts)
    graph_resources._killed_before.cache_clear()
    graph_resources._warn_once.cache_clear()
    resources = JobResources(runs, workflow(["mem_mb"], gres="none"))
    evaluate, train = (resources.memory(one)["mem_mb"] for one in ("evaluate", "train_phase"))
    assert [evaluate(plain, attempt) for attempt in (1, 2, 3)] == [5120, 10240, 10240]
    assert train(plain, 1) == 6144
    progress = Path("results/one/plain/progress")
    progress.mkdir(parents=True)
    (progress / "exit.json").touch()
    assert train(plain, 2) == 6144
    (progress / "exit.json").unlink()
    assert train(plain, 3) == 12288
    assert train(big, 1) == 2 * UNKNOWN // 2**20
    assert evaluate(big, 1) == UNKNOWN // 2**20
    said = capsys.readouterr().err
    assert said.count("WARNING: run one: its memory cannot be forecast") == 1
    assert "no model" in said
    assert asked == [True, True]
    assert resources.memory("build_base")["mem_mb"](plain, 1) == 3072
