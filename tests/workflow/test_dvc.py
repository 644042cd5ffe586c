"""dvc.yaml: generated from configurations, short enough to read; what is the user's stays."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from PIL import Image
from tests.builders.git import init_repository
from tests.builders.refusals import refused
from tests.builders.runs import make_config
from tests.workflow.conftest import CONFIG as TEXT

from zerotrain.config.stage_settings import SETTINGS
from zerotrain.evaluation.results import write_csv, write_memory, write_metrics, write_validations
from zerotrain.graph.dvc.pipeline import VERSIONS, generate, pipeline, plots_of

ROOT = Path(__file__).parents[2]
CONFIG = Path("config/config.yaml")
FIELDS = {
    "Training loss": "loss",
    "Validation loss": "dvc_inferred_y_value",
    "Held-out loss of each phase": "val_loss",
}
"""What each plot draws; DVC puts several columns into one."""
MOST_LINES = 80


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration of two phases over the images of the folder photos."""
    monkeypatch.chdir(tmp_path)
    write(CONFIG)
    Path("photos").mkdir()
    return tmp_path


def write(config: Path, *edits: tuple[str, str]) -> None:
    """A configuration with some texts replaced."""
    text = TEXT.format(base="nano")
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    config.parent.mkdir(exist_ok=True)
    config.write_text(text, encoding="utf-8")


def keys(stage: dict, config: Path = CONFIG) -> list[str] | None:
    """The keys of the configuration that are a stage's parameters; None: all."""
    of_config, of_versions = stage["params"]
    assert list(of_versions) == [VERSIONS]
    return of_config[str(config)]


def test_dvc_yaml_is_what_is_generated(generated, tmp_path: Path) -> None:
    """It is generated from the configuration of the example, and short enough to read."""
    generate(CONFIG, tmp_path / "dvc.yaml")
    text = (tmp_path / "dvc.yaml").read_text()
    generated(Path("dvc.yaml"), text)
    assert len(text.splitlines()) <= MOST_LINES


def test_stages_are_the_folders_of_results(here: Path) -> None:
    """Each is named after its folder, and asks Snakemake for all that it lists."""
    stages = pipeline(CONFIG)["stages"]
    assert list(stages) == [
        *("data-tiny", "tiny-base", "data-tiny-cache-64", "tiny-plain", "tiny-offload"),
        "tiny-report",
    ]
    kept = {"persist": True}
    assert stages["data-tiny"]["deps"] == ["photos"]
    assert keys(stages["data-tiny"]) == ["data"]
    assert stages["data-tiny"]["outs"] == [
        {f"results/data/tiny/{name}": kept} for name in ("manifest.json", "samples")
    ]
    # A preset that is built stays as it is when its dataset is edited.
    assert "deps" not in stages["tiny-base"]
    assert stages["tiny-base"]["outs"] == [{"results/tiny/base": kept}]
    assert stages["data-tiny-cache-64"]["deps"] == [
        "results/data/tiny/manifest.json", "results/tiny/base/manifest.json",
    ]  # fmt: skip
    offload = stages["tiny-offload"]
    assert offload["deps"] == [
        "results/data/tiny/manifest.json",
        "results/data/tiny/cache/64/manifest.json",
        "results/tiny/base/manifest.json",
        "results/tiny/plain/state/manifest.json",
        "config/launch/zero2_offload.yaml",
    ]
    folders = [
        f"results/tiny/offload/{name}"
        for name in ("launch", "checkpoint", "weights", "state", "evaluation")
    ]
    assert offload["outs"] == [{folder: kept} for folder in folders]
    assert offload["metrics"] == [{"results/tiny/offload/metrics.json": kept}]
    words = shlex.split(offload["cmd"])
    assert words[:3] == ["snakemake", "--cores", "all"]
    made = [*(f"{folder}/manifest.json" for folder in folders), "results/tiny/offload/metrics.json"]
    assert words[3:] == made
    assert stages["tiny-report"]["cmd"] == "snakemake --cores all train"


