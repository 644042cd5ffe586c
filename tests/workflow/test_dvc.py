"""DVC's side of the graph: generated, runnable, and at one with Snakemake."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from PIL import Image
from tests.builders.git import init_repository
from tests.builders.runs import make_config
from tests.workflow.conftest import Project

from zerotrain.config.data import DataConfig
from zerotrain.config.run import RunConfig
from zerotrain.evaluation.curves import (
    write_csv,
    write_memory,
    write_metrics,
    write_validations,
)
from zerotrain.pipeline.dvc.jobs import workflow_of
from zerotrain.pipeline.dvc.pipeline import CONFIG_KEYS, GUARD, VERSIONS, dependencies, plots_of

CONFIG = "config/config.yaml"
EVERY_STAGE = [
    GUARD,
    "prepare_dataset",
    "build_base",
    "cache_latents-64",
    "render_launch-offload",
    "render_launch-plain",
    "train_phase-plain",
    "export_weights-plain",
    "train_phase-offload",
    "export_weights-offload",
    "evaluate-offload",
    "evaluate-plain",
    "report",
]


def stands_in(given: object, key: str) -> bool:
    """Whether a file gives the value of this name."""
    for part in key.split("."):
        if isinstance(given, list):
            given = dict(enumerate(given))
        if (
            not isinstance(given, dict)
            or (part := int(part) if part.isdigit() else part) not in given
        ):
            return False
        given = given[part]
    return True


FIELDS = {
    "Training loss": "loss",
    "Validation loss": "dvc_inferred_y_value",
    "Held-out loss of each phase": "val_loss",
}
"""What each plot draws; DVC puts several columns into one."""
COMMAND = ("python", "-m", "zerotrain", "dvc", "generate", "--output")


def generate(project: Project, output: Path, *flags: str) -> dict:
    """The stages that `zerotrain dvc generate` writes."""
    project.must(*COMMAND, str(output), *flags)
    return yaml.safe_load(output.read_text(encoding="utf-8"))["stages"]


def test_dvc_file_is_held_to_the_rules(generated, tmp_path):
    """dvc.yaml is what `zerotrain dvc generate` writes for the rules as they are."""
    subprocess.run([sys.executable, *COMMAND[1:], tmp_path / "dvc.yaml"], check=True)
    generated(Path("dvc.yaml"), (tmp_path / "dvc.yaml").read_text())


@pytest.mark.slow
def test_dvc_stages_are_the_jobs_of_the_graph(project, tmp_path):
    """One stage per job with its folder as output; a stage of a phase says which; parameters are
    keys that the configuration holds; a user's folder stands for its files."""
    stages = generate(project, tmp_path / "dvc.yaml")
    assert sorted(stages) == sorted(EVERY_STAGE)
    guard = stages.pop(GUARD)
    assert guard["params"] == [{"config/config.yaml": None}]
    given = yaml.safe_load((project.folder / "config/config.yaml").read_text())
    for name, stage in stages.items():
        rule, _, wildcard = name.partition("-")
        assert f"--allowed-rules {rule} " in stage["cmd"]
        assert "{" not in stage["desc"]
        assert not wildcard or wildcard in stage["desc"]
        for keys in stage.get("params", []):
            for key in keys.get("config/config.yaml", ()):
                assert stands_in(given, key), key
    assert stages["prepare_dataset"]["outs"] == [
        *("results/data/tiny/manifest.json", "results/data/tiny/samples")
    ]
    assert "photos" in stages["prepare_dataset"]["deps"]
    # A preset that is built stays as it is when its dataset is edited.
    assert stages["prepare_dataset"]["outs"][0] not in stages["build_base"]["deps"]
    assert not [path for path in stages["prepare_dataset"]["deps"] if path.startswith("photos/")]
    assert stages["cache_latents-64"]["outs"] == [{"results/data/tiny/cache/64": {"persist": True}}]
    assert stages["train_phase-plain"]["outs"] == [
        "results/tiny/plain/checkpoint",
        {"results/tiny/plain/progress": {"persist": True}},
    ]
    launches = [stages[f"render_launch-{name}"] for name in ("plain", "offload")]
    assert [
        [key for key in keys if key.startswith("phases")]
        for one in launches
        for keys in one["params"][0].values()
    ] == [["phases.0"], ["phases.0", "phases.1"]]
    assert stages["build_base"]["params"] == [
        {"config/config.yaml": [
            "base", "launch.num_cpu_threads_per_process", "seed", "train.resolution",
        ]},
        {VERSIONS: ["VERSIONS.build_base"]},
    ]  # fmt: skip
    assert stages["export_weights-plain"]["outs"] == [
        "results/tiny/plain/weights",
        "results/tiny/plain/state",
    ]
    assert stages["evaluate-plain"]["metrics"] == ["results/tiny/plain/metrics.json"]
    assert stages["evaluate-plain"]["params"] == [
        {"config/config.yaml": ["evaluate", "seed"]},
        {VERSIONS: ["VERSIONS.evaluate"]},
    ]


