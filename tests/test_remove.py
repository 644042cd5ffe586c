"""`zerotrain remove`: what goes with a run, what stays since others use it, what forbids it."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from tests.builders.watched_runs import WatchedRun

from zerotrain.artifact.leftovers import WriterLock, hold
from zerotrain.errors import PipelineError
from zerotrain.graph.remove import remove
from zerotrain.machine import file_lock
from zerotrain.machine.disk import size

BYTES = 1000
"""Of each weights file that `fill` writes."""


class Terminal(io.StringIO):
    """A standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def cats(tmp_path: Path, monkeypatch) -> WatchedRun:
    """A run of two phases with its dataset, cache and base, all made."""
    monkeypatch.chdir(tmp_path)
    return made("cats")


def made(name: str, **values: object) -> WatchedRun:
    """A run with everything of its own, and these sections in its file."""
    run = WatchedRun(name)
    run.file.write_text(yaml.safe_dump(yaml.safe_load(run.file.read_text()) | values))
    run.make_data()
    for phase, until in (("plain", 300), ("offload", 700)):
        run.finish(phase, until)
        (run.folder.phase(phase).weights / "unet.safetensors").write_bytes(b"w" * BYTES)
    return run


def names_parent(folder: Path, parent: Path) -> None:
    """Let a published folder say that it was made from another."""
    path = folder / "manifest.json"
    parents = {"base": {"path": str(parent), "identity": "0" * 64}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parents": parents}))


def contents() -> dict[str, bytes]:
    """All files below results/, but for the file in which locks are taken in turn."""
    return {str(path): path.read_bytes() for path in Path("results").rglob("*") if path.is_file()}


def refusal(run: str = "cats", *, data: bool = False) -> str:
    """The message of a refusal that changed no file."""
    before = contents()
    with pytest.raises(PipelineError) as caught:
        remove(run, data=data, yes=True)
    assert contents() == before
    return str(caught.value)


def total(*folders: str) -> str:
    """The size of all files of folders, as messages have it."""
    files = (path for folder in folders for path in Path(folder).rglob("*") if path.is_file())
    return size(sum(path.stat().st_size for path in files))


def test_a_run_goes_and_its_dataset_stays_until_it_is_asked_for(cats):
    """The message has what was freed, and names what stays with the way to remove it."""
    freed, kept = total("results/cats"), total("results/data/cats")
    parts = [f"{name} {total(f'results/cats/{name}')}" for name in ("base", "offload", "plain")]
    assert remove("cats", data=False, yes=True) == [
        f"cats: removed {freed}",
        f"  results/cats: {freed} ({', '.join(parts)})",
        "it stays",
        f"  results/data/cats: {kept}; no other run uses it; `--data` removes it, too",
        "  config/cats.yaml: `snakemake --cores all train --configfile config/cats.yaml` makes the "
        "run again",
    ]
    assert sorted(path.name for path in Path("results").iterdir()) == ["data"]
    assert remove("config/cats.yaml", data=True, yes=True)[:2] == [
        f"cats: removed {kept}", f"  results/data/cats: {kept}",
    ]  # fmt: skip
    assert not contents()


@pytest.mark.parametrize(("answer", "left"), [("y\n", False), ("n\n", True), ("\n", True)])
def test_the_question_names_what_goes(cats, monkeypatch, capsys, answer, left):
    before, freed = contents(), total("results/cats")
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    if left:
        with pytest.raises(PipelineError, match="cats: nothing was removed"):
            remove("cats", data=False, yes=False)
        assert contents() == before
    else:
        remove("cats", data=False, yes=False)
        assert not Path("results/cats").exists()
    asked = capsys.readouterr().err
    assert f"results/cats: {freed} (base " in asked
    assert "results/data/cats: " in asked
    assert asked.endswith(f"Remove {freed} of cats? [y/N] ")


def test_without_a_terminal_only_yes_removes(cats, monkeypatch):
    before = contents()
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(PipelineError, match="not removed without confirmation") as caught:
        remove("cats", data=False, yes=False)
    assert "results/cats: " in str(caught.value)
    assert "--yes" in str(caught.value)
    assert contents() == before


def test_what_configurations_of_others_use_stays(cats):
    """A dataset of one name, its base, and weights from which another run starts; those of a sweep
    and of a configuration that is wrong count as well."""
    made("dogs", data={"images": "photos", "name": "cats"}, until="wrong")
    Path("config/swept").mkdir()
    swept = {"run": "swept", "base": "results/cats/plain/weights", "phases": []}
    Path("config/swept/a.yaml").write_text(yaml.safe_dump(swept), encoding="utf-8")
    Path("config/swept.yaml").write_text("runs: [config/swept/*.yaml]\n", encoding="utf-8")
    weights = Path("results/cats/plain/weights")
    stays = (f"{weights}/", "results/cats/base/", "results/data/", "results/dogs/")
    kept = {path: data for path, data in contents().items() if path.startswith(stays)}
    said = remove("cats", data=True, yes=True)
    assert contents() == kept
    assert [line for line in said if "used by" in line] == [
        "  results/data/cats: used by dogs (config/dogs.yaml)",
        "  results/cats/base: used by dogs (config/dogs.yaml)",
        f"  {weights}: used by swept (config/swept/a.yaml)",
    ]
    assert "nothing is removed: results/data/cats: used by dogs" in refusal("cats", data=True)


def test_what_folders_of_others_were_made_from_stays(cats):
    """Their manifests name it, or links of a base lead there, though no configuration is left."""
    dogs = made("dogs")
    dogs.file.unlink()
    names_parent(dogs.folder.phase("plain").launch, Path("results/data/cats/cache/32"))
    link = Path("results/dogs/base/unet.safetensors")
    link.symlink_to(Path("results/cats/offload/weights/unet.safetensors").resolve())
    manifest = json.loads((link.parent / "manifest.json").read_text())
    files = {"unet.safetensors": {"sha256": "0" * 64, "bytes": BYTES}}
    (link.parent / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
    said = remove("cats", data=True, yes=True)
    assert link.read_bytes() == b"w" * BYTES
    assert Path("results/data/cats/cache/32/manifest.json").is_file()
    assert not Path("results/cats/plain").exists()
    assert [line for line in said if "used by" in line] == [
        "  results/data/cats: used by results/dogs/plain/launch",
        "  results/cats/offload/weights: used by results/dogs/base",
    ]


def test_a_file_that_does_not_say_what_it_uses_forbids_it(cats):
    Path("config/torn.yaml").write_text("run: [\n", encoding="utf-8")
    assert "config/torn.yaml" in refusal()


def test_a_training_a_job_and_a_reader_forbid_it(cats):
    """By the lock of a phase, of Snakemake, of a switch, of a cache's writer, and of a reader."""
    progress = cats.lock("plain")
    assert f"{progress}: a training is running here already: pid {os.getpid()}" in refusal()
    shutil.rmtree(progress)
    switch = Path("results/cats/.switch/lock")
    switch.parent.mkdir()
    switch.touch()
    with file_lock.hold(switch):
        assert "`zerotrain switch` works on it" in refusal()
    lock = Path(".snakemake/locks/0.output.lock")
    lock.parent.mkdir(parents=True)
    lock.write_text(
        "results/dogs/base/manifest.json\nresults/cats/report/manifest.json\n", encoding="utf-8"
    )
    assert "snakemake works on results/cats/report/manifest.json" in refusal()
    lock.unlink()
    reader = hold(cats.folder.phase("plain").weights)
    assert "results/cats/plain/weights: in use, and nothing is removed" in refusal()
    reader.close()
    writer = WriterLock(Path("results/data/cats/cache/32"))
    assert "a job writes here or next to it" in refusal(data=True)
    remove("cats", data=False, yes=True)
    writer.release()
    remove("cats", data=True, yes=True)
    assert not contents()


def test_nothing_is_deleted_through_a_link(cats, tmp_path):
    """Links in a run go themselves; a run, a dataset or results/ that is one is refused."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "photo.png").write_text("mine")
    Path("results/cats/base/vae").symlink_to(mine)
    for place in ("results/data/cats", "results/cats", "results"):
        moved = mine / Path(place).name
        shutil.move(place, moved)
        Path(place).symlink_to(moved)
        assert f"{place}: a link to {moved}; nothing is removed through a link" in refusal(
            data=True
        )
        Path(place).unlink()
        shutil.move(moved, place)
    remove("cats", data=True, yes=True)
    assert (mine / "photo.png").read_text() == "mine"
    assert not contents()


@pytest.mark.parametrize("name", ["..", "../cats", "../../mine", "a/b", "{here}/mine"])
def test_no_name_of_a_dataset_leads_out_of_the_results(cats, name):
    """As in the configuration of somebody else, of which nothing else has to be valid."""
    name = name.format(here=Path.cwd())
    Path("mine").mkdir()
    Path("mine/letter.txt").write_text("dear", encoding="utf-8")
    raw = yaml.safe_load(cats.file.read_text("utf-8"))
    cats.file.write_text(yaml.safe_dump(raw | {"data": {**raw["data"], "name": name}}))
    assert f"run cats: data.name {name!r} is no name of a folder" in refusal(data=True)
    assert Path("mine/letter.txt").read_text("utf-8") == "dear"


def test_only_bytes_that_no_other_file_shares_count_as_freed(cats):
    """A second name outside keeps a file's bytes; one inside does not."""
    inside = Path("results/cats/plain/weights/unet.safetensors")
    os.link(inside, "results/cats/plain/weights/again.safetensors")
    os.link("results/cats/offload/weights/unet.safetensors", "mine.safetensors")
    every = sum(path.stat().st_size for path in Path("results/cats").rglob("*") if path.is_file())
    assert remove("cats", data=False, yes=True)[0] == f"cats: removed {size(every - 2 * BYTES)}"
    assert Path("mine.safetensors").read_bytes() == b"w" * BYTES


def test_a_removal_that_was_interrupted_is_finished(cats):
    """What has its name taken away counts as gone, and the next call removes it."""
    Path("results/cats").rename("results/.cats.removed")
    remove("cats", data=False, yes=True)
    assert not Path("results/.cats.removed").exists()


def test_a_name_that_is_none_is_refused(cats):
    """Nothing outside of results/ can be named, and a typo gets the run's name."""
    assert "nothing of a run catz" in refusal("catz")
    assert "did you mean cats?" in refusal("catz")
    for name in ("../mine", "data", ".", "results/cats/plain", "results/.."):
        assert "names no run" in refusal(name)
    assert remove("results/cats", data=False, yes=True)[0].startswith("cats: removed")
