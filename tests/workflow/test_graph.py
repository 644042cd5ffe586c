"""The graph: what is asked for is made once, and an edit reruns exactly what depends on it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter

import pytest
from tests.conftest import ROOT
from tests.workflow.conftest import ENVIRONMENT_BIN
from tests.workflow.jobs import (
    CONFIG,
    EVALUATIONS,
    EVERYTHING,
    FROM_LAUNCH,
    NOTHING,
    ONE_PHASE,
    both,
    config,
    raised,
    refused,
    remove,
    replace,
    rewrite,
    source,
    without_zeros,
)

from zerotrain.config.read import read_config
from zerotrain.errors import EXIT_USER_ERROR

FROM_TRAINING = {name: count for name, count in FROM_LAUNCH.items() if name != "render_launch"}
BUT_THE_DATASET = EVERYTHING | {"prepare_dataset": 0}
BUT_THE_BASE = EVERYTHING | {"build_base": 0}

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


def test_the_page_of_targets_lists_each_of_them():
    """docs/targets.md has a row for every rule that is a target only, in their order."""
    rows = (ROOT / "docs" / "targets.md").read_text().splitlines()
    listed = [row.split("`")[1] for row in rows if row.startswith("| `")]
    rules = (ROOT / "rules" / "targets.smk").read_text().splitlines()
    assert listed == [row.split()[1].rstrip(":") for row in rules if row.startswith("rule ")]


@pytest.mark.parametrize("target", TARGETS)
def test_graph_target_makes_exactly_what_it_needs(project, target):
    """From nothing, each target asks for what it needs, once, and for nothing else."""
    assert project.planned(target) == without_zeros(TARGETS[target])


@pytest.mark.slow
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


def touch(project) -> None:
    """Give every file of the project a new time, the results among them."""
    for path in project.folder.rglob("*"):
        if path.is_file() and ".snakemake" not in path.parts:
            path.touch()


def reverse_times(project) -> None:
    """Make what was made last the oldest."""
    results = [path for path in (project.folder / "results").rglob("*") if path.is_file()]
    for path in results:
        time = path.stat().st_mtime
        os.utime(path, (time, 2e9 - time))


APPENDED = "launch: zero2_offload\n  - {name: third, until: 900, launch: torch}\n"
EDITS = {
    "a caption": (rewrite("photos/cat.txt", "a cat that sleeps\n"), BUT_THE_BASE),
    "an image": (rewrite("photos/cat.png", "other pixels"), BUT_THE_BASE),
    "an added image": (
        both(rewrite("photos/cow.png", "pixels of a cow"), rewrite("photos/cow.txt", "a cow")),
        BUT_THE_BASE,
    ),
    "two images and a caption": (
        both(
            both(rewrite("photos/cat.png", "others"), rewrite("photos/dog.png", "others, too")),
            rewrite("photos/cat.txt", "a cat that sleeps\n"),
        ),
        BUT_THE_BASE,
    ),
    "a removed image": (both(remove("photos/cat.png"), remove("photos/cat.txt")), BUT_THE_BASE),
    "data.repeats": (config("num_workers: 1", "num_workers: 1\n  repeats: 2"), BUT_THE_BASE),
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
    "cache.dtype of a preset, written out": (
        config("export:", "cache: {dtype: fp32}\nexport:"),
        NOTHING,
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
    "version of prepare_dataset": (raised("prepare_dataset"), BUT_THE_BASE),
    # The first phase is plain PyTorch, whose launch files need no sizes of the base.
    "version of build_base": (raised("build_base"), BUT_THE_DATASET | {"render_launch": 1}),
    "version of cache_latents": (raised("cache_latents"), FROM_TRAINING | {"cache_latents": 1}),
    "version of render_launch": (raised("render_launch"), FROM_LAUNCH),
    "version of train_phase": (raised("train_phase"), NOTHING),
    "version of export_weights": (raised("export_weights"), NOTHING),
    "version of evaluate": (raised("evaluate"), EVALUATIONS),
    "version of report": (raised("report"), {"report": 1}),
    "a value and a version": (
        both(config("until: 700", "until: 800"), raised("prepare_dataset")),
        BUT_THE_BASE,
    ),
    "touch": (touch, NOTHING),
    "reversed times": (reverse_times, NOTHING),
    "sources": (
        both(source("stages/prepare_dataset.py"), source("training/loop.py")),
        NOTHING,
    ),
}


REPEATED = (
    "an image", "an added image", "two images and a caption", "data.repeats", "seed",
    "train.learning_rate of the first phase", "until of the first phase",
    "until of the last phase", "resolution of the last phase", "launch of the last phase",
    "a preset that no phase names", "cache.dtype of a preset, written out", "export.dtype",
    "data.num_workers", "a value written otherwise", "a default written out",
    "version of build_base", "version of render_launch", "version of evaluate",
    "version of report", "version of export_weights", "a value and a version",
)  # fmt: skip
"""Edits of kinds of which another is in `make test`; test_parameters.py has every value."""


@pytest.mark.parametrize(
    "edit", [pytest.param(e, marks=[pytest.mark.slow] * (e in REPEATED)) for e in EDITS]
)
def test_graph_edit_reruns_exactly_what_depends_on_it(built, edit):
    """After an edit, the jobs that depend on it are listed, and no others; also by times alone, and
    without Snakemake's records."""
    change, expected = EDITS[edit]
    change(built)
    assert built.planned("train") == without_zeros(expected)
    assert built.planned("--rerun-triggers", "mtime", "--", "train") == without_zeros(expected)
    shutil.rmtree(built.folder / ".snakemake")
    assert built.planned("train") == without_zeros(expected)


