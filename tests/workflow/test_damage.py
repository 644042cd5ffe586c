"""A payload that is missing or damaged under its manifest: its folder is planned, and only it is
made; what follows finds its own folders current."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.workflow.conftest import Project, jobs_of
from tests.workflow.jobs import EVERYTHING, FROM_LAUNCH, NOTHING, without_zeros

PAYLOAD = "payload.bin"
BUT_THE_DATASET = EVERYTHING | {"prepare_dataset": 0, "render_launch": 1}
LAST_STAGES = {"train_phase": 1, "export_weights": 2, "evaluate": 2, "report": 1}
JOBS = {
    "tiny/base": BUT_THE_DATASET,
    "data/tiny/cache/64": LAST_STAGES | {"cache_latents": 1, "train_phase": 2},
    "tiny/plain/launch": LAST_STAGES | {"render_launch": 1, "train_phase": 2},
    "tiny/plain/checkpoint": LAST_STAGES | {"train_phase": 2},
    "tiny/plain/weights": LAST_STAGES,
    "tiny/plain/state": LAST_STAGES,
    "tiny/plain/evaluation": {"evaluate": 1, "report": 1},
    "tiny/report": {"report": 1},
}


def payload(project: Project, folder: str) -> Path:
    """The file that a folder's manifest lists."""
    name = "tensors.bin" if folder.endswith("checkpoint") else PAYLOAD
    return project.folder / "results" / folder / ("run.yaml" if "launch" in folder else name)


def contents(project: Project) -> dict[str, bytes]:
    """Manifests and payloads below results/."""
    return {
        str(path.relative_to(project.folder)): path.read_bytes()
        for path in sorted((project.folder / "results").rglob("*"))
        if path.name in ("manifest.json", PAYLOAD)
    }


@pytest.mark.slow
@pytest.mark.parametrize("folder", JOBS)
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_graph_a_damaged_payload_plans_its_folder_and_makes_it_alone(
    built: Project, folder: str, damage: str
) -> None:
    """The plan names the file. The same bytes are back, by this one stage, and nothing is left."""
    before = contents(built)
    path = payload(built, folder)
    path.unlink() if damage == "missing" else path.write_bytes(b"cut")
    said = built.must("snakemake", "-n", "train")
    assert jobs_of(said) == without_zeros(JOBS[folder])
    kind = "missing" if damage == "missing" else "damaged"
    assert f": {kind}: results/{folder}/{path.name}\n" in said
    assert built.planned("--rerun-triggers", "mtime", "--", "train") == without_zeros(JOBS[folder])
    built.build("train")
    assert [Path(one).parent.parent for one in built.made()] == [
        Path("results", folder.replace("/state", "/weights")).parent
    ]
    assert contents(built) == before
    assert built.planned("train") == NOTHING


@pytest.mark.slow
def test_graph_bytes_of_equal_size_are_made_again_when_asked_for(built: Project) -> None:
    """A plan reads no files, so it finds nothing; --forcerun makes the folder though its recipe is
    current, and nothing that follows."""
    before = contents(built)
    path = payload(built, "tiny/plain/weights")
    flipped = bytearray(path.read_bytes())
    flipped[7] ^= 1
    path.write_bytes(flipped)
    assert built.planned("train") == NOTHING
    weights = "results/tiny/plain/weights/manifest.json"
    built.build("--forcerun", weights, "--", "train")
    assert built.made() == [weights]
    assert contents(built) == before
    assert built.planned("train") == NOTHING


@pytest.mark.slow
def test_graph_damage_does_not_hide_what_else_has_changed(built: Project) -> None:
    """A target does not make what it does not need; an edit plans all that depends on it."""
    payload(built, "tiny/plain/weights").unlink()
    assert built.planned("results/tiny/plain/launch/manifest.json") == NOTHING
    built.edit("config/config.yaml", "1.0e-3", "2.0e-3")
    assert built.planned("train") == FROM_LAUNCH


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}'])
def test_graph_a_manifest_that_is_cut_makes_its_folder_again(built: Project, text: str) -> None:
    """In both of its names, which are one file."""
    before = contents(built)
    (built.folder / "results/tiny/base/manifest.json").write_text(text)
    assert built.planned("train") == without_zeros(BUT_THE_DATASET)
    built.build("train")
    assert built.made() == ["results/tiny/base/manifest.json"]
    assert contents(built) == before


@pytest.mark.slow
def test_graph_a_removed_folder_is_made_again(built: Project) -> None:
    """A removed manifest alone is no removed folder: its second name gives it back."""
    before = contents(built)
    (built.folder / "results/tiny/base/manifest.json").unlink()
    assert built.planned("train") == NOTHING
    assert contents(built) == before
    shutil.rmtree(built.folder / "results/tiny/report")
    assert built.planned("train") == {"report": 1}


def test_the_weights_of_a_phase_that_is_trained_further_are_planned(built: Project) -> None:
    """Though they are there, made of the checkpoint before, and no other target asks for it."""
    weights = "results/tiny/offload/weights/manifest.json"
    built.edit("config/config.yaml", "until: 700", "until: 800")
    assert built.snakemake("--cores", "1", "train", STOP="train_phase").returncode == 1
    assert built.planned(weights) == {"train_phase": 1, "export_weights": 1}
    assert built.planned("train") == LAST_STAGES | {"export_weights": 1, "evaluate": 1}


@pytest.mark.slow
def test_another_version_of_the_training_is_reported_and_trains_nothing(built: Project) -> None:
    """In one line of each plan; of a stage whose results stay."""
    from tests.workflow.jobs import raised

    said = "2 phases were made by another version of {} than 2 and stay as they are"
    assert "another version" not in built.snakemake("-n", "train").stdout
    for stage in ("train_phase", "export_weights"):
        raised(stage)(built)
        assert built.snakemake("-n", "train").stdout.count(said.format(stage)) == 1
    assert built.planned("train") == NOTHING
