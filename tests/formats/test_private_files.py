"""Files that a library does not load leave neither a base nor weights, whatever lists them."""

from __future__ import annotations

from pathlib import Path

from zerotrain import artifact
from zerotrain.export.formats.weights import ExportedWeights
from zerotrain.export.options import PublishOptions
from zerotrain.export.publish import publish
from zerotrain.models.families.lora import ADAPTER

OWN = (
    "model_index.json",
    "vae/config.json",
    "unet/config.json",
    "pytorch_lora_weights.safetensors",
)
PRIVATE = ("vae/notes.txt", "token", "unet/.env")


def weights_with_notes(folder: Path) -> Path:
    """Weights with notes among them."""
    with artifact.publish(folder, "weights") as draft:
        for name in (*OWN, *PRIVATE):
            (draft.folder / name).parent.mkdir(exist_ok=True)
            (draft.folder / name).write_text("{}")
        draft.content = {"family": "sdxl", "step": 1, "dtype": "fp32"}
    return folder


def test_a_conversion_leaves_private_files_behind(tmp_path: Path) -> None:
    """An export into another form takes a model's files alone."""
    weights = ExportedWeights(weights_with_notes(tmp_path / "weights"))
    taken = {*weights.trained_files(), *weights.base_files(), *weights.descriptions()}
    assert taken == {*OWN} - {ADAPTER}


def test_publish_uploads_no_private_file(tmp_path: Path, capsys) -> None:
    """The hub gets a model's files; what stays back is listed once."""
    weights = weights_with_notes(tmp_path / "weights")
    publish(PublishOptions(weights, "me/cats", license=None, private=False, dry_run=True))
    lines = capsys.readouterr().out.splitlines()
    assert {*OWN} <= {line.split(" ")[0] for line in lines}
    assert not [line for line in lines if line.startswith(PRIVATE)]
    assert "not uploaded, no file of a model: token, unet/.env, vae/notes.txt" in lines