@pytest.mark.slow
def test_dvc_length_of_captions_is_a_parameter_where_auto_plans_with_it(project, tmp_path):
    project.edit(CONFIG, "seed: 1", "seed: 1\nfamily: sd3\ncache: {max_sequence_length: 64}")
    project.edit(CONFIG, "launch: zero2_offload", "launch: auto")
    stages = generate(project, tmp_path / "dvc.yaml")
    assert [
        name
        for name, stage in stages.items()
        if "cache.max_sequence_length" in str(stage.get("params"))
    ] == ["render_launch-offload"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "cache"),
    [
        ("sums", "cache_latents-32"),
        ("sd3-digits", "cache_latents-32"),
    ],
)
def test_stages_of_other_families(recipe, cache, project, tmp_path):
    """A stage depends on no source, and its parameters are the version and those of the file."""
    config = f"config/{recipe}.yaml"
    output = tmp_path / "dvc.yaml"
    stages = generate(project, output, config)
    given = yaml.safe_load((project.folder / config).read_text())
    for phase in given["phases"]:
        for kept in ("train_phase", "export_weights"):
            params = stages[f"{kept}-{phase['name']}"].get("params", [])
            assert not [one for one in params if VERSIONS in one]
        [_, version] = stages[f"evaluate-{phase['name']}"]["params"]
        assert version == {VERSIONS: ["VERSIONS.evaluate"]}
    assert stages[cache]["outs"]
    assert stages.pop(GUARD)["cmd"].endswith(f" --config {config}")
    for stage in stages.values():
        assert f"--configfile {config} " in stage["cmd"]
        for keys in stage.get("params", []):
            assert all(stands_in(given, key) for key in keys.get(config, ()))


def test_every_parameter_of_a_rule_has_its_key(project, monkeypatch):
    """A value of the configuration that a rule takes in is a parameter of its stage: no rule's
    parameter is without a key, but for those that name files and for the stage's version."""
    monkeypatch.setenv("PYTHONPATH", "")  # the Snakefile sets it, which would outlive this test
    files = {"config_file", "progress", "folders", "version"}
    with contextlib.chdir(project.folder), workflow_of(Path(CONFIG), forceall=True) as workflow:
        named = {name for job in workflow.dag.jobs for name in job.params.keys()}  # noqa: SIM118
    named = {name for name in named - files if not name.startswith("with_")}
    keys = {key for name in named for key in CONFIG_KEYS.get(name, (name,))}
    keys = {key.partition(".")[0] for key in keys}
    assert keys <= set(RunConfig.model_fields)
    assert {"data", "cache", "train", "launch", "phases", "export", "evaluate", "seed"} <= keys


@pytest.mark.slow
def test_plots_and_artifacts_name_what_the_stages_make(project, tmp_path):
    """Curves come from the last phase's evaluation, images from each one's; the weights of every
    phase are models by name."""
    generate(project, tmp_path / "dvc.yaml")
    found = yaml.safe_load((tmp_path / "dvc.yaml").read_text())
    files = {
        file
        for plot in found["plots"]
        for name, plotted in plot.items()
        for file in (plotted["y"] if plotted else [name])
    }
    outs = [out for stage in found["stages"].values() for out in stage.get("outs", ())]
    folders = {next(iter(out)) if isinstance(out, dict) else out for out in outs}
    assert {file.rpartition("/")[0].removesuffix("/records") for file in files} <= folders
    assert {one["path"] for one in found["artifacts"].values()} <= folders
    assert set(found["artifacts"]) == {"tiny-plain", "tiny-offload"}


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


@pytest.mark.parametrize(
    ("data", "files", "expected"),
    [
        ({"images": "photos"}, ["photos/a.png", "photos/b.png", "x.py"], ["photos", "x.py"]),
        (
            {"source": "text", "path": "rows"},
            ["rows/state.json", "rows/data.arrow"],
            ["rows"],
        ),
        ({"source": "text", "path": "rows.jsonl"}, ["rows.jsonl"], ["rows.jsonl"]),
        (
            {"images": "photos", "conditioning_images": ["before", "photos/depth"]},
            ["before/a.png", "photos/a.png", "photos/depth/a.png", "x.py"],
            ["before", "photos", "x.py"],
        ),
    ],
)
def test_dvc_sees_a_new_file_of_a_users_folder(data, files, expected):
    """Images of both kinds, and what save_to_disk wrote: the folder stands for what lies in it."""
    run = SimpleNamespace(data=DataConfig(**data), base="nano")
    rule = SimpleNamespace(name="evaluate")
    assert dependencies(SimpleNamespace(rule=rule, input=files, params={}), run) == expected


@pytest.mark.slow
def test_dvc_repro_builds_everything_once(project):
    """In a fresh clone `dvc repro` runs every stage once, in order, and leaves nothing to do, for
    itself and for Snakemake; afterwards an edit runs what depends on it."""
    generate(project, project.folder / "dvc.yaml")

    dvc, git = partial(project.must, "dvc"), partial(project.must, "git")
    git("init", "-q", ".")
    git("add", ".")
    assert {line.split()[0] for line in dvc("stage", "list").splitlines()} == set(EVERY_STAGE)
    assert "train_phase-offload" in dvc("dag", "--dot")
    dvc("repro", "--quiet")
    calls = [name.partition("-")[0] for name in EVERY_STAGE if name != GUARD]
    assert sorted(project.calls()) == sorted(calls)
    assert "up to date" in dvc("status")
    assert "up to date" in dvc("repro")
    assert project.calls() == []
    assert project.planned("train") == {}
    assert " results/" not in git("status", "--short")

    project.edit("config/config.yaml", "# Two phases", "# Twice")
    assert "up to date" in dvc("status")
    project.edit("config/config.yaml", "guidance_scale: 3.0", "guidance_scale: 2.0")
    dvc("repro", "--quiet")
    assert sorted(project.calls()) == ["evaluate", "evaluate", "report"]
    assert project.planned("train") == {}

    (project.folder / "photos" / "cow.png").write_bytes(b"pixels of a cow")
    assert "photos" in dvc("status", "prepare_dataset")