AUTO = config("launch: zero2_offload", "launch: auto")
SD3 = config("seed: 1", "seed: 1\nfamily: sd3")
CAPTIONS = config("phases:", "cache: {max_sequence_length: 64}\nphases:")


@pytest.mark.soak
def test_graph_length_of_captions_is_planned_with_again_by_auto_alone(project):
    """The planner reads it, for the phase that it plans; a launch that is named does not."""
    both(SD3, AUTO)(project)
    project.build("train")
    CAPTIONS(project)
    assert project.planned("train") == FROM_TRAINING | {"cache_latents": 1, "render_launch": 1}
    project.build("train")
    assert project.planned("train") == NOTHING
    config("launch: auto", "launch: zero2_offload")(project)
    project.build("train")
    config("max_sequence_length: 64", "max_sequence_length: 77")(project)
    assert project.planned("train") == FROM_TRAINING | {"cache_latents": 1}


@pytest.mark.slow
def test_graph_half_trained_run_plans_the_rest_whatever_the_versions(project):
    """What is missing is planned, and after an edit or an upgrade what costs little."""
    project.snakemake("--cores", "2", "train", STOP="train_phase")
    assert project.planned("train") == FROM_TRAINING
    raised("train_phase")(project)
    assert project.planned("train") == FROM_TRAINING
    raised("prepare_dataset")(project)
    assert project.planned("train") == without_zeros(BUT_THE_BASE)


OTHER_MACHINE = """
import importlib.metadata, os

os.cpu_count = lambda: 77
version = importlib.metadata.version
importlib.metadata.version = lambda name: "99" if name in {"torch", "diffusers"} else version(name)
"""


@pytest.mark.slow
def test_graph_another_machine_reruns_nothing(built):
    """Other versions of torch and diffusers, and another number of cores."""
    (built.folder / "other").mkdir()
    (built.folder / "other/sitecustomize.py").write_text(OTHER_MACHINE)
    path = os.pathsep.join([str(built.folder / "other"), built.environment["PYTHONPATH"]])
    done = built.snakemake("-n", "train", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout
    assert "Nothing to be done" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["cache_latents", "export_weights"])
def test_graph_a_second_snakemake_is_refused_and_a_killed_one_leaves_its_results(project, stage):
    """Nothing is called twice, and a dry run tells what is left."""
    first = project.hang(stage, "snakemake", "--cores", "1", "train")
    before = project.calls()
    second = project.snakemake("--cores", "1", "train")
    assert second.returncode == 1
    assert "another Snakemake works here" in second.stdout
    assert "`snakemake --unlock`" in second.stdout
    left = project.planned("train")
    assert left == without_zeros(dict(Counter(EVERYTHING) - Counter(before[:-1])))
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert project.planned("train") == left
    project.must("snakemake", "--unlock")
    project.build("train")
    assert Counter(project.calls()) == left
    assert project.planned("train") == NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("edit", ["a caption", "an added image"])
