"""A start hashes what training opens, once on a machine, and none of the base's other weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders.phases import make_tiny_phase

from zerotrain import artifact
from zerotrain.artifact import verdicts
from zerotrain.errors import PipelineError
from zerotrain.launch.files import write_run_yaml
from zerotrain.training.checkpointing import preflight

LARGE = 100
FILES = {
    "unet/diffusion_pytorch_model.safetensors": LARGE,
    "text_encoder/model.safetensors": LARGE,
    "vae/diffusion_pytorch_model.safetensors": LARGE,
    "scheduler/scheduler_config.json": 5,
}
UNET, ENCODER, DECODER, SCHEDULER = FILES


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were hashed, by their folder and name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(verdicts, "LEAST_BYTES", LARGE)
    monkeypatch.setattr(verdicts, "SETTLED_SECONDS", 0.0)
    found: list[str] = []

    def sha256(path: Path) -> str:
        found.append("/".join(path.parts[-2:]))
        return artifact.file_sha256(path)

    monkeypatch.setattr(preflight, "file_sha256", sha256)
    return found


def publish(folder: Path, kind: str, files: dict[str, int]) -> None:
    with artifact.publish(folder, kind) as draft:
        for name, size in files.items():
            path = draft.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes(size))


def read(folder: Path, validation: bool = False) -> preflight.Inputs:
    """Read the inputs as a start does; they are made at the first call."""
    phase = make_tiny_phase("a", "torch", 1)
    if validation:
        phase = phase.with_values(validation={"prompts": ["boat"]})
    with artifact.publish(folder / "launch", "launch") as draft:
        write_run_yaml(phase, draft.folder / "run.yaml")
    if not (folder / "base").exists():
        publish(folder / "base", "base", FILES)
        publish(folder / "cache", "cache", {"text/a.safetensors": LARGE})
        publish(folder / "state", "state", {"x/master.safetensors": LARGE, "x/state.json": 2})
    return preflight.read_inputs(*(folder / name for name in ("launch", "base", "cache", "state")))


def test_what_training_opens_is_hashed_once(tmp_path: Path, hashed: list[str]) -> None:
    """The second start, of any process of this machine, hashes small files alone."""
    read(tmp_path)
    small = [SCHEDULER, "x/state.json"]
    assert sorted(hashed) == sorted([UNET, "text/a.safetensors", "x/master.safetensors", *small])
    hashed.clear()
    read(tmp_path)
    assert sorted(hashed) == small
    hashed.clear()
    read(tmp_path, validation=True)
    assert sorted(hashed) == [SCHEDULER, DECODER, "x/state.json"], "it decodes samples"


@pytest.mark.parametrize("name", [f"base/{UNET}", f"base/{SCHEDULER}", "cache/text/a.safetensors"])
def test_a_damaged_file_that_training_opens_is_refused(
    tmp_path: Path, hashed: list[str], name: str
) -> None:
    """Also where the hash of the file as it was is remembered."""
    read(tmp_path)
    with (tmp_path / name).open("r+b") as file:
        file.write(b"x")
    with pytest.raises(PipelineError, match=rf"{name}: sha256"):
        read(tmp_path)


def test_a_file_that_training_does_not_open_is_looked_at(tmp_path: Path, hashed: list[str]) -> None:
    """Its size is compared, and no byte of it read."""
    read(tmp_path)
    path = tmp_path / "base" / ENCODER
    path.write_bytes(b"x" * LARGE)
    read(tmp_path)
    path.write_bytes(b"x")
    with pytest.raises(PipelineError, match=rf"{ENCODER}: 1 bytes"):
        read(tmp_path)
