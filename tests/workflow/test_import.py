"""A run that begins with a checkpoint from another program imports it once, and again when it
changes."""

from __future__ import annotations

import pytest

CONFIG = "config/config.yaml"
PHASES = {"render_launch": 2, "train_phase": 2, "export_weights": 2, "evaluate": 2, "report": 1}


@pytest.mark.slow
def test_import_is_one_job_before_the_first_phase(built):
    """The dataset, the base and the cache stay; an edit of the checkpoint imports it again, an edit
    of a later phase does not."""
    folder = built.folder / "elsewhere" / "checkpoint-500"
    folder.mkdir(parents=True)
    (folder / "optimizer.bin").write_bytes(b"moments")
    built.edit(CONFIG, "base: nano\n", f"base: nano\nresume_from_checkpoint: {folder}\n")
    assert built.planned("train") == {"import_checkpoint": 1, **PHASES}
    built.build("train")
    assert built.planned("train") == {}
    built.edit(CONFIG, "until: 700", "until: 800")
    assert "import_checkpoint" not in built.planned("train")
    (folder / "optimizer.bin").write_bytes(b"other moments")
    assert built.planned("train") == {"import_checkpoint": 1, **PHASES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resume", "edited"),
    [
        ("old/model.safetensors", "old/optimizer.bin"),
        ("{folder: old, names: names.txt}", "names.txt"),
    ],
)
def test_import_depends_on_all_files(resume, edited, built):
    """A file of a checkpoint stands for its folder; `names` decide which moments are whose."""
    (built.folder / "old").mkdir()
    for name in ("old/optimizer.bin", "old/model.safetensors", "names.txt"):
        (built.folder / name).write_text("conv_in.weight\n")
    built.edit(CONFIG, "base: nano\n", f"base: nano\nresume_from_checkpoint: {resume}\n")
    built.build("train")
    assert built.planned("train") == {}
    (built.folder / edited).write_text("conv_out.weight\n")
    assert built.planned("train") == {"import_checkpoint": 1, **PHASES}