def test_parameters_are_keys_that_the_file_sets(here: Path) -> None:
    """Of phases those up to the stage's own; the last stage takes the whole file, so that DVC
    misses no key that is added."""
    stages = pipeline(CONFIG)["stages"]
    threads = "launch.num_cpu_threads_per_process"
    assert keys(stages["tiny-base"]) == ["base", threads, "seed", "train.resolution"]
    assert keys(stages["data-tiny-cache-64"]) == [threads]
    of_run = ["evaluate", "export", "launch"]
    assert keys(stages["tiny-plain"]) == [*of_run, "phases.0", "seed", "train"]
    assert keys(stages["tiny-offload"]) == [*of_run, "phases.0", "phases.1", "seed", "train"]
    assert keys(stages["tiny-report"]) is None
    write(
        CONFIG, ("seed: 1", "seed: 1\nfamily: sd3\ncache: {dtype: fp16, max_sequence_length: 64}")
    )
    stages = pipeline(CONFIG)["stages"]
    assert keys(stages["data-tiny-cache-64"]) == ["cache", "family", threads]
    assert "cache.max_sequence_length" in (keys(stages["tiny-plain"]) or [])


def test_every_setting_of_a_stage_has_its_key(here: Path) -> None:
    """A recorded value of any stage is below a key of the configuration."""
    from zerotrain.config.run import RunConfig
    from zerotrain.graph.dvc.pipeline import SPREAD

    for settings in SETTINGS.values():
        for path in settings.paths(recorded=True).values():
            for key in SPREAD.get(path, (path,)):
                assert key.partition(".")[0] in RunConfig.model_fields


def test_a_base_of_links_is_not_stored(here: Path) -> None:
    """DVC would make the user's own files read-only; a base of copies is stored as a whole."""
    Path("model").mkdir()
    for how, out in (
        ("link", {"results/tiny/base/manifest.json": {"persist": True, "cache": False}}),
        ("copy", {"results/tiny/base": {"persist": True}}),
    ):
        write(CONFIG, ("base: nano", f"base: model\nbase_copy: {how}"))
        stage = pipeline(CONFIG)["stages"]["tiny-base"]
        assert stage["outs"] == [out]
        assert stage["deps"] == ["model"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("images: photos", ["photos"]),
        ("images: photos\n  conditioning_images: [before, photos/depth]",
         ["photos", "before", "photos/depth"]),
        ("images: /elsewhere/photos", ["/elsewhere/photos"]),
    ],
)  # fmt: skip
def test_a_users_folder_stands_for_its_files(here: Path, data: str, expected: list[str]) -> None:
    """So that DVC notices a new one; a folder outside of the project keeps its place."""
    family = "flux" if "conditioning" in data else "sdxl"
    write(CONFIG, ("images: photos", data), ("seed: 1", f"seed: 1\nfamily: {family}"))
    assert pipeline(CONFIG)["stages"]["data-tiny"]["deps"] == expected


def test_runs_share_a_dataset_and_a_file(here: Path) -> None:
    """Runs that one file plans: a dataset, a cache and a base for it once, called with that file;
    each run's own keys are those of its own file."""
    for name in ("a", "b"):
        write(Path(f"config/{name}.yaml"), ("run: tiny", f"run: {name}"),
              ("  images: photos", "  name: cats\n  images: photos"))  # fmt: skip
    both = Path("config/both.yaml")
    both.write_text("runs: [config/a.yaml, config/b.yaml]\n", encoding="utf-8")
    stages = pipeline(both)["stages"]
    assert sorted(stages) == sorted(
        ["data-cats", "data-cats-base", "data-cats-cache-64"]
        + [f"{run}-{part}" for run in "ab" for part in ("base", "plain", "offload", "report")]
    )
    for name, stage in stages.items():
        assert shlex.split(stage["cmd"])[-2:] == ["--configfile", str(both)]
        assert "config/b.yaml" in stage["params"][0] or not name.startswith("b-")


def test_other_stages_stay(here: Path) -> None:
    """Those of the user and of other configurations; a phase that is gone takes its stage along."""
    other = Path("config/other.yaml")
    write(other, ("run: tiny", "run: other"))
    own = {"cmd": "echo don't", "deps": ["photos"]}
    plot = {"mine.csv": {"x": "step"}}
    Path("dvc.yaml").write_text(
        yaml.safe_dump({"vars": [{"a": 1}], "stages": {"mine": own}, "plots": [plot]}),
        encoding="utf-8",
    )
    for config in (CONFIG, other, CONFIG):
        generate(config)
    made = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))
    expected = [*pipeline(CONFIG)["stages"], "mine", *pipeline(other)["stages"]]
    assert sorted(made["stages"]) == sorted(expected)
    assert (made["stages"]["mine"], made["vars"]) == (own, [{"a": 1}])
    assert plot in made["plots"]
    assert len(made["plots"]) == len(pipeline(CONFIG)["plots"]) * 2 + 1
    phase = "  - name: offload\n    until: 700\n    launch: zero2_offload\n"
    write(CONFIG, (phase, ""))
    generate(CONFIG)
    made = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))
    assert sorted(made["stages"]) == sorted(one for one in expected if one != "tiny-offload")


