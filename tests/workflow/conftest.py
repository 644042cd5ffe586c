"""Copies of the project in which a fake stands in for the zerotrain command.

Snakemake, DVC, the rules, the configuration and the package that the Snakefile reads are the real
ones; only the stages do not run.
"""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zerotrain.config.families import FAMILIES

ROOT = Path(__file__).parents[2]
COPIED = ("Snakefile", "rules", "config", "profiles", "envs", "workflow/zerotrain",
          ".dvc/config", ".dvcignore", ".gitignore")  # fmt: skip
FAKE = Path(__file__).with_name("fake_zerotrain.py")
SERVER = Path(__file__).with_name("command_server.py")
CLIENT = Path(__file__).with_name("forked_command.py")
ENVIRONMENT_BIN = Path(sys.executable).parent
SECONDS = 300
"""Longer than any command takes."""

CONFIG = """\
# Two phases over a folder of images.
run: tiny
seed: 1
base: {base}

data:
  images: photos
  num_workers: 1

train:
  resolution: 64
  learning_rate: 1.0e-3

launch:
  num_cpu_threads_per_process: 1

phases:
  - name: plain
    until: 300
    launch: torch
  - name: offload
    until: 700
    launch: zero2_offload

export:
  dtype: fp32

evaluate:
  guidance_scale: 3.0
"""

Jobs = dict[str, int]


