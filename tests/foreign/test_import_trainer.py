"""HF Trainer's folder without DeepSpeed: step, moments, schedule; and files that do not belong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.foreign.conftest import NAMES, Net, assert_moments, decay_split, read, shapes

from zerotrain.errors import PipelineError
from zerotrain.state.external import open_external

STEPS = 3


@pytest.fixture
def there(tmp_path: Path) -> tuple[Path, Any]:
    """checkpoint-3 as Trainer leaves it, and the model with its moments by our names."""
    torch.manual_seed(0)
    model = Net()
    own = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(decay_split(own), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(STEPS):
        model(torch.randn(8, 4)).pow(3).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    folder = tmp_path / f"checkpoint-{STEPS}"
    folder.mkdir()
    save_file({n: t.detach().clone() for n, t in own.items()}, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEPS, "epoch": 0.5}))
    model.moments = {n: optimizer.state[p] for n, p in own.items()}
    return folder, model


def test_trainer_is_read_without_a_hint(there: Any) -> None:
    """Weights, moments, both groups and the step, bit by bit."""
    folder, model = there
    found = read(folder, model)
    assert_moments(found, model)
    own = dict(model.named_parameters())
    assert all(torch.equal(found.tensor(name, "master"), own[name]) for name in NAMES)
    position = found.position
    assert (position.step, position.optimizer_step) == (STEPS, STEPS)
    assert [group["weight_decay"] for group in position.param_groups] == [0.1, 0.0]
    assert found.lost == []


def test_the_step_is_that_of_trainer_state(there: Any) -> None:
    """Not that of the folder's name, which a user may change."""
    folder, model = there
    found = read(folder.rename(folder.with_name("checkpoint-9")), model)
    assert found.position.step == STEPS


def _sharded(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {1: NAMES[:4], 2: NAMES[4:]}
    index = {}
    for number, names in parts.items():
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_shards_are_read(there: Any) -> None:
    """Trainer shards large models."""
    folder, model = there
    _sharded(folder)
    assert_moments(read(folder, model), model)


def _exchange(folder: Path, one: str, other: str) -> None:
    """Swap the contents of two files."""
    first, second = (folder / name for name in (one, other))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _flip(path: Path) -> None:
    """Change a bit of a moment, in the middle of its record."""
    content = bytearray(path.read_bytes())
    moment = torch.load(path)["state"][0]["exp_avg"].numpy().tobytes()
    content[content.index(moment) + len(moment) // 2] ^= 1
    path.write_bytes(content)


def _of_step(folder: Path, step: int) -> None:
    document = torch.load(folder / "optimizer.pt")
    for entry in document["state"].values():
        entry["step"] = torch.tensor(float(step))
    torch.save(document, folder / "optimizer.pt")


def _exchanged_shards(folder: Path) -> None:
    _sharded(folder)
    _exchange(folder, *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)))


