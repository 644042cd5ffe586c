"""Step and epoch where trainers record them: kohya's scripts, OneTrainer and ai-toolkit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.builders.refusals import refused

from zerotrain.state.external import open_external
from zerotrain.state.show import show

LAYER = "transformer_blocks.0.attn.to_q"
FACTORS = {"lora_A": torch.ones(2, 3), "lora_B": torch.full((3, 2), 2.0)}
ADAM = {"exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3)}


def write_weights(path: Path, *, form: str = "diffusers", **header: str) -> None:
    """A LoRA of one layer, in the names of a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "kohya":
        ends = {"lora_A": "lora_down", "lora_B": "lora_up"}
        stem = "lora_unet_" + LAYER.replace(".", "_")
        tensors = {f"{stem}.{ends[end]}.weight": one for end, one in FACTORS.items()}
        tensors[f"{stem}.alpha"] = torch.tensor(2.0)
    else:
        tensors = {f"transformer.{LAYER}.{end}.weight": one for end, one in FACTORS.items()}
    save_file(tensors, path, metadata=header or None)


def write_optimizer(path: Path, entries: Any) -> None:
    """The state of a torch optimizer of two parameters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = dict(enumerate(entries))
    torch.save({"state": state, "param_groups": [{"params": [0, 1], "lr": 1e-3}]}, path)


def adafactor() -> list[dict[str, Any]]:
    """Entries of an Adafactor that counts its steps elsewhere."""
    return [{"exp_avg_sq_row": torch.ones(2), "exp_avg_sq_col": torch.ones(3)} for _ in range(2)]


def adam(step: int | None) -> list[dict[str, Any]]:
    """Adam's entries of both factors, of this step."""
    shapes = [list(one.shape) for one in FACTORS.values()]
    entries: list[dict[str, Any]] = [
        {"exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)} for shape in shapes
    ]
    return [entry | ({} if step is None else {"step": torch.tensor(step)}) for entry in entries]


def test_the_state_of_kohyas_scripts_says_step_and_epoch(tmp_path: Path) -> None:
    """An Adafactor without a count of steps would make it step 0."""
    folder = tmp_path / "cat-000003-state"
    write_weights(folder / "model.safetensors", form="kohya")
    write_optimizer(folder / "optimizer.bin", adafactor())
    (folder / "train_state.json").write_text('{"current_epoch": 3, "current_step": 500}')
    found = open_external(folder)
    assert found.position.step == 500
    assert found.progress == "step 500 and epoch 3 of train_state.json"
    lines = " ".join(" ".join(show(found)).split())
    assert "step 500 " in lines
    assert "recorded step 500 and epoch 3 of train_state.json" in lines


def test_a_step_that_nothing_says_is_no_silent_0(tmp_path: Path) -> None:
    folder = tmp_path / "cat-000003-state"
    write_weights(folder / "model.safetensors", form="kohya")
    write_optimizer(folder / "optimizer.bin", adafactor())
    found = open_external(folder)
    assert (found.position.step, found.progress) == (
        0, "step 0: no file, header, name or optimizer says it"
    )  # fmt: skip
    write_optimizer(folder / "optimizer.bin", adam(7))
    assert open_external(folder).progress == "step 7 of optimizer.bin"


def test_the_number_of_a_state_of_kohyas_scripts_is_its_step(tmp_path: Path) -> None:
    """States of steps are called so; of a state of an epoch the number is no step."""
    for name, step in (("cat-step00000040-state", 40), ("cat-000003-state", 0)):
        folder = tmp_path / name
        write_weights(folder / "model.safetensors", form="kohya")
        write_optimizer(folder / "optimizer.bin", adafactor())
        assert open_external(folder).position.step == step


def test_the_last_state_of_kohyas_scripts_is_recommended(tmp_path: Path) -> None:
    """Its name has no number, those before it have that of their epoch."""
    for name in ("cat-000002-state", "cat-000010-state", "cat-state"):
        write_weights(tmp_path / name / "model.safetensors", form="kohya")
        write_optimizer(tmp_path / name / "optimizer.bin", adafactor())
    error = refused(open_external, tmp_path)
    assert f"`resume_from_checkpoint: {tmp_path / 'cat-state'}`" in str(error.hint)


def test_files_of_two_states_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cat-state"
    write_weights(folder / "model.safetensors", form="kohya")
    write_optimizer(folder / "optimizer.bin", adam(40))
    (folder / "train_state.json").write_text('{"current_epoch": 3, "current_step": 50}')
    error = refused(open_external, folder)
    assert error.what == f"{folder / 'optimizer.bin'}: is of step 40, train_state.json says 50"
    (folder / "train_state.json").write_text('{"current_epoch": 3, "current_step": "fifty"}')
    error = refused(open_external, folder)
    assert error.what == f"{folder / 'train_state.json'}: current_step is 'fifty', no number"


def test_a_backup_of_onetrainer_is_read(tmp_path: Path) -> None:
    """Weights and optimizer are in folders of their own; meta.json has the progress."""
    folder = tmp_path / "2026-01-31_10-00-00-backup-120-4-20"
    write_weights(folder / "lora" / "lora.safetensors")
    write_optimizer(folder / "optimizer" / "optimizer.pt", adam(None))
    (folder / "ema").mkdir()
    torch.save({}, folder / "ema" / "ema.pt")
    progress = {"epoch": 4, "epoch_step": 20, "epoch_sample": 80, "global_step": 120}
    (folder / "meta.json").write_text(json.dumps({"train_progress": progress}))
    for path in (folder, folder / "meta.json", folder / "lora" / "lora.safetensors"):
        found = open_external(path)
        assert found.folder == folder
        assert found.progress == "step 120 and epoch 4 of meta.json"
        assert (found.position.step, found.position.optimizer_step) == (120, 120)
        assert found.slots == ["master", "exp_avg", "exp_avg_sq"]
        assert torch.equal(found.tensor(found.names[0], "master"), FACTORS["lora_A"])
    assert "ema/ema.pt: averaged weights" in found.lost


def test_a_backup_of_a_whole_model_is_its_denoiser(tmp_path: Path) -> None:
    """Of the parts in diffusers' layout, the trained one is neither the encoder nor the VAE."""
    folder = tmp_path / "backup-120-4-20"
    for part, stem in (("text_encoder", "model"), ("unet", "diffusion_pytorch_model")):
        (folder / part).mkdir(parents=True)
        tensors = {f"{part}.weight": torch.ones(2, 3), f"{part}.bias": torch.ones(3)}
        save_file(tensors, folder / part / f"{stem}.safetensors")
    (folder / "model_index.json").write_text("{}")
    (folder / "meta.json").write_text('{"train_progress": {"epoch": 4, "global_step": 120}}')
    write_optimizer(folder / "optimizer" / "optimizer.pt", adam(120))
    found = open_external(folder)
    assert found.names == ["unet.bias", "unet.weight"]
    assert "text_encoder/model.safetensors: a second model; only the first is read" in found.lost


def test_ai_toolkits_files_say_step_and_epoch(tmp_path: Path) -> None:
    """The optimizer next to them is that of the last file; of others, it is left out."""
    for step in (250, 500):
        info = json.dumps({"step": step, "epoch": step // 100})
        write_weights(tmp_path / f"cat_{step:09d}.safetensors", training_info=info)
    write_optimizer(tmp_path / "optimizer.pt", adam(500))
    last = open_external(tmp_path / "cat_000000500.safetensors")
    source = "training_info in the header of cat_000000500.safetensors"
    assert last.progress == f"step 500 and epoch 5 of {source}"
    assert (last.position.step, last.position.optimizer_step) == (500, 500)
    assert last.slots == ["master", "exp_avg", "exp_avg_sq"]
    earlier = open_external(tmp_path / "cat_000000250.safetensors")
    assert (earlier.position.step, earlier.slots) == (250, ["master"])
    assert "optimizer.pt next to it is of step 500, and left out" in earlier.lost
    error = refused(open_external, tmp_path)
    assert f"`resume_from_checkpoint: {tmp_path / 'cat_000000500.safetensors'}`" in str(error.hint)


@pytest.mark.parametrize("text", ['{"step": "x"}', "[1]", "{"])
def test_a_damaged_training_info_is_one_sentence(tmp_path: Path, text: str) -> None:
    write_weights(tmp_path / "cat.safetensors", training_info=text)
    error = refused(open_external, tmp_path / "cat.safetensors")
    assert error.what.startswith(f"{tmp_path / 'cat.safetensors'}: training_info")
