"""Files of one DeepSpeed checkpoint that do not belong together: none of them becomes weights."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zerotrain.errors import PipelineError
from zerotrain.state.external import open_external

OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
SMALL = {"sub_group_size": 20}
"""Stage 3 with several sub-groups for each param group."""
STAGES = pytest.mark.parametrize("stage", [2, 3])
"""Stage 1 writes what stage 2 does."""


def model_file(stage: int, rank: int = 1) -> str:
    """The name of the model file that a rank reads."""
    return (
        f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        if stage == 3
        else "mp_rank_00_model_states.pt"
    )


@pytest.fixture
def tag(made: Any, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tag folder that two ranks wrote, which may be changed."""

    def make(stage: int, name: str = "copy", **options: Any) -> Path:
        every = {**(SMALL if stage == 3 else {}), **options}
        shutil.copytree(made(stage, 2, **every) / "checkpoint", tmp_path / name)
        return next((tmp_path / name).glob("global_step*"))

    return make


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Save a file again with its document changed, under its own name."""
    document = torch.load(path, weights_only=False)
    change(document)
    torch.save(document, path)


def save_nameless(path: Path) -> None:
    """Save a file again through a stream, as some checkpoint engines do: its name is not in it."""
    stream = io.BytesIO()
    torch.save(torch.load(path, weights_only=False), stream)
    path.write_bytes(stream.getvalue())


def exchange(one: Path, other: Path) -> None:
    """Give each of two files the other's name."""
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def base_groups(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The param groups in an optimizer file's document."""
    state = document["optimizer_state_dict"]
    base = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    groups: list[dict[str, Any]] = base["param_groups"]
    return groups


@pytest.mark.parametrize(
    ("stage", "file"), [(1, "optim"), (2, "optim"), (3, "optim"), (3, "model")]
)
def test_exchanged_ranks_are_recognised_by_the_names_inside(
    tag: Any, stage: int, file: str
) -> None:
    """torch.save writes a file's name into it: rank 1's file is not read as rank 0's."""
    folder = tag(stage)
    names = [f"zero_pp_rank_{rank}_mp_rank_00_{file}_states.pt" for rank in (0, 1)]
    exchange(folder / names[0], folder / names[1])
    with pytest.raises(PipelineError, match=f"{names[0]}: was saved as {names[1]}"):
        open_external(folder)


def test_exchanged_ranks_without_names_are_recognised_by_the_weights(tag: Any) -> None:
    """Where no name is inside, the masters are compared with the module's own weights."""
    folder = tag(2)
    paths = [folder / OPTIMIZER.format(rank) for rank in (0, 1)]
    for path in paths:
        save_nameless(path)
    assert open_external(folder).lost == []
    exchange(*paths)
    with pytest.raises(PipelineError, match=r"zero_pp_rank_\d_.*: its part of .* differs from"):
        open_external(folder)


def test_nameless_ranks_of_stage_3_are_reported(tag: Any) -> None:
    """Its model files hold no trained weights: nothing is left that could tell exchanged ranks."""
    folder = tag(3)
    assert open_external(folder).lost == []
    save_nameless(folder / OPTIMIZER.format(1))
    assert open_external(folder).lost[0].startswith("exchanged ranks would not be noticed")


def test_whole_weights_of_stage_3_are_compared(tag: Any) -> None:
    """What a model file holds whole has to be what the optimizer files hold."""
    folder = tag(3)
    held = open_external(folder).tensor("last.bias", "master").clone()
    path = folder / model_file(3)
    edit(path, lambda found: found["module"].update({"last.bias": held.bfloat16()}))
    open_external(folder)
    edit(path, lambda found: found["module"].update({"last.bias": held + 1e-3}))
    with pytest.raises(PipelineError, match=r"its part of last.bias differs from .*rank_1_"):
        open_external(folder)


@pytest.mark.slow
def test_weights_next_to_a_tag_of_stage_3_are_compared(tag: Any) -> None:
    """HF's Trainer gathers the weights at the same step: a rank of another training differs."""
    folder, other = tag(3), tag(3, "other", seed=5)
    found = open_external(folder)
    weights = {name: found.tensor(name, "master").bfloat16() for name in found.names}
    save_file(weights, folder.parent / "model.safetensors")
    (folder.parent / "trainer_state.json").write_text("{}")
    assert open_external(folder).lost == []
    shutil.copy(other / OPTIMIZER.format(1), folder / OPTIMIZER.format(1))
    with pytest.raises(PipelineError, match=r"rank_1_.*differs from model.safetensors's"):
        open_external(folder)


@pytest.mark.parametrize(("stage", "file"), [(1, "optimizer"), (2, "optimizer"), (2, "model")])
def test_a_file_of_another_training_is_refused(tag: Any, stage: int, file: str) -> None:
    """Same names, step, settings and shapes; only the weights are others."""
    folder, other = tag(stage), tag(stage, "other", seed=5)
    name = OPTIMIZER.format(1) if file == "optimizer" else model_file(stage)
    shutil.copy(other / name, folder / name)
    with pytest.raises(PipelineError, match=r"its part of .* differs from") as caught:
        open_external(folder)
    assert name in str(caught.value)


@STAGES
def test_a_rank_of_another_step_is_refused(tag: Any, stage: int) -> None:
    """One training, two saves: each file is whole and its name is right."""
    folder, later = tag(stage), tag(stage, "later", steps=4)
    shutil.copy(later / OPTIMIZER.format(1), folder / OPTIMIZER.format(1))
    with pytest.raises(PipelineError, match=r"rank_1_.*: optimizer step 4, rank 0's files have 3"):
        open_external(folder)


@STAGES
def test_ranks_of_other_settings_are_refused(tag: Any, stage: int) -> None:
    """Learning rate, betas and weight decay are the same on every rank."""
    folder = tag(stage)
    edit(folder / OPTIMIZER.format(1), lambda found: base_groups(found)[1].update(lr=0.5))
    with pytest.raises(
        PipelineError, match=r"rank_1_.*: param group 1 has lr 0.5, rank 0's files have 0.01"
    ):
        open_external(folder)


def test_ranks_of_another_configuration_are_refused(tag: Any) -> None:
    """At stage 3 every rank saves DeepSpeed's configuration; a path of its own may differ in it."""
    folder = tag(3)
    path = folder / model_file(3)
    edit(path, lambda found: found["ds_config"].update(gradient_clipping=2.0))
    with pytest.raises(
        PipelineError, match=r"rank_1_.*: gradient_clipping in its ds_config: 2.0, rank 0's .* 1.0"
    ):
        open_external(folder)
    edit(path, lambda found: found["ds_config"].update(gradient_clipping=1.0, tmp="/scratch/1"))
    open_external(folder)


@STAGES
def test_a_model_file_of_another_world_is_refused(tag: Any, stage: int) -> None:
    """The model file counts the ranks, as the optimizer files do."""
    folder = tag(stage)
    edit(folder / model_file(stage), lambda found: found.update(dp_world_size=4))
    with pytest.raises(PipelineError, match=f"{model_file(stage)}: written by 4 ranks, .* by 2"):
        open_external(folder)


@STAGES
def test_a_folder_named_after_another_step_is_reported(tag: Any, stage: int) -> None:
    """Programs name tags after counts of their own, so that it is no damage; the files count."""
    folder = tag(stage)
    assert open_external(folder).lost == []
    found = open_external(folder.rename(folder.with_name("global_step700")))
    assert found.position.step == 3
    assert "the folder's name says step 700, its files 3" in found.lost[0]


@STAGES
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize("file", ["optimizer", "model"])
def test_a_damaged_file_is_named(tag: Any, stage: int, damage: str, file: str) -> None:
    """One sentence with the file's name, whatever happened to it."""
    folder = tag(stage)
    path = folder / (OPTIMIZER.format(1) if file == "optimizer" else model_file(stage))
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    data[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    with pytest.raises(PipelineError, match=path.name) as caught:
        open_external(folder)
    said = {"missing": "no such file", "flipped": "damaged", "truncated": "truncated"}[damage]
    assert said in str(caught.value)
    assert "\n" not in caught.value.what


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        pytest.param(
            2, {"precision": "fp16", "scale_power": 18, "steps": 6}, id="zero2-fp16-overflows"
        ),
        pytest.param(
            3, {"precision": "fp16", "scale_power": 18, "steps": 6}, id="zero3-fp16-overflows"
        ),
        pytest.param(3, {"precision": "bf16", "offload": True}, id="zero3-bf16-offload"),
        pytest.param(1, {"precision": "bf16"}, id="zero1-bf16"),
    ],
)
def test_sound_checkpoints_are_read(tag: Any, stage: int, options: dict[str, Any]) -> None:
    """Rounded module weights and skipped steps are no sign of another training."""
    found = open_external(tag(stage, **options))
    position = found.position
    assert found.lost == []
    if "scale_power" in options:
        assert 0 < position.optimizer_step < position.step == 6
    else:
        assert position.optimizer_step == position.step == 3
