"""A training state comes back bit for bit, in shards of bounded size."""

from __future__ import annotations

import json
import weakref
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.builders.states import make_position

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.state import state
from zerotrain.state.position import MASTER, TrainerState
from zerotrain.state.state import KIND, State, write_state, write_tensors

POSITION = make_position(
    param_groups=[{"parameters": ["w", "b"], "lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8}],
    rng={"scheme": "counter", "seed": 2**32 - 1},
)
SLOTS = [MASTER, "exp_avg", "exp_avg_sq"]
SHAPES = {"w": [3, 5], "b": [5], "scale": [], "a.long.name": [2, 2, 2]}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Random bits by parameter: any float32, the infinite and the denormal too, but no NaN."""
    draw = torch.Generator().manual_seed(seed)
    bits = {
        name: torch.randint(-(2**31), 2**31, shape, generator=draw, dtype=torch.int64)
        for name, shape in SHAPES.items()
    }
    return {
        name: value.to(torch.int32).view(torch.float32).nan_to_num(nan=1e-45)
        for name, value in bits.items()
    }


@pytest.fixture
def written(tmp_path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """A published state; the tensors that are in it by slot."""
    found = {slot: tensors(number) for number, slot in enumerate(SLOTS)}
    with artifact.publish(tmp_path / "state", KIND) as draft:
        write_state(draft.folder, POSITION, SHAPES, SLOTS, lambda name, slot: found[slot][name])
    return found


def test_state_comes_back_bit_for_bit(
    tmp_path: Path, written: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Position and tensors, whatever bits they hold, whole and from their second element on."""
    found = State(tmp_path / "state")
    assert found.position == POSITION
    assert sorted(found.names) == sorted(SHAPES)
    assert sorted(found.slots) == sorted(SLOTS)
    for slot in SLOTS:
        for name, expected in written[slot].items():
            tensor = found.tensor(name, slot)
            assert (tensor.dtype, tensor.shape) == (torch.float32, expected.shape)
            assert torch.equal(tensor.view(torch.int32), expected.view(torch.int32))
            part = torch.empty(max(0, expected.numel() - 1))
            found.fill(name, slot, 1, part)
            assert torch.equal(part, expected.flatten()[1:])


def test_a_state_replaced_in_place_is_read_again(
    tmp_path: Path, written: dict[str, dict[str, torch.Tensor]]
) -> None:
    """No file of the folder before stays open in the process."""
    State(tmp_path / "state").tensor("w", MASTER)
    other = tensors(99)
    with artifact.publish(tmp_path / "state", KIND) as draft:
        write_state(draft.folder, POSITION, SHAPES, [MASTER], lambda name, slot: other[name])
    assert torch.equal(State(tmp_path / "state").tensor("w", MASTER), other["w"])


def test_position_is_plain_json(
    tmp_path: Path, written: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Any program can read where a training stands, and in which file each tensor is."""
    document = json.loads((tmp_path / "state" / "state.json").read_text())
    tensors = {"shapes", "slots"}
    known = {item.name for item in fields(TrainerState)}
    assert known == set(document) - tensors
    assert {key: document[key] for key in known} == {key: asdict(POSITION)[key] for key in known}
    assert document["shapes"] == SHAPES
    assert document["slots"]["exp_avg"] == dict.fromkeys(SHAPES, "exp_avg-00000.safetensors")


def test_shards_are_bounded(tmp_path: Path, monkeypatch) -> None:
    """Each holds at most SHARD_BYTES, in the order given; only a larger tensor stands alone."""
    monkeypatch.setattr(state, "SHARD_BYTES", 100)
    sizes = {"a": 10, "b": 15, "c": 1, "d": 40, "e": 1, "f": 24}  # floats; 25 fit
    files = write_tensors(
        tmp_path, "master", ((n, torch.arange(s).float()) for n, s in sizes.items())
    )
    numbers = {name: int(file.removesuffix(".safetensors")[-5:]) for name, file in files.items()}
    assert numbers == {"a": 0, "b": 0, "c": 1, "d": 2, "e": 3, "f": 3}
    for file in set(files.values()):
        shard = load_file(tmp_path / file)
        assert set(shard) == {name for name in files if files[name] == file}
        assert sum(t.nbytes for t in shard.values()) <= 100 or set(shard) == {"d"}


def test_a_sharded_state_comes_back(tmp_path: Path, monkeypatch) -> None:
    """Every tensor is found in its shard."""
    monkeypatch.setattr(state, "SHARD_BYTES", 32)
    expected = tensors(5)
    with artifact.publish(tmp_path / "state", KIND) as draft:
        write_state(draft.folder, POSITION, SHAPES, [MASTER], lambda n, slot: expected[n])
    assert len(list((tmp_path / "state").glob("master-*"))) == 3
    found = State(tmp_path / "state")
    for name, tensor in expected.items():
        assert torch.equal(found.tensor(name, MASTER), tensor)


def test_one_tensor_lives_at_a_time(tmp_path: Path) -> None:
    """Tensors are asked for when their turn comes, and let go as soon as they are written."""
    arrays: list[weakref.ref[np.ndarray]] = []
    most = 0

    def one(number: int) -> torch.Tensor:
        nonlocal most
        array = np.full(25, float(number), dtype=np.float32)
        arrays.append(weakref.ref(array))
        most = max(most, sum(reference() is not None for reference in arrays))
        return torch.from_numpy(array)

    write_tensors(tmp_path, "master", ((str(number), one(number)) for number in range(8)))
    assert (len(arrays), most) == (8, 2)  # the one before is let go when the next is there
    arrays.clear()
    shapes = {str(number): [25] for number in range(8)}
    write_state(tmp_path, POSITION, shapes, [MASTER], lambda name, slot: one(int(name)))
    assert (len(arrays), most) == (8, 2)


def test_the_writer_knows_the_hash_of_its_files(tmp_path: Path, monkeypatch) -> None:
    """So that publishing reads none of them again."""
    monkeypatch.setattr(state, "SHARD_BYTES", 32)
    values = tensors(5)
    known = write_state(tmp_path, POSITION, SHAPES, SLOTS, lambda name, slot: values[name])
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 9
    assert known == {path.name: artifact.file_sha256(path) for path in files}


def test_a_damaged_state_is_refused(
    tmp_path: Path, written: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Before a tensor of it is used."""
    path = tmp_path / "state" / "exp_avg-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(PipelineError, match=r"exp_avg-00000\.safetensors: sha256"):
        State(tmp_path / "state")
