"""A form's values are a configuration, and an address holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotrain.builder.draft import read_draft
from zerotrain.builder.forecast import find_machine
from zerotrain.config.families import FAMILIES
from zerotrain.config.read import load_config
from zerotrain.errors import PipelineError
from zerotrain.importers import enable_launch_files
from zerotrain.launch.planner.planner import this_machine

RECIPES = sorted(str(path) for path in Path("config").glob("*.yaml"))
FULL = "config/sdxl-full-24gb.yaml"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_form_that_is_sent_as_it_was_shown_changes_nothing(recipe: str) -> None:
    """Of every configuration of the project, in each of its phases."""
    for phase in read_draft({"from": recipe}).phases:
        shown = read_draft({"from": recipe, "phase": phase})
        draft = read_draft({"from": recipe, "phase": phase, **shown.values()})
        assert draft.raw == load_config(Path(recipe))
        assert draft.text == Path(recipe).read_text(encoding="utf-8")
        assert draft.run is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_to_start_from_is_a_valid_configuration_of_each_family(family: str) -> None:
    """Its values are; the data is the user's, and not there."""
    draft = read_draft({"family": family})
    assert draft.run is not None
    assert {problem.what.partition(":")[0] for problem in draft.problems} <= {
        "data.images", "data.path", "data",
    }  # fmt: skip
    assert read_draft(draft.query).raw == draft.raw


@pytest.mark.parametrize(
    ("name", "text", "place", "value"),
    [
        ("train.learning_rate", "2e-5", ("train", "learning_rate"), 2e-5),
        ("train.global_batch_size", "", ("train", "global_batch_size"), None),
        ("train.max_grad_norm", "0.5", ("train", "max_grad_norm"), 0.5),
        ("train.optimizer", "lion", ("train", "optimizer"), "lion"),
        ("launch.preset", "zero3_offload", ("phases", 0, "launch"), "zero3_offload"),
        ("launch.num_processes", "2", ("launch", "num_processes"), 2),
        ("phase.until", "3 epochs", ("phases", 0, "until"), "3 epochs"),
        ("lora.rank", "16", ("lora", "rank"), 16),
        ("data.images", "/my/images", ("data", "images"), "/my/images"),
        (
            "train.optimizer_args", "momentum: 0.9, betas: [0.9, 0.95]",
            ("train", "optimizer_args"), {"momentum": 0.9, "betas": [0.9, 0.95]},
        ),
        (
            "train.lr_scheduler_args", "{power: 2}",
            ("train", "lr_scheduler_args"), {"power": 2},
        ),
        (
            "launch.deepspeed.zero_optimization.reduce_bucket_size", "1e6",
            ("launch", "deepspeed", "zero_optimization", "reduce_bucket_size"), 1000000,
        ),
    ],
)  # fmt: skip
def test_a_change_goes_where_the_file_has_the_key(name, text, place, value) -> None:
    """With one phase into the run's sections; the rest of the file stays."""
    draft = read_draft({"from": FULL, name: text})
    found = draft.raw
    for part in place[:-1]:
        found = found[part]
    assert found.get(place[-1]) == value
    assert draft.query == {"from": FULL, name: text}
    assert read_draft(draft.query).raw == draft.raw
    before = load_config(Path(FULL))
    assert {key: draft.raw[key] for key in ("run", "cache", "export")} == {
        key: before[key] for key in ("run", "cache", "export")
    }


@pytest.mark.parametrize("text", ["momentum", "momentum: [0.9", "a: &a [1], b: *a", "[1]"])
def test_arguments_that_are_no_values_are_refused(text: str) -> None:
    """They stay what was typed."""
    draft = read_draft({"from": FULL, "train.optimizer_args": text})
    assert draft.run is None
    assert draft.values()["train.optimizer_args"] == text
    [problem] = draft.problems
    assert "optimizer_args" in problem.what


