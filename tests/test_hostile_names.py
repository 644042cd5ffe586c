"""Names that others chose stay names: none becomes a key of a configuration that is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from ruamel.yaml import YAML

from zerotrain.config.runs import KEY
from zerotrain.graph.new_run import new
from zerotrain.graph.options import NewOptions
from zerotrain.graph.sweep import runs_text
from zerotrain.graph.switch.edit import Split, split_phase
from zerotrain.importers.imported_config import ImportedConfig, Note, config_text

BREAKS = ["\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029"]
INJECTED = "x{}seed: 666{}# "


def read(text: str) -> Any:
    """What both readers of YAML take the text for, which is the same."""
    found = YAML(typ="safe", pure=True).load(text)
    assert yaml.safe_load(text) == found
    return found


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """An image with its caption."""
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    (folder / "a.txt").write_text("a photo")
    return folder


@pytest.mark.parametrize("line_break", BREAKS, ids=ascii)
def test_names_of_images_stay_names(photos: Path, tmp_path: Path, line_break: str) -> None:
    """A folder, a file without a caption, and the target of a link, whose names end a line."""
    name = INJECTED.format(line_break, line_break)
    expected = read(new(NewOptions("plain", "nano", photos), tmp_path / "config").read_text())
    Image.new("RGB", (8, 8)).save(photos / f"a{name}.png")
    target = tmp_path / f"target{name}.png"
    target.write_bytes((photos / "a.png").read_bytes())
    folder = photos.rename(tmp_path / f"photos{name}")
    for first in ("z", "0"):  # the link is the first bad one, and then is not
        link = folder / f"{first}.png"
        link.symlink_to(target)
        found = read(
            new(NewOptions(f"run{first}", "nano", folder), tmp_path / "config").read_text()
        )
        assert found == {
            **expected,
            "run": f"run{first}",
            "data": {**expected["data"], "images": str(folder)},
        }


@pytest.mark.parametrize("line_break", BREAKS, ids=ascii)
def test_cells_of_a_table_stay_names(photos: Path, tmp_path: Path, line_break: str) -> None:
    """A file name in metadata.csv that ends a line."""
    expected = read(new(NewOptions("plain", "nano", photos), tmp_path / "config").read_text())
    name = INJECTED.format(line_break, line_break)
    table = f'file_name,text\na.png,a photo\n"{name}",b\n'
    (photos / "metadata.csv").write_bytes(table.encode())
    found = read(new(NewOptions("run", "nano", photos), tmp_path / "config").read_text())
    assert found == {**expected, "run": "run"}


@pytest.mark.parametrize("line_break", BREAKS, ids=ascii)
def test_an_imported_file_adds_no_key(line_break: str) -> None:
    """Its name, its keys, values and reasons are comments and values."""
    name = INJECTED.format(line_break, line_break)
    notes = [
        Note(name, name, "no-op", "", None, name),
        Note(name, name, "left out", "", None, name),
        Note("seed", name, "resolved", "seed", 3, name),
        Note("images", name, "default", "data.images", name, name),
    ]
    imported = ImportedConfig(name, {"seed": 3, "data.images": name}, notes)
    assert read(config_text(imported)) == {"seed": 3, "data": {"images": name}}


@pytest.mark.parametrize("line_break", BREAKS, ids=ascii)
def test_a_sweep_names_its_folder_and_nothing_else(line_break: str) -> None:
    """The folder of a sweep may be called as it likes."""
    name = INJECTED.format(line_break, line_break)
    assert read(runs_text(Path(name))) == {KEY: [f"{name}/*.yaml"]}


@pytest.mark.parametrize("line_break", BREAKS, ids=ascii)
def test_a_switch_writes_its_values_as_values(line_break: str) -> None:
    """A launch value of the new phase (an offload path) adds no key."""
    path = INJECTED.format(line_break, line_break)
    text = "run: a\nphases:\n- name: one\n  until: 9\n  launch: torch\n"
    launch = {"preset": "zero3_nvme", "offload_path": path}
    found = read(split_phase(text, Split(phase="one", step=5, name="two", launch=launch)))
    assert found["phases"][1] == {"name": "two", "until": 9, "launch": launch}
    assert found.keys() == {"run", "phases"}
