"""A brace in a user's file name, which Snakemake takes for a wildcard, is one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerotrain.pipeline.graph.inputs import JobInputs


def inputs_of(**run: Any) -> JobInputs:
    """The inputs of a job of such a run."""
    runs = SimpleNamespace(of=lambda wildcards: SimpleNamespace(**run), base_of_data=str)
    return JobInputs(runs, updates=False)  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with such a name."""
    made = tmp_path / "checkpoint-{step}.safetensors"
    made.write_text("")
    return made


@pytest.mark.parametrize(
    "key",
    [
        "resume_from_checkpoint",
        "resume_from_checkpoint.names",
        "evaluate.conditioning_images",
        "validation.conditioning_images",
        "data.path",
    ],
)
def test_a_brace_is_refused_by_name(key: str, file: Path, monkeypatch, capsys) -> None:
    """With the key and the file, before Snakemake looks for a wildcard."""
    module = "zerotrain.pipeline.graph.inputs"
    monkeypatch.setattr(f"{module}.find_checkpoint", lambda path: path)
    monkeypatch.setattr(f"{module}.prompt_files", lambda files, key: [str(file)])
    monkeypatch.setattr(f"{module}.source_files", lambda data: [str(file)])
    inputs = inputs_of(
        resume_from_checkpoint=SimpleNamespace(folder=str(file), names=str(file)),
        evaluate=SimpleNamespace(conditioning_images=[]),
        validation_prompts=[],
        data=SimpleNamespace(has_image_files=False),
    )
    call = {
        "resume_from_checkpoint": inputs.external_checkpoint,
        "resume_from_checkpoint.names": inputs.names_file,
        "evaluate.conditioning_images": inputs.evaluation_images,
        "validation.conditioning_images": inputs.validation_images,
        "data.path": inputs.dataset_files,
    }[key]
    with pytest.raises(SystemExit):
        call(None)
    said = capsys.readouterr().err
    assert said.startswith(f"ERROR: {key}: {file}: its name holds a brace")
    plain = file.rename(file.with_name("plain.safetensors"))
    monkeypatch.setattr(f"{module}.prompt_files", lambda files, key: [str(plain)])
    monkeypatch.setattr(f"{module}.source_files", lambda data: [str(plain)])
    monkeypatch.setattr(f"{module}.find_checkpoint", lambda path: plain)
    if key != "resume_from_checkpoint.names":
        assert call(None) == [str(plain)]
