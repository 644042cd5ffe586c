"""Set-up tells what is missing in one sentence, repairs what was left half-made, and is done
once."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tests.builders.processes import wait_until

ROOT = Path(__file__).parents[1]
PYTHON = getattr(sys, "_base_executable", sys.executable)
"""The Python that .venv was made with: set-up runs before there is one."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A clone in which nothing is set up."""
    return clone(tmp_path / "project")


@pytest.fixture
def setup(project: Path) -> ModuleType:
    """The set-up script of that clone, imported."""
    spec = importlib.util.spec_from_file_location("setup_script", project / "envs" / "setup.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def clone(folder: Path) -> Path:
    (folder / "workflow").mkdir(parents=True)
    shutil.copytree(ROOT / "envs", folder / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(*command: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as a newcomer would; with `path` only what lies in that folder is found."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    env.pop("CXX", None)
    if path:
        env["PATH"] = str(path)
    words = [str(word) for word in command]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)


def refusal(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> str:
    """What check_machine says when it stops."""
    with pytest.raises(SystemExit) as caught:
        setup.check_machine()
    assert caught.value.code == 2
    return one_sentence(capsys.readouterr().err)


def one_sentence(text: str) -> str:
    assert "Traceback" not in text
    assert text.count("ERROR: set-up: ") == 1
    assert text.count("  Hint: ") == 1
    return text


def test_script_parses_under_old_pythons() -> None:
    """A Python that is too old reads it far enough to say so."""
    tree = ast.parse((ROOT / "envs" / "setup.py").read_text(), feature_version=(3, 6))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "__future__" not in imported


def old_python(setup: ModuleType, patch: pytest.MonkeyPatch, minor: int, newer: str = "") -> None:
    patch.setattr(setup.sys, "version_info", (3, minor, 2))
    patch.setattr(setup, "_runs", lambda name: name == newer)


LACKS: list[tuple[Callable[[ModuleType, pytest.MonkeyPatch], object], str]] = [
    (lambda setup, patch: old_python(setup, patch, 10, "python3.12"),
     "Python 3.10 is too old, 3.11 or newer is needed"),
    (lambda setup, patch: old_python(setup, patch, 10, "python3.12"),
     "`make PYTHON=python3.12 setup`"),
    (lambda setup, patch: old_python(setup, patch, 9),
     "`apt-get install python3.11 python3.11-venv python3.11-dev`"),
    (lambda setup, patch: patch.setitem(sys.modules, "ensurepip", None),
     f"`apt-get install python3.{sys.version_info[1]}-venv`"),
    (lambda setup, patch: patch.setattr(setup.sysconfig, "get_path", lambda name: "/nowhere"),
     f"`apt-get install python3.{sys.version_info[1]}-dev`"),
]  # fmt: skip
"""What a machine lacks, and what is said of it; Debian ships Python without ensurepip."""


@pytest.mark.parametrize(("lack", "said"), LACKS)
def test_what_the_machine_lacks_is_refused_with_what_to_do(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    lack: Callable[[ModuleType, pytest.MonkeyPatch], object], said: str,
) -> None:  # fmt: skip
    """A newer Python that is at hand is named, else what installs one."""
    lack(setup, monkeypatch)
    assert said in refusal(setup, capsys)


@pytest.mark.parametrize(("gpu", "need"), [(None, 5), ("/usr/bin/nvidia-smi", 20)])
def test_full_disk_is_refused(
    setup: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu: str | None,
    need: int,
) -> None:
    """Before anything is downloaded, with what is free and what is needed."""
    which = shutil.which
    monkeypatch.setattr(
        setup.shutil, "which", lambda name: gpu if name == "nvidia-smi" else which(name)
    )
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: SimpleNamespace(free=1.25e9))
    assert f"1.2 GB are free at {setup.ROOT}, {need} GB are needed" in refusal(setup, capsys)


def test_missing_compiler_is_refused(project: Path, tmp_path: Path) -> None:
    """The whole script, run where no compiler is found: exit code 2 and nothing written."""
    (tmp_path / "bin").mkdir()
    done = run(PYTHON, project / "envs" / "setup.py", path=tmp_path / "bin")
    assert done.returncode == 2
    assert "no C++ compiler found" in one_sentence(done.stderr)
    assert "`apt-get install g++`" in done.stderr
    assert not (project / ".venv").exists()


def test_path_with_spaces_is_refused(tmp_path: Path) -> None:
    """torch's build of the ops does not quote paths."""
    project = clone(tmp_path / "my project")
    done = run(PYTHON, project / "envs" / "setup.py")
    assert done.returncode == 2
    assert "a path with spaces" in one_sentence(done.stderr)


def test_missing_python_is_refused(project: Path) -> None:
    """make itself says so, with the way to name another."""
    done = run("make", "-C", project, "setup", "PYTHON=python4")
    assert done.returncode == 2
    assert "ERROR: set-up: python4 was not found" in done.stderr + done.stdout
    assert "make PYTHON=python3.12 setup" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("Retrying ... NewConnectionError(...): ...", "package index cannot be reached"),
        ("Temporary failure in name resolution", "package index cannot be reached"),
        ("ERROR: Read timed out.", "package index cannot be reached"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("SSLError(CERTIFICATE_VERIFY_FAILED)", "a certificate that is not trusted"),
        ("ERROR: No matching distribution found for x==1", "no build for this Python"),
        ("cause: tcp connect error", "package index cannot be reached"),
        ("x No solution found when resolving dependencies", "no build for this Python"),
        ("cause: Hash mismatch for idna==3.1", "gives a file that is not the pinned one"),
        ("THESE PACKAGES DO NOT MATCH THE HASHES", "gives a file that is not the pinned one"),
        ("error: something else", "its last lines are"),
    ],
)
def test_failures_of_pip_are_reported_in_a_sentence(
    setup: ModuleType, capsys: pytest.CaptureFixture[str], output: str, sentence: str
) -> None:
    """Known causes get their own words and command, others the end of the log and its place."""
    setup.VENV.mkdir()
    with pytest.raises(SystemExit) as caught:
        setup.run("packages", "sh", "-c", f"echo '{output}'; exit 1", explain=setup.FAILURES)
    assert caught.value.code == 2
    text = one_sentence(capsys.readouterr().err)
    assert sentence in text
    assert str(setup.LOG) in text
    assert output in setup.LOG.read_text()


def test_our_own_sentences_are_passed_on(
    setup: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build of the ops explains itself; set-up adds nothing."""
    setup.VENV.mkdir()
    script = "echo noise; printf 'ERROR: no compiler\\n  Hint: install one\\n'; exit 2"
    with pytest.raises(SystemExit):
        setup.run("ops", "sh", "-c", script)
    assert capsys.readouterr().err == "ERROR: no compiler\n  Hint: install one\n"


def test_nothing_is_removed_through_a_linked_environment(
    project: Path, setup: ModuleType, tmp_path: Path
) -> None:
    """`make` with .venv as a link to another project's, whose entries it once removed."""
    other = tmp_path / "other"
    (other / "bin").mkdir(parents=True)
    (other / "bin" / "python").write_text("theirs")
    setup.VENV.symlink_to(other)
    done = run(PYTHON, project / "envs" / "setup.py")
    assert done.returncode == 2
    assert f".venv is a link, to {other}" in one_sentence(done.stderr)
    assert [path.name for path in other.rglob("*")] == ["bin", "python"]


def test_an_environment_of_something_else_is_not_removed(project: Path, setup: ModuleType) -> None:
    """As uv makes one, which has no pip; set-up would begin by removing it."""
    venv.create(setup.VENV, with_pip=False)
    own = setup.VENV / "lib" / "own.py"
    own.write_text("mine")
    done = run(PYTHON, project / "envs" / "setup.py")
    assert done.returncode == 2
    assert "is not from set-up" in one_sentence(done.stderr)
    assert own.read_text() == "mine"


def test_a_typo_in_config_is_found_before_set_up(project: Path) -> None:
    """Set-up takes minutes."""
    (project / "config").mkdir()
    (project / "config" / "mine.yaml").touch()
    done = run("make", "-C", project, "train", "CONFIG=config/mien.yaml")
    assert done.returncode == 2
    assert "ERROR: CONFIG: config/mien.yaml is not there." in done.stderr
    assert "config/mine.yaml" in done.stderr
    assert not (project / ".venv").exists()


@pytest.mark.slow
def test_broken_environment_is_made_again(setup: ModuleType) -> None:
    """What a killed set-up, a removed Python or a moved folder left is recognised."""
    rubbish = setup.VENV / "lib" / "rubbish"
    rubbish.mkdir(parents=True)
    setup.BIN.parent.mkdir()
    setup.BIN.symlink_to("/nowhere/python3")
    with setup.only_one():
        setup.make_environment()
    assert not rubbish.exists()
    assert setup._is_healthy()
    activate = setup.VENV / "bin" / "activate"
    activate.write_text(activate.read_text().replace(str(setup.VENV), "/elsewhere/.venv"))
    assert not setup._is_healthy()


def test_half_installed_packages_are_cleared(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip and uv would take them for installed; whole packages stay."""
    monkeypatch.setattr(setup, "_is_healthy", lambda: True)
    packages = setup.VENV / "lib" / "python3.11" / "site-packages"
    for name in ("half-1.dist-info", "half-2.dist-info", "whole-1.dist-info", "~orch", "whole"):
        (packages / name).mkdir(parents=True)
    (packages / "half-2.dist-info" / "RECORD").touch()
    for name in ("RECORD", "INSTALLER"):
        (packages / "whole-1.dist-info" / name).touch()
    setup.make_environment()
    assert sorted(path.name for path in packages.iterdir()) == ["whole", "whole-1.dist-info"]


def test_uv_looks_where_pip_looks(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pip's file and variables hold for uv, a variable before the file; uv's own stay."""
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nindex-url = https://mirror/simple\ncert = /file.pem\ntimeout = 9\n"
        "extra-index-url =\n    https://one/simple\n    https://two/simple\n"
    )
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_CERT", "/variable.pem")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels /more")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "30")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "mirror")
    monkeypatch.setenv("PIP_KEYRING_PROVIDER", "import")
    assert setup.uv_settings(setup.pip_settings(PYTHON)) == {
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INSECURE_HOST": "mirror",
        "UV_KEYRING_PROVIDER": "subprocess",
        "SSL_CERT_FILE": "/variable.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


@pytest.fixture
def installers(setup: ModuleType) -> Path:
    """A file with the calls of Python and uv, which do nothing: uv takes torch's build rocm."""
    tools = setup.VENV / "bin"
    tools.mkdir(parents=True)
    calls = setup.VENV / "calls"
    for name in ("python", "uv"):
        file = tools / name
        file.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {calls}\ncase "$*" in\n'
            f"*compiled_ops) [ -e {setup.VENV}/later ] && read word < {setup.VENV}/later\n"
            f"echo compiled;;\n"
            f"*compile*) echo torch==2.13.0+rocm > {setup.VENV}/tmp/found.txt;;\n"
            f"*pins.txt*) cp {setup.VENV}/tmp/*.txt {setup.VENV};;\nesac\n"
        )
        file.chmod(0o755)
    return calls


