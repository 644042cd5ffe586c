"""Whole runs of the pipeline on odd systems, and on disks that fill or become read-only between
stages: the same weights as an undisturbed run, or one sentence and then the same weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from tests.conftest import Mount, copy_quick_project

CONFIG = {
    "run": "tiny",
    "seed": 1,
    "base": "nano",
    "data": {"images": "photos", "holdout": 0.34, "num_workers": 0},
    "train": {"resolution": 16, "global_batch_size": 2, "save_every": 2},
    "launch": {"num_cpu_threads_per_process": 1},
    "phases": [{"name": "only", "until": 3, "launch": "torch"}],
    "evaluate": {"images_per_prompt": 1, "num_inference_steps": 1, "judge": "nearest_neighbour"},
}
STAGES = (
    ("prepare_dataset", "data/tiny/manifest.json"),
    ("build_base", "tiny/base/manifest.json"),
    ("cache_latents", "data/tiny/cache/16/manifest.json"),
    ("render_launch", "tiny/only/launch/manifest.json"),
    ("train_phase", "tiny/only/checkpoint/manifest.json"),
    ("export_weights", "tiny/only/weights/manifest.json"),
    ("evaluate", "tiny/only/metrics.json"),
    ("report", "tiny/report/manifest.json"),
)
"""Each stage with what it makes below results/."""
NOBODY = 65534
AS_NOBODY = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
    # Reads the interpreter wherever it is installed, and writes nothing of root's.
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip


class Project:
    """A copy of the project with a run of three steps on eight images."""

    def __init__(self, folder: Path) -> None:
        self.folder = copy_quick_project(folder)
        self.results = folder / "results"
        photos = folder / "photos"
        photos.mkdir()
        draw = np.random.default_rng(0)
        for number in range(8):
            pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(photos / f"café {number}.png")
            (photos / f"café {number}.txt").write_text(f"un café n° {number}", encoding="utf-8")
        config = folder / "config/config.yaml"
        config.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")

    def snakemake(self, target: str, *before: str, **environment: str) -> tuple[int, str]:
        """Exit code and output of the pipeline up to a target."""
        inherited = {name: value for name, value in os.environ.items() if name != "LC_ALL"}
        done = subprocess.run(
            [*before, sys.executable, "-m", "snakemake", "--cores", "all", target],
            cwd=self.folder,
            env=inherited | {"PYTHONPATH": str(self.folder / "workflow")} | environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace", timeout=600,
        )  # fmt: skip
        return done.returncode, done.stdout

    def train(self, *before: str, **environment: str) -> dict[str, str]:
        """Run the whole pipeline; sha256 of each file of the weights."""
        code, said = self.snakemake("train", *before, **environment)
        assert code == 0, said[-6000:]
        return self.weights()

    def weights(self) -> dict[str, str]:
        """sha256 of each file of the weights."""
        manifest = self.results / "tiny/only/weights/manifest.json"
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return {name: entry["sha256"] for name, entry in files.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights of a run on an ordinary system."""
    weights = Project(tmp_path_factory.mktemp("plain") / "project").train()
    assert "unet/diffusion_pytorch_model.safetensors" in weights
    return weights


@pytest.mark.slow
def test_an_odd_path_a_strict_umask_and_no_locale(
    undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """Spaces, quotes and accents above the project; nobody else may read what a run makes."""
    project = Project(tmp_path / 'l\'été "dans" $un dossier')
    before = os.umask(0o077)
    try:
        assert project.train(LC_ALL="C") == undisturbed
    finally:
        os.umask(before)
    open_to_others = [
        path for path in project.results.rglob("*")
        if not path.is_symlink() and path.stat().st_mode & 0o077
    ]  # fmt: skip
    assert open_to_others == []


@pytest.mark.soak
def test_an_ordinary_user_with_a_read_only_home_and_latin_letters(
    undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """Only results/ and Snakemake's folder are the user's; the locale's encoding is ISO-8859-1."""
    if os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("localedef"):
        pytest.skip("needs root, setpriv and localedef")
    locales = tmp_path / "locales"
    locales.mkdir()
    made = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(locales / "en_US.iso88591")]
    if subprocess.run(made, capture_output=True).returncode:
        pytest.skip("the locale's sources are not installed")
    project = Project(tmp_path / "project")
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    for folder in (project.results, project.folder / ".snakemake"):
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
    latin = {"LC_ALL": "en_US.ISO-8859-1", "LOCPATH": str(locales)}
    shown = subprocess.run(
        [sys.executable, "-c", "import locale; print(locale.getencoding())"],
        env=os.environ | latin, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout == "ISO-8859-1\n"
    assert project.train(*AS_NOBODY, HOME=str(home), **latin) == undisturbed
    assert list(home.iterdir()) == []
    assert {path.stat().st_uid for path in project.results.rglob("*")} == {NOBODY}


def one_sentence(said: str, trouble: str) -> bool:
    """Whether each stage that failed has one ERROR with this trouble, and there is no traceback."""
    errors = [line for line in said.splitlines() if line.startswith("ERROR: ")]
    stages = max(1, said.count(": failed after "))  # two may run at once
    right = len(errors) == stages and all(trouble in error for error in errors)
    return right and "Traceback" not in said


@pytest.mark.soak
def test_a_disk_that_fills_before_each_stage(
    undisturbed: dict[str, str], tmp_path: Path, mount: Mount
) -> None:
    """Full, or read-only, where a stage starts: its sentence; with room again, the run goes on and
    ends with the same weights, and what was there keeps its bytes."""
    project = Project(tmp_path / "project")
    mount(project.results, "size=256m")
    for stage, made in STAGES:
        kept = {path: path.read_bytes() for path in project.results.rglob("manifest.json")}
        filler = project.results / "filler"
        with filler.open("wb", buffering=0) as stream:
            while free := shutil.disk_usage(project.results).free:
                stream.write(bytes(min(free, 1 << 20)))
        code, said = project.snakemake("train")
        assert code, stage
        assert one_sentence(said, "No space left on device"), f"{stage}: {said}"
        filler.unlink()
        mount(project.results, "ro")
        code, said = project.snakemake("train")
        assert code, stage
        assert one_sentence(said, "Read-only file system"), f"{stage}: {said}"
        mount(project.results, "rw")
        assert kept == {path: path.read_bytes() for path in kept}, stage
        code, said = project.snakemake(f"results/{made}")
        assert code == 0, f"{stage}: {said}"
    assert project.train() == undisturbed
