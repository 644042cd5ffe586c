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
def test_import_takes_a_single_file_and_names_what_is_missing(built):
    """Weights alone are one file; a folder that is not there is named before anything runs."""
    file = built.folder / "step-2000.safetensors"
    file.write_bytes(b"weights")
    built.edit(CONFIG, "base: nano\n", f"base: nano\nresume_from_checkpoint: {file}\n")
    assert built.planned("train") == {"import_checkpoint": 1, **PHASES}
    file.unlink()
    done = built.snakemake("-n", "train")
    assert done.returncode != 0
    said = f"line 5: resume_from_checkpoint: {file}: no such folder, or nothing in it"
    assert said in done.stdout


@pytest.mark.slow
def test_import_takes_the_folder_of_a_file_in_it(built):
    """A file of a checkpoint stands for its folder: all of its files are the job's inputs."""
    folder = built.folder / "elsewhere" / "checkpoint-500"
    folder.mkdir(parents=True)
    for name in ("optimizer.bin", "model.safetensors"):
        (folder / name).write_bytes(b"tensors")
    line = f"resume_from_checkpoint: {folder / 'model.safetensors'}\n"
    built.edit(CONFIG, "base: nano\n", f"base: nano\n{line}")
    built.build("train")
    (folder / "optimizer.bin").write_bytes(b"other moments")
    assert built.planned("train") == {"import_checkpoint": 1, **PHASES}


@pytest.mark.slow
def test_import_depends_on_the_file_of_names(built):
    """`names` in a file decide which moments are whose: an edit of it imports again."""
    folder, names = built.folder / "checkpoint-500", built.folder / "names.txt"
    folder.mkdir()
    (folder / "optimizer.bin").write_bytes(b"moments")
    names.write_text("conv_in.weight\n")
    resume = f"resume_from_checkpoint: {{folder: {folder}, names: {names}}}\n"
    built.edit(CONFIG, "base: nano\n", f"base: nano\n{resume}")
    built.build("train")
    assert built.planned("train") == {}
    names.write_text("conv_out.weight\n")
    assert built.planned("train") == {"import_checkpoint": 1, **PHASES}