def test_every_package_is_installed_by_its_hash(setup: ModuleType, installers: Path) -> None:
    """uv as well; torch in the build that the machine takes, with the hashes of its version."""
    setup.install()
    lines = installers.read_text("utf-8").splitlines()
    installs = [line for line in lines if " install " in line]
    assert [line for line in installs if "--require-hashes" not in line] == [
        f"uv pip install --python {setup.BIN} --no-build-isolation --no-deps -e {setup.ROOT}"
    ]
    constraints = setup.CONSTRAINTS.read_text().splitlines()
    expected = [
        line.replace("torch==2.13.0 ", "torch==2.13.0+rocm ") for line in constraints
        if line[0] != "#"
    ]  # fmt: skip
    assert (setup.VENV / "pins.txt").read_text().splitlines() == expected
    assert [line for line in constraints if line.startswith("uv==")] == (
        setup.VENV / "uv.txt"
    ).read_text().splitlines()


def test_the_compiling_of_ops_yields_to_all_else(setup: ModuleType) -> None:
    """In its session, and as a session among others, which Linux shares cores among first."""
    done = subprocess.run(
        ["sh", "-c", "nice; cat /proc/self/autogroup 2>/dev/null"], start_new_session=True,
        preexec_fn=setup.yield_to_others, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    niceness, *session = done.stdout.splitlines()
    assert niceness == "19"
    assert all(line.endswith(" nice 19") for line in session)


def test_ops_are_compiled_while_set_up_goes_on(setup: ModuleType, installers: Path) -> None:
    """Set-up ends first; a training that needs them waits for them."""
    os.mkfifo(setup.VENV / "later")
    setup.install()
    assert not setup.OPS_LOG.read_text()
    (setup.VENV / "later").write_text("now\n")  # waits for who reads it
    wait_until(lambda: setup.OPS_LOG.read_text() == "compiled\n")
    assert "python -m zerotrain.machine.compiled_ops" in installers.read_text("utf-8").splitlines()


def test_the_build_that_is_installed_is_downloaded(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not the one of the package index, which pip prefers; with the packages of CUDA in use."""
    calls: list[str] = []
    monkeypatch.setattr(setup, "run", lambda *words, **more: calls.append(words[-1].read_text()))
    packages = {"torch": "2.13.0+rocm", "Triton": "3.7.1"}
    found = [SimpleNamespace(metadata={"Name": k}, version=v) for k, v in packages.items()]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    setup.download(tmp_path)
    (pins,) = calls
    names = [line.split()[0] for line in pins.splitlines()]
    assert "torch==2.13.0+rocm" in names
    assert [name for name in names if name.startswith(("nvidia", "cuda", "triton"))] == [
        "triton==3.7.1"
    ]


def test_bytecode_is_kept_whatever_the_container_says(setup: ModuleType, tmp_path: Path) -> None:
    """Each process would compile what it imports again."""
    venv.create(setup.VENV, with_pip=False)
    setup.keep_bytecode()
    (packages,) = setup.VENV.glob("lib/python3*/site-packages")
    (packages / "module.py").write_text("VALUE = 1\n")
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([setup.BIN, "-c", "import module"], env=env, check=True)
    assert [*packages.glob("__pycache__/module.*.pyc")]


def test_uv_asks_no_index_where_pip_asks_none(
    setup: ModuleType, installers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a set-up without a network, from fetched wheels."""
    monkeypatch.setattr(setup, "pip_settings", lambda python: {"no-index": "1"})
    setup.install()
    by_uv = [line for line in installers.read_text("utf-8").splitlines() if line.startswith("uv ")]
    assert len(by_uv) == 5
    assert all("--no-index" in line for line in by_uv)


def test_second_call_does_nothing_until_an_input_changes(
    setup: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stamp holds the content of the pins and of pyproject.toml, not their dates."""
    steps: list[str] = []
    for step in ("check_machine", "make_environment", "install"):
        monkeypatch.setattr(setup, step, lambda step=step: steps.append(step))
    setup.main()
    assert steps == ["check_machine", "make_environment", "install"]
    setup.BIN.parent.mkdir()
    setup.BIN.symlink_to(PYTHON)
    for path in setup.INPUTS:
        steps.clear()
        path.touch()
        setup.main()
        assert steps == []
        path.write_text(path.read_text() + "\n")
        setup.main()
        assert steps[-1] == "install"
    done = run("make", "-C", project, "--no-print-directory", "setup")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_interrupted_set_up_is_not_taken_for_done(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stamp is written last."""
    monkeypatch.setattr(setup, "check_machine", lambda: None)
    monkeypatch.setattr(setup, "make_environment", lambda: None)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup.main()
    assert not setup.is_done()


def test_every_target_has_a_line_of_help() -> None:
    """`make` alone lists what there is."""
    done = run("make", "-C", ROOT, "--no-print-directory")
    for target in ("setup", "train", "test", "test-full", "lint", "clean"):
        assert f"make {target} " in done.stdout
