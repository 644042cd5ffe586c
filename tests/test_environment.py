"""What is in use is pinned, all of it, at its version and by its hashes."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
ENVS = ROOT / "envs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"], "setuptools"]


@pytest.fixture
def pin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """envs/pin.py, which is no part of the package."""
    monkeypatch.syspath_prepend(ENVS)
    spec = importlib.util.spec_from_file_location("pin", ENVS / "pin.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pinned(name: str) -> dict[str, str]:
    """The version that a file pins of each package."""
    lines = [line for line in (ENVS / name).read_text().splitlines() if line[0] != "#"]
    return dict(line.split()[0].split("==") for line in lines)


def installed() -> dict[str, str]:
    """Version of what pyproject.toml needs, directly or not; tools of one's own are left out."""
    waiting = [(Requirement(name), "") for name in NEEDED]
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        key = (canonicalize_name(requirement.name), str(sorted(requirement.extras)))
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if key in seen or not needed:
            continue
        seen.add(key)
        package = distribution(requirement.name)
        found[key[0]] = package.version.partition("+")[0]  # a suffix such as +cpu names a build
        for line in package.requires or []:
            waiting += [(Requirement(line), extra) for extra in ("", *requirement.extras)]
    return found


def test_every_installed_package_is_pinned_at_its_version() -> None:
    """Nothing that is needed, by whatever, came into the environment unpinned."""
    assert installed().items() <= (pinned("constraints.txt") | pinned("cuda.txt")).items()


@pytest.mark.parametrize("name", ["constraints.txt", "cuda.txt"])
def test_every_pin_has_hashes(name: str) -> None:
    """No file is installed that nobody has looked at; one line is one package."""
    pin = re.compile(r"[\w.-]+==[\w.]+( ; [^-]\S.*?)?( --hash=sha256:[0-9a-f]{64})+")
    lines = (ENVS / name).read_text().splitlines()
    assert [line for line in lines if line[0] != "#" and not pin.fullmatch(line)] == []


def test_a_pin_with_a_new_build_keeps_its_hashes(
    pin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders of pip's settings may hold a build of torch that no index has."""
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").write_bytes(b"build")
    (tmp_path / "torch-2.12.0+cpu-cp311-cp311-linux_x86_64.whl").write_bytes(b"other version")
    settings = {"find-links": str(tmp_path)}
    monkeypatch.setattr(pin.setup, "pip_settings", lambda python: settings)
    build = "--hash=sha256:6a02c9a9ae5b6ba9cd1a2f1d0d7ab2ba2d6b8a2d7f1e3a1e8e4d6f2e0c3b5a79"
    old = [f"torch==2.13.0 --hash=sha256:{'b' * 64}", f"torchx==1 {build}"]
    more = pin.torch_hashes("2.13.0", old)
    digest = pin.hashlib.sha256(b"build").hexdigest()
    assert more == [f"--hash=sha256:{'b' * 64}", f"--hash=sha256:{digest}"]
    line = pin.with_hashes(f"torch==2.13.0 ; a == 'b' --hash=sha256:{'b' * 64}", more)
    hashes = sorted(more)
    assert line == " ".join(["torch==2.13.0 ; a == 'b'", *hashes])
    assert pin.torch_hashes("2.14.0", old) == []


def test_every_required_package_is_pinned() -> None:
    """A new line in pyproject.toml needs one in constraints.txt."""
    needed = {canonicalize_name(Requirement(line).name) for line in NEEDED}
    assert needed <= pinned("constraints.txt").keys()


def test_every_imported_package_is_required() -> None:
    """What the code imports is named in pyproject.toml, not left to come with something else."""
    chosen = PROJECT["optional-dependencies"]["adamw8bit"]
    required = {
        canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"] + chosen
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


def test_torch_names_no_build() -> None:
    """A local suffix such as +cpu would keep machines with a GPU from their own build."""
    assert pinned("constraints.txt")["torch"] == "2.13.0"


def test_conda_has_the_same_pins() -> None:
    """Versions and hashes: pip reads both files in the folder of the environment's own."""
    found = YAML(typ="safe").load((ENVS / "zerotrain.yaml").read_text())
    files = ["constraints.txt", "cuda.txt"]
    assert found["dependencies"][-1]["pip"] == [f"-r {name}" for name in files]


def test_conda_builds_with_pinned_tools() -> None:
    """An isolated build would take any setuptools; pip 25.3 is the first that pins its build."""
    text = (ENVS / "zerotrain.yaml").read_text()
    assert "PIP_BUILD_CONSTRAINT=$PWD/envs/constraints.txt" in text
    assert "pip install --no-build-isolation --no-deps -e ." in text
    assert "pip>=25.3" in YAML(typ="safe").load(text)["dependencies"]