def test_graph_dataset_edit_leaves_a_base_from_a_folder_alone(built_on_folder, edit):
    """A real base model does not depend on the dataset: it is not taken in again."""
    EDITS[edit][0](built_on_folder)
    assert built_on_folder.planned("train") == without_zeros(EVERYTHING | {"build_base": 0})


@pytest.mark.slow
def test_graph_base_of_a_preset_stays_as_it_is_built_until_it_is_asked_for(built):
    """An edited dataset does not build it again; asking for it does, removing it, and an edit of a
    value that it is built from."""
    base = built.folder / "results/tiny/base/manifest.json"
    EDITS["a caption"][0](built)
    assert built.planned("train") == without_zeros(BUT_THE_BASE)
    before = base.read_bytes()
    built.build("train")
    assert base.read_bytes() == before
    assert built.planned("train") == NOTHING
    asked = without_zeros(EVERYTHING | {"prepare_dataset": 0, "render_launch": 1})
    assert built.planned("--forcerun", "build_base", "--", "train") == asked
    config("seed: 1", "seed: 2")(built)
    assert built.planned("train") == asked | {"render_launch": 2}
    config("seed: 2", "seed: 1")(built)
    shutil.rmtree(base.parent)
    assert built.planned("train") == asked
    built.snakemake("--cores", "1", "base", FAIL="build_base")
    assert built.planned("base") == {"build_base": 1}
    built.build("train")
    assert built.planned("train") == NOTHING
    rewrite("photos/cat.txt", "a cat that jumps\n")(built)
    config("seed: 1", "seed: 2")(built)
    built.snakemake("--cores", "1", "base", FAIL="build_base")
    config("seed: 2", "seed: 1")(built)
    assert built.planned("base") == NOTHING  # the edit is taken back, and the base stays


@pytest.mark.slow
def test_graph_conditioning_images_are_inputs_of_the_dataset(project):
    """An edited one reruns what an edited image reruns; touched ones and others rerun nothing.

    So do they with aspect buckets, which cut them, too."""
    project.edit(CONFIG, "base: nano", "base: nano\nfamily: flux")
    keys = "\n  conditioning_images: before\n  aspect_buckets: {alignment: 16}"
    project.edit(CONFIG, "images: photos", f"images: photos{keys}")
    before = project.folder / "before"
    before.mkdir()
    for name in ("cat", "dog"):
        (before / f"{name}.jpg").write_bytes(f"pixels of a {name} before".encode())
    project.build("cache")
    assert project.planned("cache") == NOTHING
    (before / "cat.jpg").touch()
    (before / "notes.md").write_text("no image")
    assert project.planned("cache") == NOTHING
    (before / "cat.jpg").write_bytes(b"other pixels")
    assert project.planned("cache") == {"prepare_dataset": 1, "cache_latents": 1}
    (before / "cat.jpg").unlink()
    refused = project.snakemake("-n", "cache")
    assert refused.returncode == EXIT_USER_ERROR
    assert "cat.png (no conditioning image: no cat.* in before)" in refused.stdout


@pytest.mark.slow
def test_graph_conditioning_images_of_prompts_are_inputs(project):
    """An edited one of an evaluation reruns evaluations, one of a validation the cache and what
    follows; a missing one is named."""
    project.edit(CONFIG, "base: nano", "base: nano\nfamily: flux")
    project.edit(CONFIG, "images: photos", "images: photos\n  conditioning_images: before")
    own = "  prompts: [a]\n  conditioning_images: [[mine/{}.png]]\n"
    project.append(CONFIG, own.format("a") + "validation:\n" + own.format("b"))
    for folder, names in (("before", ("cat", "dog")), ("mine", ("a", "b"))):
        (project.folder / folder).mkdir()
        for name in names:
            (project.folder / folder / f"{name}.png").write_bytes(f"pixels of {name}".encode())
    project.build("train")
    assert project.planned("train") == NOTHING
    mine = project.folder / "mine"
    (mine / "a.png").write_bytes(b"other pixels")
    assert project.planned("train") == {"evaluate": 2, "report": 1}
    (mine / "a.png").write_bytes(b"pixels of a")
    (mine / "b.png").write_bytes(b"other pixels")
    assert project.planned("train")["cache_latents"] == 1
    (mine / "b.png").unlink()
    refused = project.snakemake("-n", "train")
    assert refused.returncode == EXIT_USER_ERROR
    assert "validation.conditioning_images: mine/b.png: no such file" in refused.stdout