class Project:
    """A copy of the project with a run of its own."""

    def __init__(self, folder: Path, server: Path) -> None:
        self.folder = folder
        self.server = server
        commands = [str(folder / "bin"), str(server.parent), str(ENVIRONMENT_BIN), os.defpath]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not _leads_away(name)},
            "PATH": os.pathsep.join(commands),
            "PYTHONPATH": str(folder / "workflow"),
            # A source edited twice within a second must not be read from its first compilation.
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def command(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the project; stdout and stderr come together as `stdout`.

        `snakemake`, `dvc` and `python -m zerotrain` are forks that need not import their libraries,
        and so are those that they start, but where a PYTHONPATH is given, which may hold what
        Python reads as it starts.
        """
        forked = {"COMMAND_SERVER": str(self.server)} if "PYTHONPATH" not in environment else {}
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment | forked | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )

    def must(self, *words: str, code: int = 0, **environment: str) -> str:
        """What a command prints that ends with this code."""
        done = self.command(*words, **environment)
        assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def snakemake(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `snakemake`, whether or not it ends well."""
        return self.command("snakemake", *words, **environment)

    def hang(
        self, stage: str, *words: str, stdout: int = subprocess.DEVNULL, **environment: str
    ) -> subprocess.Popen[str]:
        """A command, in a process group of its own, whose stage does not end, or that has ended."""
        process = subprocess.Popen(
            words, cwd=self.folder, env=self.environment | {"HANG": stage} | environment, text=True,
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        calls = self.folder / "calls.txt"
        while process.poll() is None:
            if calls.is_file() and re.search(rf"^{stage} ", calls.read_text(), re.M):
                break
            time.sleep(0.01)
        return process

    def build(self, *words: str) -> None:
        """Make everything, or what is asked for."""
        self.must("snakemake", "--cores", "2", *words)

    def forked(self, *words: str, **environment: str) -> tuple[int, str]:
        """The exit code of `snakemake`, and what it printed."""
        done = self.snakemake(*words, **environment)
        return done.returncode, done.stdout

    def planned(self, *words: str) -> Jobs:
        """The jobs that `snakemake -n` lists, by rule; target rules do nothing and are left out."""
        code, said = self.forked("-n", *words)
        assert code == 0, said
        return jobs_of(said)

    def calls(self) -> list[str]:
        """The stages that ran since the last question."""
        return [call.split()[0] for call in self._called()]

    def made(self) -> list[str]:
        """The first output of each stage that ran since the last question."""
        return [call.split()[1] for call in self._called()]

    def _called(self) -> list[str]:
        path = self.folder / "calls.txt"
        found = path.read_text().splitlines() if path.is_file() else []
        path.unlink(missing_ok=True)
        return found

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text that stands once in a file."""
        path = self.folder / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name}: {old!r} stands {text.count(old)} times"
        path.write_text(text.replace(old, new))

    def append(self, name: str, text: str) -> None:
        """Add a text to the end of a file."""
        with (self.folder / name).open("a") as stream:
            stream.write(text)

    def copy_to(self, folder: Path) -> Project:
        """The same project in another folder: contents, times and Snakemake's records."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return self.at(folder)

    def at(self, folder: Path) -> Project:
        """A project that is in another folder already."""
        return Project(folder, self.server)


def _leads_away(name: str) -> bool:
    return name.startswith(("SNAKEMAKE_", "DVC_")) or name in ("VIRTUAL_ENV", "FAIL")


def jobs_of(output: str) -> Jobs:
    """The jobs that a dry run counts in its last line; empty if it says that there are none."""
    if "Nothing to be done" in output:
        return {}
    found = re.search(r"^(\d+) stages? would run: (.+)$", output, re.M)
    assert found, output
    counts = {rule: int(count) for count, rule in re.findall(r"(\d+) (\w+)", found[2])}
    assert int(found[1]) == sum(counts.values())
    return counts


@pytest.fixture(scope="session")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a process that runs commands in forks of itself; next to it are its clients.

    The copies of the project take along what is compiled.
    """
    compileall.compile_dir(ROOT / "workflow/zerotrain", quiet=2)
    folder = tmp_path_factory.mktemp("commands")
    for name in ("snakemake", "dvc", "python"):
        (folder / name).write_text(f"#!{sys.executable} -IS\n{CLIENT.read_text()}")
        (folder / name).chmod(0o755)
    server = [sys.executable, str(SERVER), str(folder / "socket")]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield folder / "socket"
        process.terminate()


def create(folder: Path, base: str, planner: Path) -> Project:
    """A copy of the project in which nothing has been made."""
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
    (folder / "config" / "config.yaml").write_text(CONFIG.format(base=base))
    for name in ("cat", "dog"):
        photo = folder / "photos" / f"{name}.png"
        photo.parent.mkdir(exist_ok=True)
        photo.write_bytes(f"pixels of a {name}".encode())
        photo.with_suffix(".txt").write_text(f"a {name}\n")
    _write_base(folder / "sdxl")
    command = folder / "bin" / "zerotrain"
    command.parent.mkdir()
    # -I and -S: a client needs nothing but the standard library, and starts the sooner.
    client = CLIENT.read_text().replace(repr(FAKE.name).replace("'", '"'), repr(str(FAKE)))
    command.write_text(f"#!{sys.executable} -IS\n{client}")
    command.chmod(0o755)
    return Project(folder, planner)


def _write_base(folder: Path) -> None:
    """A folder with the names of an SDXL's files; its weights are bytes that no one reads."""
    layout = FAMILIES["sdxl"]
    index = {part: ["diffusers", layout.classes.get(part, "Class")] for part in layout.parts}
    for part in layout.parts:
        (folder / part).mkdir(parents=True)
        if part in layout.classes:
            stem = "model" if part.startswith("text") else "diffusion_pytorch_model"
            (folder / part / "config.json").write_text("{}\n")
            (folder / part / f"{stem}.safetensors").write_bytes(b"weights")
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "scheduler" / "scheduler_config.json").write_text("{}\n")
    for part in ("tokenizer", "tokenizer_2"):
        for name in ("tokenizer_config.json", "vocab.json", "merges.txt"):
            (folder / part / name).write_text("{}\n")
    # Above the size up to which Snakemake compares contents unless it is told otherwise.
    weights = folder / layout.trained_part / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(bytes(1_100_000))


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory, planner: Path) -> Callable[[str], Project]:
    """One built project for each kind of base, made when first asked for."""
    made: dict[str, Project] = {}

    def get(base: str) -> Project:
        if base not in made:
            project = create(tmp_path_factory.mktemp("built") / "project", base, planner)
            project.build("train")
            project.calls()
            made[base] = project
        return made[base]

    return get


@pytest.fixture
def project(tmp_path: Path, planner: Path) -> Project:
    """A copy of the project in which nothing has been made; base: nano."""
    return create(tmp_path / "project", "nano", planner)


@pytest.fixture
def built(tmp_path: Path, _built: Callable[[str], Project]) -> Project:
    """A copy in which everything has been made; base: nano."""
    return _built("nano").copy_to(tmp_path / "project")


@pytest.fixture
def built_on_folder(tmp_path: Path, _built: Callable[[str], Project]) -> Project:
    """A copy in which everything has been made; the base model lies in the folder sdxl."""
    return _built("sdxl").copy_to(tmp_path / "project")
