"""The pinned versions are the ones in use, all of them, and conda gets the same."""

from __future__ import annotations

import ast
import importlib.util
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
CONSTRAINTS = (ROOT / "envs" / "constraints.txt").read_text()


@pytest.fixture
def pin() -> ModuleType:
    """envs/pin.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("pin", ROOT / "envs" / "pin.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_installed_package_is_pinned_at_its_version(pin: ModuleType) -> None:
    """Nothing that is needed, by whatever, came into the environment unpinned."""
    assert set(pin.installed()) <= set(pin.pins(CONSTRAINTS))


def test_every_required_package_is_pinned(pin: ModuleType) -> None:
    """A new line in pyproject.toml needs one in constraints.txt."""
    pinned = {canonicalize_name(line.split("==")[0]) for line in pin.pins(CONSTRAINTS)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = project["dependencies"] + project["optional-dependencies"]["dev"]
    assert {canonicalize_name(Requirement(line).name) for line in required} <= pinned


def test_every_imported_package_is_required() -> None:
    """What the code imports is named in pyproject.toml, not left to come with something else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chosen = project["optional-dependencies"]["adamw8bit"]
    required = {
        canonicalize_name(Requirement(line).name) for line in project["dependencies"] + chosen
    }
    imported: set[str] = set()
    for path in (ROOT / "workflow" / "zerotrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    makers = packages_distributions()
    for name in imported - sys.stdlib_module_names - {"zerotrain"}:
        assert required & {canonicalize_name(maker) for maker in makers.get(name, [name])}, name


def test_torch_names_no_build(pin: ModuleType) -> None:
    """A local suffix such as +cpu would keep machines with a GPU from their own build."""
    assert [line for line in pin.pins(CONSTRAINTS) if "+" in line] == []
    assert "torch==2.13.0" in pin.pins(CONSTRAINTS)


def test_conda_has_the_same_versions(
    pin: ModuleType, generated: Callable[[Path, str], None]
) -> None:
    """envs/zerotrain.yaml is generated from envs/constraints.txt."""
    generated(ROOT / "envs" / "zerotrain.yaml", pin.conda(CONSTRAINTS))
    found = YAML(typ="safe").load((ROOT / "envs" / "zerotrain.yaml").read_text())
    assert found["dependencies"][-1]["pip"] == pin.pins(CONSTRAINTS)