def test_graph_base_folder_edit_reruns_all_but_the_dataset(built_on_folder):
    """A file of the base model's folder is an input of the run."""
    (built_on_folder.folder / "sdxl" / "unet" / "config.json").write_text('{"sample_size": 8}\n')
    expected = EVERYTHING | {"prepare_dataset": 0, "render_launch": 1}
    assert built_on_folder.planned("train") == without_zeros(expected)


@pytest.mark.slow
def test_graph_cache_of_a_real_base_is_in_bf16(built_on_folder):
    """Written out, the default is no edit; fp32 is one."""
    config("export:", "cache: {dtype: bf16}\nexport:")(built_on_folder)
    assert built_on_folder.planned("train") == NOTHING
    config("cache: {dtype: bf16}", "cache: {dtype: fp32}")(built_on_folder)
    assert built_on_folder.planned("train") == FROM_TRAINING | {"cache_latents": 1}


def test_graph_touched_files_rerun_nothing(built_on_folder):
    """New times on inputs of equal content (a checkout, a copy) make no work."""
    for folder in ("photos", "sdxl", "config", "rules", "workflow"):
        for path in (built_on_folder.folder / folder).rglob("*"):
            path.touch()
    assert built_on_folder.planned("train") == NOTHING


@pytest.mark.slow
def test_graph_undone_edit_reruns_nothing(built):
    """An edit that was taken back before a run makes no work."""
    built.edit(CONFIG, "until: 700", "until: 800")
    assert built.planned("train") == ONE_PHASE
    built.edit(CONFIG, "until: 800", "until: 700")
    assert built.planned("train") == NOTHING


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage",
    [
        "export_weights",
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("evaluate", "prepare_dataset")),
    ],
)
def test_graph_former_result_stays_until_the_new_one_is_complete(built, stage):
    """A job that fails leaves what it made before, to the byte, for whoever reads it with the
    package or plans again; it is planned again, and then replaces it."""
    edits = {
        "export_weights": "export.dtype", "evaluate": "evaluate.guidance_scale",
        "prepare_dataset": "a caption",
    }  # fmt: skip
    EDITS[edits[stage]][0](built)
    planned = built.planned("train")
    results = built.folder / "results"
    before = {
        path: path.read_bytes() for path in results.rglob("*.json") if "settings" not in path.parts
    }
    assert built.snakemake("--cores", "2", "train", FAIL=stage).returncode == 1
    assert built.planned("train") == planned
    for path, content in before.items():
        assert path.read_bytes() == content, path
    built.build("train")
    assert built.planned("train") == NOTHING
    assert any(path.read_bytes() != content for path, content in before.items())


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


@pytest.mark.slow
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


def test_graph_values_that_stages_would_not_see_are_refused(project):
    """The stages read one file; values from other places are refused, not ignored."""
    said = refused(project.snakemake("-n", "--config", "seed=7", "learning_rate=1"))
    assert f"{CONFIG}: seed and learning_rate come from --config or a second --configfile" in said
    assert "the stages read one file and would not see them" in said
    assert f"write them into {CONFIG}, or into a copy that --configfile names" in said


@pytest.mark.parametrize(
    ("target", "near"),
    [
        ("trian", "train"),
        ("reprot", "report"),
        ("results/tiny/plain/wieghts/manifest.json", "results/tiny/plain/weights/manifest.json"),
        ("results/tiny/offload/metrics", "results/tiny/offload/metrics.json"),
    ],
)
def test_graph_names_the_target_that_is_nearest_to_a_mistyped_one(project, target, near):
    """A rule or a file of the results, beside the names of all rules."""
    done = project.snakemake("-n", target)
    assert done.returncode == 1
    assert f"ERROR: {target}: neither a target nor a file that a rule makes\n" in done.stdout
    assert f"  Hint: did you mean {near}? targets: dataset, base, cache, " in done.stdout
    assert "Exception" not in done.stdout


