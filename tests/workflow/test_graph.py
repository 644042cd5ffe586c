"""The graph: what is asked for is made once, and an edit reruns exactly what depends on it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tests.conftest import ROOT

from zerotrain.config import read_config
from zerotrain.errors import EXIT_USER_ERROR

EVERYTHING = {
    "prepare_dataset": 1,
    "build_base": 1,
    "cache_latents": 1,
    "render_launch": 2,
    "train_phase": 2,
    "export_weights": 2,
    "evaluate": 2,
    "report": 1,
}
NOTHING: dict[str, int] = {}
FROM_LAUNCH = {
    name: EVERYTHING[name]
    for name in ("render_launch", "train_phase", "export_weights", "evaluate", "report")
}
FROM_TRAINING = {name: count for name, count in FROM_LAUNCH.items() if name != "render_launch"}
ONE_PHASE = dict.fromkeys(FROM_LAUNCH, 1)
EVALUATIONS = {"evaluate": 2, "report": 1}
CONFIG = "config/config.yaml"

TARGETS = {
    "all": EVERYTHING,
    "train": EVERYTHING,
    "report": EVERYTHING,
    "dataset": {"prepare_dataset": 1},
    "prepare_dataset": {"prepare_dataset": 1},
    "base": {"prepare_dataset": 1, "build_base": 1},
    "build_base": {"prepare_dataset": 1, "build_base": 1},
    "cache": {"prepare_dataset": 1, "build_base": 1, "cache_latents": 1},
    # ZeRO's buckets are fitted to the base model.
    "launch": {"prepare_dataset": 1, "build_base": 1, "render_launch": 2},
    # The second phase starts from the exported state of the first.
    "checkpoints": EVERYTHING | {"export_weights": 1, "evaluate": 0, "report": 0},
    "weights": EVERYTHING | {"evaluate": 0, "report": 0},
    "evaluation": EVERYTHING | {"report": 0},
}


def without_zeros(jobs):
    """Jobs that run at least once."""
    return {name: count for name, count in jobs.items() if count}


@pytest.mark.parametrize("target", TARGETS)
def test_graph_target_makes_exactly_what_it_needs(project, target):
    """From nothing, each target asks for what it needs, once, and for nothing beside it."""
    assert project.planned(target) == without_zeros(TARGETS[target])


def test_graph_default_target_is_everything_and_a_second_run_does_nothing(project):
    """`snakemake` without a target makes everything, once; after that, no target has work left."""
    assert project.planned() == EVERYTHING
    project.build()
    ran = project.calls()
    assert {name: ran.count(name) for name in ran} == EVERYTHING
    assert project.planned() == NOTHING
    assert project.planned("train") == NOTHING
    again = project.snakemake("--cores", "2", "train")
    assert "Nothing to be done" in again.stdout
    assert project.calls() == []


def replace(name: str, old: str, new: str) -> Callable:
    """An edit of a file."""
    return lambda project: project.edit(name, old, new)


def config(old: str, new: str) -> Callable:
    """An edit of the configuration."""
    return replace(CONFIG, old, new)


def source(module: str) -> Callable:
    """An edit of a source file that changes what it does."""
    return lambda project: project.append(f"workflow/zerotrain/{module}", "\nEDITED = 1\n")


def rewrite(name: str, text: str) -> Callable:
    """New content for a file, there or not."""
    return lambda project: (project.folder / name).write_text(text)


def remove(name: str) -> Callable:
    """A file is gone."""
    return lambda project: (project.folder / name).unlink()


APPENDED = "launch: zero2_offload\n  - {name: third, until: 900, launch: torch}\n"
EDITS = {
    "a caption": (rewrite("photos/cat.txt", "a cat that sleeps\n"), EVERYTHING),
    "an image": (rewrite("photos/cat.png", "other pixels"), EVERYTHING),
    "an added image": (rewrite("photos/cow.png", "pixels of a cow"), EVERYTHING),
    "a removed caption": (remove("photos/cat.txt"), EVERYTHING),
    "data.repeats": (config("num_workers: 1", "num_workers: 1\n  repeats: 2"), EVERYTHING),
    "seed": (config("seed: 1", "seed: 2"), EVERYTHING | {"prepare_dataset": 0, "cache_latents": 1}),
    "train.learning_rate": (config("1.0e-3", "2.0e-3"), FROM_LAUNCH),
    # The second phase starts from the first one's state.
    "train.learning_rate of the first phase": (
        config("until: 300", "until: 300\n    learning_rate: 2.0e-3"),
        FROM_LAUNCH,
    ),
    "train.learning_rate of the last phase": (
        config("until: 700", "until: 700\n    learning_rate: 2.0e-3"),
        ONE_PHASE,
    ),
    "until of the last phase": (config("until: 700", "until: 800"), ONE_PHASE),
    "until of the first phase": (config("until: 300", "until: 400"), FROM_LAUNCH),
    "an appended phase": (config("launch: zero2_offload\n", APPENDED), ONE_PHASE),
    "resolution of the last phase": (
        config("until: 700", "until: 700\n    resolution: 128"),
        ONE_PHASE | {"cache_latents": 1},
    ),
    "auto for the last phase": (config("launch: zero2_offload", "launch: auto"), ONE_PHASE),
    "launch of the last phase": (config("launch: zero2_offload", "launch: torch"), ONE_PHASE),
    "a preset that one phase names": (
        replace("config/launch/zero2_offload.yaml", "stage: 2", "stage: 1"),
        ONE_PHASE,
    ),
    "a preset that no phase names": (rewrite("config/launch/zero3.yaml", "engine: x"), NOTHING),
    "cache.dtype": (
        config("export:", "cache: {dtype: bf16}\nexport:"),
        FROM_TRAINING | {"cache_latents": 1},
    ),
    # The first phase's state lies beside its weights, so the second phase is looked at again.
    "export.dtype": (
        config("dtype: fp32", "dtype: bf16"),
        {"export_weights": 2, "train_phase": 1, "evaluate": 2, "report": 1},
    ),
    "evaluate.guidance_scale": (config("guidance_scale: 3.0", "guidance_scale: 2.0"), EVALUATIONS),
    "data.num_workers": (config("num_workers: 1", "num_workers: 3"), NOTHING),
    "a comment in the config": (config("# Two phases", "# Twice"), NOTHING),
    "a value written otherwise": (config("1.0e-3", "0.001"), NOTHING),
    "a default written out": (config("seed: 1", "seed: 1\nfamily: sdxl"), NOTHING),
    "stages/prepare_dataset.py": (source("stages/prepare_dataset.py"), EVERYTHING),
    "stages/render_launch.py": (source("stages/render_launch.py"), FROM_LAUNCH),
    "stages/evaluate.py": (source("stages/evaluate.py"), EVALUATIONS),
    "stages/report.py": (source("stages/report.py"), {"report": 1}),
    "training/loop.py": (source("training/loop.py"), FROM_TRAINING),
    "training/zero_engine.py": (source("training/zero_engine.py"), FROM_TRAINING),
    "families/sdxl.py": (
        source("families/sdxl.py"),
        FROM_TRAINING | {"build_base": 1, "cache_latents": 1, "render_launch": 1},
    ),
    "artifact/manifest.py": (source("artifact/manifest.py"), EVERYTHING),
    "cli/stages.py": (source("cli/stages.py"), NOTHING),
    "new.py": (source("new.py"), NOTHING),
    "dvc.py": (source("dvc.py"), NOTHING),
}


@pytest.mark.parametrize("edit", EDITS)
def test_graph_edit_reruns_exactly_what_depends_on_it(built, edit):
    """After an edit, the jobs that depend on it are listed, and no others."""
    change, expected = EDITS[edit]
    change(built)
    assert built.planned("train") == without_zeros(expected)


@pytest.mark.parametrize("edit", ["a caption", "an added image"])
def test_graph_dataset_edit_leaves_a_base_from_a_folder_alone(built_on_folder, edit):
    """A real base model does not depend on the dataset: it is not taken in again."""
    EDITS[edit][0](built_on_folder)
    assert built_on_folder.planned("train") == without_zeros(EVERYTHING | {"build_base": 0})


def test_graph_base_folder_edit_reruns_all_but_the_dataset(built_on_folder):
    """A file of the base model's folder is an input of the run."""
    (built_on_folder.folder / "sdxl" / "unet" / "config.json").write_text('{"sample_size": 8}\n')
    expected = EVERYTHING | {"prepare_dataset": 0, "render_launch": 1}
    assert built_on_folder.planned("train") == without_zeros(expected)


