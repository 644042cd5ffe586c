"""What rules take, as functions of a job's wildcards: runs, artifacts, settings, resources."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from zerotrain.config import stage_settings
from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import (
    SETTINGS,
    BuildSettings,
    ImportSettings,
    LaunchSettings,
    PrepareSettings,
    ReportSettings,
)
from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.graph import jobs as graph_resources
from zerotrain.graph.artifacts import Artifacts, digests, files_of
from zerotrain.graph.jobs import GIB, UNKNOWN, JobInputs, JobResources, option
from zerotrain.graph.runs import Runs, config_file

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


def artifacts(*runs: RunConfig) -> Artifacts:
    """The artifacts of runs."""
    return Artifacts(Runs({f"{place}.yaml": run for place, run in enumerate(runs)}))


def inputs_of(*runs: RunConfig) -> JobInputs:
    """What rules take of runs."""
    by_file = Runs({f"{place}.yaml": run for place, run in enumerate(runs)})
    return JobInputs(by_file, Artifacts(by_file))


def test_a_phase_takes_what_comes_before_it(run) -> None:
    """Its cache by size, its preset, its base where it has buckets, and the state before it."""
    inputs = inputs_of(run())
    plain, big = Wildcards(phase="plain"), Wildcards(phase="big")
    assert inputs.manifests("train_phase", "cache")(big) == [
        "results/data/shared/cache/64/manifest.json"
    ]
    assert inputs.manifests("render_launch", "cache")(big) == []
    assert inputs.phase_preset(big) == "config/launch/zero2.yaml"
    assert inputs.manifests("render_launch", "base")(plain) == []
    assert inputs.manifests("render_launch", "base")(big) == ["results/one/base/manifest.json"]
    assert inputs.manifests("train_phase", "start")(plain) == []
    assert inputs.manifests("train_phase", "start")(big) == [
        "results/one/plain/state/manifest.json"
    ]
    assert inputs.manifests("build_base", "dataset")(plain) == ["results/data/shared/manifest.json"]
    assert inputs.settings("cache_latents")(Wildcards(size="64")) == (
        "results/data/shared/settings/cache_latents-64.json"
    )
    assert inputs.of_phases("metrics.json")(plain) == [
        "results/one/plain/metrics.json", "results/one/big/metrics.json",
    ]  # fmt: skip


def test_targets_name_the_files_of_every_run(run) -> None:
    """Datasets and caches once, phases each, or but for the last."""
    inputs = inputs_of(run(), run(run="two"))
    assert inputs.datasets() == inputs.datasets(of_presets=True)
    assert inputs.datasets() == ["results/data/shared/manifest.json"]
    assert inputs.caches() == [
        f"results/data/shared/{name}/manifest.json" for name in ("base", "cache/32", "cache/64")
    ]
    assert inputs.of_runs("report/m", "{phase}/w", phases=slice(-1)) == [
        "results/one/report/m", "results/one/plain/w", "results/two/report/m",
        "results/two/plain/w",
    ]  # fmt: skip


def test_each_artifact_is_named_with_its_inputs_settings_and_records(run) -> None:
    """Those that are made first come first; of runs that share a dataset each is named once."""
    found = artifacts(run(), run(run="two")).planned.values()
    names = [one.name for one in found]
    assert len({*names}) == len(names)
    first = ["prepare_dataset shared", "build_base one", "build_base two", "build_base shared"]
    assert names[:4] == first
    made: set[Path] = set()
    for one in found:
        assert made.issuperset(one.sources), one.name
        made.update(one.folders)
    evaluation = next(one for one in found if one.name == "evaluate two/big")
    phase = Path("results/two/big")
    assert evaluation.settings_file == phase / "settings/evaluate.json"
    assert evaluation.outputs == [phase / "evaluation/manifest.json", phase / "metrics.json"]
    assert evaluation.log == Path("results/two/logs/evaluate.big.log")
    cache = next(one for one in found if one.name == "cache_latents shared 64")
    assert cache.benchmark == Path("results/shared/benchmarks/cache_latents.64.tsv")


def test_an_external_checkpoint_is_its_files(run) -> None:
    """In their order, with an optimizer next to a file, and with the file of names."""
    for name in ("old/b", "old/a", "new/cat_000000500.safetensors", "new/optimizer.pt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    resumed = run(base="sdxl", resume_from_checkpoint={"folder": "old", "names": "names.txt"})
    own = files_of(ImportSettings.of(resumed))
    assert own == {"checkpoint": ["old/a", "old/b"], "names": ["names.txt"]}
    saved = run(base="sdxl", resume_from_checkpoint={"folder": "new/cat_000000500.safetensors"})
    assert files_of(ImportSettings.of(saved)) == {
        "checkpoint": ["new/cat_000000500.safetensors", "new/optimizer.pt"], "names": [],
    }  # fmt: skip
    assert inputs_of(resumed).manifests("train_phase", "start")(Wildcards(phase="plain")) == [
        "results/one/imported/state/manifest.json"
    ]
    Path("sdxl").mkdir()
    (Path("sdxl") / "a{b}.json").touch()
    assert files_of(BuildSettings.of(resumed)) == {"model": ["sdxl/a{b}.json"]}


def test_files_count_by_name_and_content(run) -> None:
    """Neither by time nor by folder; that of a folder that is not there is unknown."""
    settings = BuildSettings.of(run(base="sdxl"))
    assert digests(settings, Path("results/one/base")) == {"model": "unknown"}
    Path("sdxl").mkdir()
    file = Path("sdxl/model_index.json")
    file.write_text("{}", encoding="utf-8")
    before = digests(settings, Path("results/one/base"))
    os.utime(file, (1, 1))
    assert digests(settings, Path("results/one/base")) == before
    file.write_text("[]", encoding="utf-8")
    assert digests(settings, Path("results/one/base")) != before


def test_a_recipe_records_the_values_of_a_runs_sections(run) -> None:
    """By their keys; without those at their defaults; of a preset alone what a real model is taken
    without."""
    preset, real = BuildSettings.of(run()), BuildSettings.of(run(base="sdxl"))
    assert preset.recorded() == {
        "family": "sdxl", "base": "nano", "base_copy": "link", "seed": 0, "train.resolution": 32,
        "launch.num_cpu_threads_per_process": 3, "rescale_betas_zero_snr": False,
    }  # fmt: skip
    assert {*preset.recorded()} - {*real.recorded()} == {"seed", "train.resolution"}
    assert ReportSettings.of(run()).recorded() == {}
    assert "name" not in PrepareSettings.of(run()).recorded()["data"]


def test_a_phase_is_recorded_without_what_comes_after_it(run) -> None:
    """With every value of it that is not the default, those of other phases too where a stage reads
    them."""
    asked = run(train={"resolution": 32, "on_change": "continue"})
    [plain] = LaunchSettings.of(run(), "plain").recorded()["phases"]
    assert (plain["name"], "on_change" in plain["train"]) == ("plain", False)
    found = LaunchSettings.of(asked, "big").recorded()["phases"]
    assert [one["train"]["on_change"] for one in found] == ["continue", "continue"]


@pytest.mark.parametrize("stage", SETTINGS)
def test_a_settings_file_gives_back_what_was_written(run, stage: str) -> None:
    """Also which values were given, which launch files name; twice the same text."""
    phase = "big" if stage in ("render_launch", "evaluate") else ""
    settings = SETTINGS[stage].of(run(), phase)
    text = stage_settings.render(stage, settings)
    path = Path("settings.json")
    path.write_text(text, encoding="utf-8")
    read, file = stage_settings.read_settings(path, stage)
    assert read == settings
    assert stage_settings.render(stage, read) == text
    assert (file.rebuild, stage_settings.read_mark(path)) == (None, None)
    other = next(one for one in SETTINGS if one != stage)
    with pytest.raises(PipelineError, match=f"has the settings of {stage}, not of {other}"):
        stage_settings.read_settings(path, other)


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