def test_graph_names_what_there_is_where_the_configuration_has_no_such_artifact(project):
    """So asks a dvc.yaml of another resolution; the lock is released."""
    for words in (("-n",), ("--cores", "1")):
        said = refused(project.snakemake(*words, "results/data/tiny/cache/128/manifest.json"))
        assert "results/data/tiny: the configuration has no cache_latents-128 here" in said
        assert "it has prepare_dataset, cache_latents-64; where dvc.yaml asks for another" in said
        assert "`zerotrain dvc generate` renews it" in said
    assert project.planned("train") == EVERYTHING


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can be another user"
)
@pytest.mark.parametrize("words", [("-n",), ("--cores", "1")])
def test_graph_in_a_folder_of_another_user_is_one_sentence(project, words):
    """Snakemake writes into its own folder there, also in a dry run; nothing is made."""
    (project.folder / ".snakemake/locks").mkdir(parents=True, exist_ok=True)
    nobody = (
        "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
        # Reads the interpreter wherever it is installed, and writes nothing of root's.
        "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
    )  # fmt: skip
    snakemake = (sys.executable, "-m", "snakemake", *words, "train")
    path = project.environment["PYTHONPATH"]
    said = refused(project.command(*nobody, *snakemake, PYTHONPATH=path))
    assert "ERROR: .snakemake: cannot be written: Permission denied\n" in said
    assert "Hint: give this user the right to it, or name a folder of yours" in said
    assert not (project.folder / "results").exists()


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
        ("run: tiny", "run: [", "not valid YAML: line ", "correct that place of the file"),
    ],
)
def test_graph_mistake_in_the_configuration_is_one_sentence(project, old, new, message, hint):
    """A mistake in the configuration is an ERROR and a hint, with no traceback of Snakemake's."""
    project.edit(CONFIG, old, new)
    said = refused(project.snakemake("-n"))
    assert message in said
    assert hint in said


@pytest.mark.slow
def test_graph_folder_called_nano_is_not_the_preset(project):
    """A preset has no files, whatever lies in the working directory."""
    before = project.planned("train")
    (project.folder / "nano").mkdir()
    (project.folder / "nano" / "a{b}.json").write_text("{}")
    assert project.planned("train") == before


@pytest.mark.slow
def test_graph_works_without_an_activated_environment(project):
    """Called by its path, snakemake finds the zerotrain that lies next to it."""
    from PIL import Image

    for photo in (project.folder / "photos").glob("*.png"):
        Image.new("RGB", (64, 64)).save(photo)
    snakemake = str(ENVIRONMENT_BIN / "snakemake")
    project.must(snakemake, "--cores", "1", "dataset", PATH=os.defpath)
    assert '"kind": "dataset"' in (project.folder / "results/data/tiny/manifest.json").read_text()
    assert project.calls() == []


@pytest.mark.slow
def test_graph_stopped_training_is_unfinished(project):
    """Exit code 85 is a job that failed: its sentence is shown without a traceback, nothing is
    published, what was saved stays, and the same command continues from there."""
    done = project.snakemake("--cores", "2", "train", STOP="train_phase")
    assert done.returncode == 1
    said = "plain: unfinished: stopped on request at step 100 of 300"
    assert said in done.stdout
    assert "stopped: train_phase tiny/plain after 0:0" in done.stdout
    assert " (exit code 85), " in done.stdout
    assert " stages did not run; run the same command to continue\n" in done.stdout
    assert "Traceback" not in done.stdout
    phase = project.folder / "results/tiny/plain"
    assert (phase / "progress/step-00000100/manifest.json").is_file()
    assert not (phase / "checkpoint/manifest.json").exists()
    assert "export_weights" not in project.calls()
    project.build("train")
    assert project.calls().count("train_phase") == 2
    assert (phase / "progress/step-00000100/manifest.json").is_file()