def test_graph_touched_files_rerun_nothing(built_on_folder):
    """New times on inputs of equal content (a checkout, a copy) make no work."""
    for folder in ("photos", "sdxl", "config", "rules", "workflow"):
        for path in (built_on_folder.folder / folder).rglob("*"):
            path.touch()
    assert built_on_folder.planned("train") == NOTHING


def test_graph_undone_edit_reruns_nothing(built):
    """An edit that was taken back before a run makes no work."""
    built.edit(CONFIG, "until: 700", "until: 800")
    assert built.planned("train") == ONE_PHASE
    built.edit(CONFIG, "until: 800", "until: 700")
    assert built.planned("train") == NOTHING


@pytest.mark.parametrize(
    ("edit", "failing", "target", "last"),
    [
        ("a caption", "prepare_dataset", "train", "report"),
        ("cache.dtype", "cache_latents", "evaluation", "evaluate"),
        ("train.learning_rate", "render_launch", "weights", "export_weights"),
        ("export.dtype", "export_weights", "checkpoints", "train_phase"),
    ],
)
def test_graph_failed_job_is_listed_again(built, edit, failing, target, last):
    """After a job in the middle failed, the next run makes it and what follows, whichever target is
    asked for; what lay there from before does not pass for its result."""
    EDITS[edit][0](built)
    failed = built.snakemake("--cores", "2", target, FAIL=failing)
    assert failed.returncode == 1
    assert failing in built.calls()
    assert {failing, last} <= set(built.planned(target))