def _lost_shard(folder: Path) -> None:
    _sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _shard_in_another_folder(folder: Path) -> None:
    _sharded(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of", "../model-00002-of"))


def _pickled_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def _exchanged_pickles(folder: Path) -> None:
    _pickled_weights(folder)
    _exchange(folder, "pytorch_model.bin", "optimizer.pt")


def _change(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = torch.load(folder / "optimizer.pt")
    change(document)
    torch.save(document, folder / "optimizer.pt")


DAMAGE = {
    "optimizer of a later step": (
        lambda folder: _of_step(folder, 5),
        r"optimizer\.pt: is of step 5, trainer_state\.json says 3",
    ),
    "optimizer of an earlier step": (
        lambda folder: _of_step(folder, 2),
        r"optimizer\.pt: is of step 2, trainer_state\.json says 3",
    ),
    "schedule of a later step": (
        lambda folder: torch.save({"last_epoch": 5}, folder / "scheduler.pt"),
        r"optimizer\.pt: is of step 3, its schedule of step 5",
    ),
    "optimizer and schedule exchanged": (
        lambda folder: _exchange(folder, "optimizer.pt", "scheduler.pt"),
        r"optimizer\.pt: no state of a torch optimizer; it holds base_lrs",
    ),
    "weights and optimizer exchanged": (
        lambda folder: _exchange(folder, "optimizer.pt", "model.safetensors"),
        r"model\.safetensors: (no safetensors file|has \d+ bytes, its header says)",
    ),
    "pickled weights and optimizer exchanged": (
        _exchanged_pickles,
        r"pytorch_model\.bin: no file of a model's tensors; it holds",
    ),
    "an optimizer's state of other types": (
        lambda folder: torch.save({"state": {0: 1}, "param_groups": [1]}, folder / "optimizer.pt"),
        r"optimizer\.pt: no state of a torch optimizer; it holds state, param_groups",
    ),
    "a step of two elements": (
        lambda folder: _change(
            folder, lambda found: found["state"][0].update(step=torch.zeros(2, 900))
        ),
        r"optimizer\.pt: step of parameter 0 is a tensor of shape \[2, 900\], no number",
    ),
    "a step that is nan": (
        lambda folder: _change(folder, lambda found: found["state"][0].update(step=float("nan"))),
        r"optimizer\.pt: step of parameter 0 is nan, no number",
    ),
    "a moment that is no tensor": (
        lambda folder: _change(folder, lambda found: found["state"][0].update(exp_avg=[0.0])),
        r"optimizer\.pt: exp_avg of parameter 0 is no tensor but list",
    ),
    "a parameter in two groups": (
        lambda folder: _change(folder, lambda found: found["param_groups"][1].update(params=[0])),
        r"optimizer\.pt: params of param group 1 holds 0, which is no number of a parameter or",
    ),
    "a learning rate in letters": (
        lambda folder: _change(folder, lambda found: found["param_groups"][1].update(lr="fast")),
        r"optimizer\.pt: lr of param group 1 is 'fast', no number",
    ),
    "one beta": (
        lambda folder: _change(folder, lambda found: found["param_groups"][0].update(betas=0.9)),
        r"optimizer\.pt: betas of param group 0 is 0\.9, no list of numbers",
    ),
    "a loss scale of other keys": (
        lambda folder: torch.save({"growth": 1}, folder / "scaler.pt"),
        r"scaler\.pt: scale is None, no number",
    ),
    "shards exchanged": (
        _exchanged_shards,
        r"model-00001-of-00002\.safetensors: first\.bias is in this file or in model\.safet",
    ),
    "shard missing": (_lost_shard, r"model-00002-of-00002\.safetensors: no such file"),
    "shard outside the folder": (
        _shard_in_another_folder,
        r"index\.json: the name '\.\./model-.*' leaves",
    ),
    "weights truncated": (
        lambda folder: _truncate(folder / "model.safetensors"),
        r"model\.safetensors: (no safetensors file|has \d+ bytes, its header says)",
    ),
    "optimizer truncated": (
        lambda folder: _truncate(folder / "optimizer.pt"),
        r"optimizer\.pt: truncated or damaged, \d+ bytes",
    ),
    "one bit of the optimizer flipped": (
        lambda folder: _flip(folder / "optimizer.pt"),
        r"optimizer\.pt: .*checksum",
    ),
    "state truncated": (
        lambda folder: _truncate(folder / "trainer_state.json"),
        r"trainer_state\.json: not valid JSON",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_and_mixed_files_are_refused(there: Any, case: str) -> None:
    """One sentence that names the file, with what to do next; nothing is read."""
    folder, model = there
    damage, sentence = DAMAGE[case]
    damage(folder)
    with pytest.raises(PipelineError, match=sentence) as caught:
        read(folder, model)
    assert str(caught.value).count("\n") == 1


def test_skipped_updates_of_fp16_are_no_mixture(there: Any) -> None:
    """A scaler leaves updates out: the optimizer's count is smaller than the step."""
    folder, model = there
    torch.save({"scale": 512.0, "_growth_tracker": 7}, folder / "scaler.pt")
    _of_step(folder, 2)
    found = read(folder, model)
    assert (found.position.step, found.position.optimizer_step) == (3, 2)


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json", "model.safetensors"])
def test_a_file_stands_for_its_folder(there: Any, name: str) -> None:
    """Given one of its files, the folder is taken."""
    folder, model = there
    found = open_external(folder / name)
    assert found.folder == folder
    assert found.shapes.keys() == shapes(model).keys()


def test_one_level_up_names_the_newest_checkpoint(there: Any) -> None:
    """A training's output folder: the sentence says what lies below, and the commands to give."""
    folder, _ = there
    for step in (20, 100):
        below = folder.with_name(f"checkpoint-{step}")
        below.mkdir()
        for name in ("optimizer.pt", "model.safetensors", "trainer_state.json"):
            (below / name).write_bytes((folder / name).read_bytes())
    newest = folder.with_name("checkpoint-100")
    with pytest.raises(PipelineError, match="no layout that is known; it holds") as caught:
        open_external(folder.parent)
    assert f"`zerotrain state show {newest}`" in str(caught.value)
    assert f"`resume_from_checkpoint: {newest}`" in str(caught.value)


def test_latest_in_another_encoding_is_a_sentence(tmp_path: Path) -> None:
    """`latest` may hold anything; a name that is no UTF-8 is shown with its bytes."""
    (tmp_path / "latest").write_bytes(b"global_step\xff\xfe\n")
    with pytest.raises(PipelineError, match=r"latest: names 'global_step\\udcff\\udcfe'") as caught:
        open_external(tmp_path)
    assert "give the folder of the tag itself" in str(caught.value)


SCHEDULES = {
    "two processes, without their random states": ([], {"last_epoch": 6}, True),
    "two processes, each there": ([0, 1], {"last_epoch": 6}, True),
    "two machines, the first one's files": ([0], {"last_epoch": 6}, True),
    "two machines, at the end of a cycle": ([0], {"last_epoch": 5, "total_steps": 5}, True),
    "of no whole number of processes": ([0], {"last_epoch": 5}, False),
    "too far for two processes": ([0, 1], {"last_epoch": 8}, False),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_accelerates_schedule_counts_once_a_process(there: Any, case: str) -> None:
    """The number of processes is known at least from the random states, which may be on another
    machine: a schedule that is a multiple of the optimizer's step is of the same checkpoint."""
    folder, model = there
    processes, schedule, sound = SCHEDULES[case]
    for name in ("trainer_state.json", "rng_state.pth", "scheduler.pt"):
        (folder / name).unlink()
    for number in processes:
        torch.save({"step": STEPS}, folder / f"random_states_{number}.pkl")
    torch.save(schedule, folder / "scheduler.bin")
    if sound:
        assert read(folder, model).position.optimizer_step == STEPS
        return
    sentence = rf"optimizer\.pt: is of step 3, its schedule of step {schedule['last_epoch']}"
    with pytest.raises(PipelineError, match=sentence):
        read(folder, model)


@pytest.mark.parametrize(
    ("held", "sentence"),
    [(["step"], "holds list, no values by name"), ({"step": "soon"}, "step is 'soon', no number")],
)
def test_odd_random_states_are_one_sentence(there: Any, held: Any, sentence: str) -> None:
    """They are asked where nothing else says the step."""
    folder, model = there
    for name in ("trainer_state.json", "optimizer.pt"):
        (folder / name).unlink()
    torch.save(held, folder / "random_states_0.pkl")
    with pytest.raises(PipelineError, match=rf"random_states_0\.pkl: {sentence}"):
        read(folder.rename(folder.with_name("last")), model)