def test_auto_is_written_for_the_machine_that_is_planned_for() -> None:
    """So its launch files are rendered for it by hand, too; a preset takes no such keys."""
    card = {"machine.gpu": "RTX 4090", "machine.host_memory": "64 GiB"}
    draft = read_draft(card)
    assert draft.raw["launch"] == {"mixed_precision": "bf16"}
    assert draft.raw["phases"][0]["launch"] == {
        "preset": "auto", "device_memory": "24564 MiB", "host_memory": "64 GiB",
    }  # fmt: skip
    assert draft.run is not None
    phase = draft.run.phases[0]
    shown, by_hand = find_machine(draft.machine, phase), this_machine(phase)
    assert shown.device_memory == by_hand.device_memory == 24564 * 2**20
    assert shown.host_memory == by_hand.host_memory == 64 * 2**30
    preset = read_draft({**card, "launch.preset": "zero2"})
    assert preset.raw["phases"][0]["launch"] == "zero2"
    assert read_draft({"machine.gpu": "RTX 4900"}).raw == read_draft({}).raw


def test_one_of_several_phases_is_changed_alone() -> None:
    """What the run's sections have is other phases' too."""
    draft = read_draft(
        {
            "from": "config/config.yaml", "phase": "offload", "train.learning_rate": "1e-3",
            "launch.num_processes": "2",
        }
    )  # fmt: skip
    before = load_config(Path("config/config.yaml"))
    assert draft.raw["train"] == before["train"]
    assert draft.raw["phases"][0] == before["phases"][0]
    changed = draft.raw["phases"][1]
    assert changed["learning_rate"] == 1e-3
    assert changed["launch"] == {"preset": "zero2_offload", "num_processes": 2}
    assert draft.query["phase"] == "offload"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd", "config/../../etc/passwd", "config/schema.json", "config",
        "config/none.yaml", "config/launch/../../pyproject.toml", "config/\0.yaml",
        "config/" + "a" * 5000 + ".yaml", "~/x.yaml",
    ],
)  # fmt: skip
def test_only_configurations_of_the_project_are_read(path: str) -> None:
    """Whatever a request names as the start."""
    with pytest.raises(PipelineError, match="it is no configuration of config/"):
        read_draft({"from": path})


@pytest.mark.parametrize("name", ["/etc/zero.json", "../zero.yaml", "config/../../x.yml"])
def test_a_launch_file_outside_of_the_project_is_not_read(name: str) -> None:
    """Neither from the form nor from a file; one inside is."""
    with pytest.raises(PipelineError, match="is not in the project's folder"):
        read_draft({"launch.preset": name})


def test_a_launch_file_is_a_preset_like_others(tmp_path, monkeypatch) -> None:
    """Its values are what the form shows, and sending them back changes nothing."""
    config = tmp_path / "config"
    config.mkdir()
    (config / "zero.json").write_text(
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},'
        ' "bf16": {"enabled": true}, "gradient_clipping": 0.5}'
    )
    (config / "a.yaml").write_text(
        "run: a\nbase: nano\ndata: {source: digits}\n"
        "phases: [{name: one, until: 10, launch: config/zero.json}]\n"
    )
    for name in ("launch", "models"):
        (config / name).symlink_to(Path.cwd() / "config" / name)
    monkeypatch.chdir(tmp_path)
    enable_launch_files()
    draft = read_draft({"from": "config/a.yaml"})
    values = draft.values()
    assert draft.run is not None
    assert values["launch.preset"] == "zero2_offload"
    assert values["train.max_grad_norm"] == "0.5"
    assert read_draft({"from": "config/a.yaml", **values}).raw == draft.raw
    changed = read_draft({"from": "config/a.yaml", "train.learning_rate": "1e-4"})
    assert changed.raw["phases"][0]["launch"] == "config/zero.json"


def test_a_link_out_of_the_project_is_not_followed(tmp_path, monkeypatch) -> None:
    """Its target is not a configuration of the project."""
    (tmp_path / "outside.yaml").write_text("run: a")
    (tmp_path / "project" / "config").mkdir(parents=True)
    (tmp_path / "project" / "config" / "in.yaml").symlink_to(tmp_path / "outside.yaml")
    monkeypatch.chdir(tmp_path / "project")
    with pytest.raises(PipelineError, match="it is no configuration"):
        read_draft({"from": "config/in.yaml"})