def test_graph_is_clean_to_snakemakes_own_linter(project):
    """`snakemake --lint` finds nothing."""
    linted = project.snakemake("--lint")
    assert linted.returncode == 0, linted.stdout
    assert "Congratulations" in linted.stdout


SHIPPED = {
    path.name: text
    for path in sorted((ROOT / "config").glob("*.yaml"))
    if "# Machine:" not in (text := path.read_text())
}
"""But for recipes, which want a user's data: test_recipes.py."""


@pytest.mark.parametrize("name", SHIPPED)
def test_graph_shipped_configuration_plans(project, name):
    """Every configuration that is shipped can be planned as it is, one training per phase."""
    shipped = SHIPPED[name]
    (project.folder / "config" / name).write_text(shipped)
    planned = project.planned("train", "--configfile", f"config/{name}")
    assert planned["train_phase"] == planned["evaluate"] == shipped.count("- name:")
    assert planned["report"] == 1


def test_graph_other_configuration_file_is_another_run(built):
    """--configfile names another run, which does not disturb the first."""
    text = (built.folder / CONFIG).read_text()
    (built.folder / "other.yaml").write_text(text.replace("run: tiny", "run: other"))
    assert built.planned("train", "--configfile", "other.yaml") == EVERYTHING
    assert built.planned("train") == NOTHING


def test_graph_other_name_of_the_configuration_file_reruns_nothing(built):
    """A renamed configuration is the same run."""
    (built.folder / CONFIG).rename(built.folder / "renamed.yaml")
    assert built.planned("train", "--configfile", "renamed.yaml") == NOTHING


def test_graph_runs_of_one_data_name_share_the_dataset(built):
    """A second run over the same data name neither prepares nor encodes the dataset again, and its
    making does not disturb the first run."""
    built.edit(CONFIG, "images: photos", "images: photos\n  name: shared")
    built.build("train")
    text = (built.folder / CONFIG).read_text()
    (built.folder / "other.yaml").write_text(text.replace("run: tiny", "run: other"))
    planned = built.planned("train", "--configfile", "other.yaml")
    assert planned == without_zeros(EVERYTHING | {"prepare_dataset": 0, "cache_latents": 0})
    built.build("train", "--configfile", "other.yaml")
    assert built.planned("train") == NOTHING