def test_two_stages_of_one_name_are_refused(here: Path) -> None:
    """A run and a phase whose names together are those of another run."""
    write(Path("config/a.yaml"), ("run: tiny", "run: a"), ("name: plain", "name: b-c"))
    write(Path("config/b.yaml"), ("run: tiny", "run: a-b"), ("name: plain", "name: c"))
    both = Path("config/both.yaml")
    both.write_text("runs: [config/a.yaml, config/b.yaml]\n", encoding="utf-8")
    assert "two stages of dvc.yaml would have the name a-b-c" in refused(pipeline, both).what


def test_dvc_reads_what_is_generated(here: Path) -> None:
    """Its own command lists the stages of each shipped recipe of small models, and the plots name
    files below their outputs."""

    def must(*words: str) -> str:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    must("git", "init", "-q", ".")
    must("dvc", "init", "-q")
    recipes = [Path("config") / f"{name}.yaml" for name in ("config", "sums", "sd3-digits")]
    shutil.copytree(ROOT / "config", "config", dirs_exist_ok=True)
    for recipe in recipes:
        generate(recipe)
    made = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))
    listed = [line.split()[0] for line in must("dvc", "stage", "list").splitlines()]
    assert listed == list(made["stages"])
    outs = {next(iter(out)) for stage in made["stages"].values() for out in stage["outs"]}
    for plot in made["plots"]:
        for name, plotted in plot.items():
            for file in plotted["y"] if plotted else [name]:
                assert {str(folder) for folder in Path(file).parents} & outs


@pytest.mark.slow
def test_plots_of_two_revisions_have_curves_and_metrics_of_each_phase(tmp_path, monkeypatch):
    """A real `dvc plots diff` draws the losses of both, and the metrics of each phase."""
    monkeypatch.chdir(tmp_path)

    def must(*words: str) -> str:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def evaluate(shift: float) -> None:
        log: list[dict[str, object]] = []
        for step, phase in ((10, "plain"), (20, "offload")):
            log.append({"phase": phase, "step": step, "loss": 1 / step + shift})
            validations = [{"phase": "plain", "step": 5, "val_loss": 2 + shift, "val_loss_ema": 3}]
            folder = Path("results/r", phase, "evaluation")
            (folder / "records").mkdir(parents=True, exist_ok=True)
            write_csv(log, folder / "loss.csv")
            write_memory([{**line, "host_bytes": 1} for line in log], folder / "records/memory.csv")
            write_validations(validations, folder / "validation.csv")
            measured = {"step": step, "train_loss": 0.5, "val_loss": step + shift, "other": None}
            write_metrics(phase, measured, folder / "metrics.csv")
            Image.new("L", (8, 8)).save(folder / "grid.png")

    run = make_config(
        data={"images": "photos", "holdout": 0.5}, train={"use_ema": True}, validation={},
        phases=[{"name": "plain", "until": 10}, {"name": "offload", "until": 20}],
    )  # fmt: skip
    Path("dvc.yaml").write_text(yaml.safe_dump({"plots": plots_of(run)}), encoding="utf-8")
    init_repository(must)
    must("dvc", "init", "-q")
    evaluate(0.0)
    must("git", "add", "-A")
    must("git", "commit", "-qm", "first")
    evaluate(0.25)
    made = json.loads(must("dvc", "plots", "diff", "HEAD", "--json"))
    assert "errors" not in made

    def drawn(title: str) -> set[tuple[str, str, float]]:
        [plot] = made["data"][title]
        rows, field = plot["content"].pop("data")["values"], FIELDS[title]
        assert f'"field": "{field}"' in json.dumps(plot["content"])
        return {(row["rev"], row["phase"], float(row[field])) for row in rows}

    assert drawn("Training loss") == {
        ("HEAD", "plain", 0.1), ("HEAD", "offload", 0.05),
        ("workspace", "plain", 0.35), ("workspace", "offload", 0.3),
    }  # fmt: skip
    assert drawn("Validation loss") == {
        (rev, "plain", loss)
        for rev, own in (("HEAD", 2.0), ("workspace", 2.25))
        for loss in (own, 3)
    }
    assert drawn("Held-out loss of each phase") == {
        ("HEAD", "plain", 10.0), ("HEAD", "offload", 20.0),
        ("workspace", "plain", 10.25), ("workspace", "offload", 20.25),
    }  # fmt: skip
    grids = [name for name in made["data"] if name.endswith("grid.png")]
    assert len(grids) == 2
