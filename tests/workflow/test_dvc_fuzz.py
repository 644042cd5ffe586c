"""Snakemake and DVC on one run, in any order and after any accident, against builds from nothing.

Of stages that a fake stands in for, whose bytes tell what they were made from: after every whole
run of either tool the outputs are those of a build from nothing, nothing ran whose output was right
already, and both tools say that there is nothing to do. In CI each kind of step has a test of its
own, in test_dvc_agreement.py, test_dvc_restore.py and test_dvc_experiments.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.builders.git import init_repository, set_author
from tests.workflow.conftest import Project

pytestmark = pytest.mark.soak

CONFIG = "config/config.yaml"
DISAGREED = "above it says why"
"""What stands in our warnings; DVC has some of its own after a kill."""
STAGES = ("prepare_dataset", "build_base", "cache_latents", "render_launch", "train_phase",
          "export_weights", "evaluate", "report")  # fmt: skip
RAISED = ("train_phase", "export_weights", "evaluate", "report")
"""Stages whose version is raised: none makes other inputs of a training that is kept."""
MADE = ("manifest.json", "metrics.json", "payload.bin")
SOURCES = ("Snakefile", "rules", "config", "profiles", "envs", "workflow", "photos", "sdxl", "bin")


class Fuzz:
    """A run, and what may happen to it."""

    def __init__(self, project: Project, seed: int) -> None:
        self.project = project
        self.random = random.Random(seed)
        self.known: dict[str, dict[str, str]] = {}
        self.killed: set[str] = set()
        self.unknown: set[str] = set()
        self.branches = ["main"]
        self.number = 0
        self.story: list[str] = []
        self.checked = 0
        self.cache = project.folder.with_name("dvc-cache")
        self.must("python", "-m", "zerotrain", "dvc", "generate")
        init_repository(self.must)
        self.must("dvc", "cache", "dir", "--local", str(self.cache))
        project.append(".gitignore", "/calls.txt\n")
        self.must("git", "add", ".")
        self.must("git", "commit", "-q", "-m", "begin")

    def must(self, *words: str) -> str:
        done = self.project.command(*words)
        assert done.returncode == 0, self.report(done.stdout)
        return done.stdout

    def report(self, said: str) -> str:
        return "\n".join([*self.story, said[-6000:]])

    # What is right.

    def outputs(self, folder: Path) -> dict[str, str]:
        """Hashes of all that rules make."""
        found = {}
        for path in sorted((folder / "results").rglob("*")):
            name = str(path.relative_to(folder))
            if path.name in MADE and "/progress/" not in name:
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    def oracle(self) -> dict[str, str]:
        """What a build from nothing makes of the sources as they are."""
        digest = hashlib.sha256()
        for name in ("config", "workflow", "rules", "photos"):
            for path in sorted((self.project.folder / name).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    digest.update(f"{path.relative_to(self.project.folder)}\0".encode())
                    digest.update(path.read_bytes())
        if digest.hexdigest() not in self.known:
            folder = self.project.folder.with_name("oracle")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for name in SOURCES:
                source = self.project.folder / name
                if source.is_dir():
                    shutil.copytree(source, folder / name)
                else:
                    shutil.copy2(source, folder / name)
            scratch = self.project.at(folder)
            code, said = scratch.forked("--cores", "2", "train")
            assert code == 0, self.report(said)
            self.known[digest.hexdigest()] = self.outputs(folder)
        return self.known[digest.hexdigest()]

    # What tools do.

    def whole_run(self, run: Callable[[], tuple[int, str]]) -> None:
        right, before = self.oracle(), self.outputs(self.project.folder)
        self.project.made()
        code, said = run()
        assert code == 0, self.report(said)
        self.check(right, before, said)

    def check(self, right: dict[str, str], before: dict[str, str], said: str) -> None:
        made = self.project.made()
        assert DISAGREED not in said, self.report(said)
        assert "not entered" not in said, self.report(said)
        here = self.outputs(self.project.folder)
        unsound = {name for name, digest in right.items() if here.get(name) != digest}
        assert not unsound, self.report(f"{said}\nunsound: {unsound}")
        # A stage has one call: its first output stands for all.
        spurious = {n for n in made if before.get(n) == right[n]} - self.killed - self.unknown
        assert not spurious, self.report(f"{said}\nspurious: {spurious}")
        assert len(made) == len(set(made)), self.report(f"{said}\ntwice: {made}")
        self.killed.clear()
        self.unknown.clear()
        self.nothing_to_do()
        self.checked += 1

    def nothing_to_do(self) -> None:
        status = self.must("dvc", "status")
        assert "up to date" in status, self.report(status)
        code, said = self.project.forked("-n", "train")
        assert code == 0, self.report(said)
        assert "Nothing to be done" in said, self.report(said)
        assert DISAGREED not in said, self.report(said)

    def snakemake(self) -> None:
        self.whole_run(lambda: self.project.forked("--cores", "2", "train"))

    def repro(self) -> None:
        def run() -> tuple[int, str]:
            self.must("python", "-m", "zerotrain", "dvc", "generate")
            self.unknown = self.unknown_to_dvc()
            done = self.project.command("dvc", "repro")
            return done.returncode, done.stdout

        self.whole_run(run)

    def unknown_to_dvc(self) -> set[str]:
        """Outputs of stages with folders that persist, which dvc.lock has not as they are now, such
        as after a checkout of a branch alone. DVC takes no such stage from its run-cache: it calls
        it, and the stage finds its work done."""
        changed = json.loads(self.must("dvc", "status", "--json"))
        stages = yaml.safe_load((self.project.folder / "dvc.yaml").read_text())["stages"]
        return {
            stages[name]["cmd"].split()[-1]
            for name in changed
            if any(isinstance(out, dict) for out in stages.get(name, {}).get("outs", ()))
        }

    def part(self) -> None:
        """A target that is not the last one."""
        target = self.random.choice(["dataset", "cache", "launch", "weights"])
        self.story[-1] += f" {target}"
        code, said = self.project.forked("--cores", "2", target)
        assert code == 0, self.report(said)
        self.project.made()

    def fail(self) -> None:
        stage = self.random.choice(STAGES)
        tool = self.random.choice(["snakemake", "dvc"])
        self.story[-1] += f" {stage} under {tool}"
        words = ("snakemake", "--cores", "2", "train") if tool == "snakemake" else ("dvc", "repro")
        self.project.command(*words, FAIL=stage)
        self.project.made()

    def kill(self) -> None:
        """kill -9 of a tool and of all that it has started, while a stage runs."""
        stage = self.random.choice(STAGES)
        tool = self.random.choice(["snakemake", "dvc"])
        self.story[-1] += f" {stage} under {tool}"
        words = ("snakemake", "--cores", "2", "train") if tool == "snakemake" else ("dvc", "repro")
        process = self.project.hang(stage, *words)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # What was under way has to run again, though nothing of it was wrong.
        self.killed.update(self.project.made()[-2:])
        self.must("snakemake", "--unlock")

    def meanwhile(self) -> None:
        """Values are edited while a stage runs that takes them in."""
        stage = self.random.choice(STAGES)
        edit = f"{stage}|{CONFIG}|_scale: {self.random.choice('123')}|_scale: 4"
        tool = self.random.choice(["snakemake", "dvc"])
        self.story[-1] += f" {edit!r} under {tool}"
        words = ("snakemake", "--cores", "2", "train") if tool == "snakemake" else ("dvc", "repro")
        self.project.command(*words, EDIT=edit)
        self.project.made()

    # What people do.

    def new_number(self) -> int:
        self.number += 1
        return self.number

    def edit(self) -> None:
        folder = self.project.folder
        what = self.random.choice([
            "image", "old image", "config", "version", "comment", "phase"
        ])  # fmt: skip
        number = self.new_number()
        if what in ("image", "old image"):
            name = self.random.choice(["cat", "dog", f"{number % 4}"])
            path = folder / "photos" / f"{name}.png"
            path.write_bytes(f"pixels {number % 3}".encode())
            path.with_suffix(".txt").write_text(f"a {name}\n")
            if what == "old image":
                os.utime(path, (10**9, 10**9))
        elif what == "config":
            key = self.random.choice(["learning_rate: 1.0e-3", "until: 700", "guidance_scale: 3.0"])
            self._replace(CONFIG, key.partition(":")[0], number)
            what = key
        elif what == "phase":
            self._another_phase()
        elif what == "comment":
            self.project.append(CONFIG, f"# {number}\n")
        else:
            stage = self.random.choice(RAISED)
            path = folder / "workflow/zerotrain/artifact/stage_versions.py"
            text = path.read_text()
            path.write_text(re.sub(rf'"{stage}": \\d+', f'"{stage}": {number}', text))
            what += f" of {stage}"
        self.story[-1] += f" {what}"

    def _another_phase(self) -> None:
        """One more at the end, or the last of three gone; for DVC, dvc.yaml is generated again."""
        path = self.project.folder / CONFIG
        text = path.read_text()
        more, last = "  - {name: more, until: 900, launch: torch}\n", "    launch: zero2_offload\n"
        path.write_text(text.replace(more, "") if more in text else text.replace(last, last + more))

    def _replace(self, name: str, key: str, number: int) -> None:
        """Another of few values for the last line that has the key: former ones come back."""
        path = self.project.folder / name
        lines = path.read_text().splitlines(keepends=True)
        at = max(i for i, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        number = 1 + number % 3
        value = {"learning_rate": f"{number}.0e-3", "until": str(700 + number)}
        lines[at] = f"{indent}{key}: {value.get(key, f'{number}.0')}\n"
        path.write_text("".join(lines))

    def touch(self) -> None:
        """New times on inputs and outputs."""
        folder = self.project.folder
        paths = [*folder.glob("photos/*"), *folder.glob("workflow/zerotrain/stages/*.py")]
        paths += [*folder.glob("results/**/manifest.json"), *folder.glob("results/**/metrics.json")]
        for path in self.random.sample(sorted(paths), k=min(5, len(paths))):
            path.touch()

    def commit(self) -> None:
        self.must("git", "add", ".")
        self.must("git", "commit", "-q", "--allow-empty", "-m", f"{self.new_number()}")

    def checkout(self) -> None:
        """To another branch, its files brought back as far as DVC has them."""
        self.commit()
        if len(self.branches) < 3 and self.random.random() < 0.6:
            name = f"branch-{self.new_number()}"
            self.must("git", "checkout", "-q", "-b", name)
            self.branches.append(name)
        else:
            name = self.random.choice(self.branches)
            self.must("git", "checkout", "-q", name)
        self.story[-1] += f" {name}"
        if self.random.random() < 0.7:
            self.story[-1] += ", dvc checkout"
            self.project.command("dvc", "checkout", "--force")

    def clone(self) -> None:
        """On with a fresh clone that has the cache of the old one."""
        self.commit()
        folder = self.project.folder.with_name(f"clone-{self.new_number()}")
        self.must("git", "clone", "-q", str(self.project.folder), str(folder))
        shutil.copytree(self.project.folder / "photos", folder / "photos", dirs_exist_ok=True)
        branch = self.must("git", "branch", "--show-current").strip()
        self.project = self.project.at(folder)
        self.branches = [branch]
        set_author(self.must)
        self.must("dvc", "cache", "dir", "--local", str(self.cache))
        self.project.command("dvc", "checkout")

    def experiment(self) -> None:
        """`dvc exp run`, back to where it began, and `dvc exp apply`."""
        self.snakemake()
        self.commit()
        name = f"exp-{self.new_number()}"
        scale = f"{CONFIG}:evaluate.guidance_scale={self.number % 3 + 1}.5"
        # DVC writes 1e-05, which YAML 1.1 reads as text.
        rate = f"{CONFIG}:train.learning_rate={self.number % 3 + 1}e-5"
        said = self.must("dvc", "exp", "run", "-n", name, "-S", scale, "-S", rate)
        self.check(self.oracle(), {}, said)
        self.must("git", "checkout", "-q", "--", ".")
        self.must("dvc", "checkout", "--force")
        self.nothing_to_do()
        self.must("dvc", "exp", "apply", name)
        self.check(self.oracle(), {}, "")

    def step(self) -> None:
        """One thing or another."""
        weights = {
            self.edit: 10, self.touch: 3, self.snakemake: 8, self.repro: 4, self.part: 2,
            self.fail: 3, self.kill: 2, self.checkout: 3, self.clone: 1,
            self.experiment: 1, self.meanwhile: 2,
        }  # fmt: skip
        (act,) = self.random.choices(list(weights), list(weights.values()))
        self.story.append(act.__name__)
        act()


def run(project: Project, seed: int, steps: int) -> int:
    """Steps of a seed, with a whole run of each tool at the end; how many runs were checked."""
    fuzz = Fuzz(project, seed)
    for _ in range(steps):
        fuzz.step()
        print(f"seed {seed}: {fuzz.story[-1]}", flush=True)
    for act in (fuzz.snakemake, fuzz.repro):
        fuzz.story.append(act.__name__)
        act()
    return fuzz.checked


@pytest.mark.parametrize(("seed", "steps"), [(1, 6), (11, 10), (11, 20), (12, 20), (13, 20)])
def test_dvc_and_snakemake_agree_whatever_happens(project, seed, steps):
    """Many steps of each seed."""
    assert run(project, seed, steps) >= 2 + steps // 10


def test_an_experiment_of_dvc_is_run_left_and_applied(project):
    """`dvc exp run`, back to where it began, and `dvc exp apply`: right and agreed each time."""
    fuzz = Fuzz(project, 0)
    fuzz.experiment()
    assert fuzz.checked == 3