def refused(done) -> str:
    """What a refused command said, held to one ERROR with its hint."""
    assert done.returncode == EXIT_USER_ERROR, done.stdout
    assert "Traceback" not in done.stdout
    assert done.stdout.count("ERROR: ") == 1
    assert done.stdout.count("Hint: ") == 1
    return done.stdout


@pytest.mark.parametrize(
    "words", [("--config", "seed=7"), ("--configfile", CONFIG, "other.yaml")], ids=["value", "file"]
)
def test_graph_values_that_stages_would_not_see_are_refused(project, words):
    """The stages read one file; values from elsewhere are refused, not ignored."""
    (project.folder / "other.yaml").write_text("seed: 7\n")
    said = refused(project.snakemake("-n", *words))
    assert "the stages read one file and would not see them" in said
    assert "--configfile" in said


def test_graph_name_that_yaml_1_1_takes_for_true_is_a_name(project):
    """Snakemake reads `on` as true, our commands as text: a phase is called so to both."""
    project.edit(CONFIG, "name: plain", "name: on")
    assert read_config(project.folder / CONFIG).phases[0].name == "on"
    assert project.planned("train") == EVERYTHING


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("learning_rate", "learning_rat", "train.learning_rat: unknown key", "learning_rate?"),
        ("images: photos", "images: fotos", "data.images: fotos: no such folder", "give a folder"),
        ("run: tiny", "run: [", "not valid YAML", "indentation"),
        ("run: tiny", "run: a/b", "run: string should match pattern", "change run"),
    ],
)
def test_graph_mistake_in_the_configuration_is_one_sentence(project, old, new, message, hint):
    """A mistake in the configuration is an ERROR and a hint, with no traceback of Snakemake's."""
    project.edit(CONFIG, old, new)
    said = refused(project.snakemake("-n"))
    assert message in said
    assert hint in said


def test_graph_folder_called_nano_is_not_the_preset(project):
    """A preset has no files, whatever lies in the working directory."""
    before = project.planned("train")
    (project.folder / "nano").mkdir()
    (project.folder / "nano" / "a{b}.json").write_text("{}")
    assert project.planned("train") == before


def test_graph_brace_in_a_base_folder_is_one_sentence(project):
    """Snakemake would ask for the values of a wildcard that nobody wrote."""
    project.edit(CONFIG, "base: nano", "base: sdxl")
    (project.folder / "sdxl" / "a{b}.json").write_text("{}")
    said = refused(project.snakemake("-n"))
    assert "base: sdxl/a{b}.json: its name holds a brace" in said


def test_graph_works_without_an_activated_environment(project):
    """Called by its path, snakemake finds the zerotrain that lies beside it."""
    from PIL import Image

    for photo in (project.folder / "photos").glob("*.png"):
        Image.new("RGB", (64, 64)).save(photo)
    snakemake = project.environment["PATH"].split(os.pathsep)[1] + "/snakemake"
    done = project.command(snakemake, "--cores", "1", "dataset", PATH=os.defpath)
    assert done.returncode == 0, done.stdout
    assert '"kind": "dataset"' in (project.folder / "results/data/tiny/manifest.json").read_text()
    assert project.calls() == []


def test_graph_stopped_training_is_unfinished(project):
    """Exit code 85 is a job that failed: its sentence is shown without a traceback, nothing is
    published, what was saved stays, and the same command goes on from there."""
    done = project.snakemake("--cores", "2", "train", STOP="train_phase")
    assert done.returncode == 1
    said = "plain: unfinished: stopped on request at step 100 of 300"
    assert said in done.stdout
    assert "exit code 85" in done.stdout or "returned non-zero exit status 85" in done.stdout
    assert "Traceback" not in done.stdout
    phase = project.folder / "results/tiny/plain"
    assert (phase / "progress/step-00000100/manifest.json").is_file()
    assert not (phase / "checkpoint/manifest.json").exists()
    assert "export_weights" not in project.calls()
    project.build("train")
    assert project.calls().count("train_phase") == 2
    assert (phase / "progress/step-00000100/manifest.json").is_file()
