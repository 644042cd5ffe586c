"""Fragments of several processes make the tensors that one process had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.builders.refusals import refusal
from tests.builders.states import make_position

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.state import state
from zerotrain.state.checkpoint import KIND, Checkpoint, Fragment, write_position, write_rank
from zerotrain.state.position import MASTER

POSITION = make_position(engine={"world_size": 2})
SLOTS = [MASTER, "exp_avg"]
SHAPES = {"w": [4, 5], "b": [7], "scale": []}
WHOLE = {
    slot: {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(10 * i + j))
        for j, (name, shape) in enumerate(SHAPES.items())
    }
    for i, slot in enumerate(SLOTS)
}


def parts(ranks: int) -> list[list[tuple[str, int, int]]]:
    """ZeRO's partition: parameters one after the other, cut into equal stretches."""
    total = 28
    size = -(-total // ranks)
    found: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    offset = 0
    for name in SHAPES:
        length = WHOLE[MASTER][name].numel()
        for rank in range(ranks):
            start = max(rank * size, offset)
            stop = min((rank + 1) * size, offset + length)
            if start < stop:
                found[rank].append((name, start - offset, stop - start))
        offset += length
    return found


def fragments(share: list[tuple[str, int, int]]) -> Iterator[Fragment]:
    """The fragments of one rank, as views into the whole."""
    for name, start, length in share:
        flat = {slot: WHOLE[slot][name].flatten()[start : start + length] for slot in SLOTS}
        yield Fragment(name, start, flat)


def save(folder: Path, shares: list[list[tuple[str, int, int]]]) -> Path:
    """Publish a checkpoint of several ranks."""
    with artifact.publish(folder, KIND) as draft:
        spans = [write_rank(draft.folder, i, fragments(part)) for i, part in enumerate(shares)]
        write_position(draft.folder, POSITION, SHAPES, SLOTS, spans)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_fragments_are_put_together(tmp_path: Path, ranks: int) -> None:
    """Bit for bit, whatever the number of processes; some hold nothing of a parameter."""
    shares = parts(ranks)
    assert ranks == 1 or any(start for share in shares for _, start, _ in share)
    found = Checkpoint(save(tmp_path / "checkpoint", shares))
    assert found.position == POSITION
    assert found.shapes == SHAPES
    assert sorted(found.names) == sorted(SHAPES)
    assert found.slots == SLOTS
    for slot in SLOTS:
        for name, expected in WHOLE[slot].items():
            tensor = found.tensor(name, slot)
            assert (tensor.dtype, tensor.shape) == (torch.float32, expected.shape)
            assert torch.equal(tensor, expected)
            flat = expected.flatten()
            for start in range(len(flat)):
                into = torch.empty(min(6, len(flat) - start))
                found.fill(name, slot, start, into)
                assert torch.equal(into, flat[start : start + 6]), "a part across processes"


def test_ranks_write_several_shards(tmp_path: Path, monkeypatch) -> None:
    """A rank's file is bounded like a state's, and its tensors are found in all of them."""
    monkeypatch.setattr(state, "SHARD_BYTES", 64)
    folder = save(tmp_path / "checkpoint", parts(2))
    assert len(list(folder.glob("rank-00000-*"))) > 1
    found = Checkpoint(folder)
    for slot in SLOTS:
        for name, expected in WHOLE[slot].items():
            assert torch.equal(found.tensor(name, slot), expected)


def test_lower_precision_is_kept_as_float32(tmp_path: Path) -> None:
    """A checkpoint has one type, whatever an engine holds."""
    value = torch.tensor([1.5, -2.25], dtype=torch.bfloat16)
    with artifact.publish(tmp_path / "c", KIND) as draft:
        spans = write_rank(draft.folder, 0, [Fragment("w", 0, {MASTER: value})])
        write_position(draft.folder, POSITION, {"w": [2]}, [MASTER], [spans])
    assert load_file(tmp_path / "c/rank-00000-00000.safetensors")["w|master"].dtype == torch.float32
    tensor = Checkpoint(tmp_path / "c").tensor("w", MASTER)
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == [1.5, -2.25]


def test_fragments_are_copied_before_the_engine_continues(tmp_path: Path, monkeypatch) -> None:
    """Views into one buffer are written as they were when it was their turn."""
    buffer = torch.arange(6.0)
    monkeypatch.setattr(state, "SHARD_BYTES", 10**6)

    def views() -> Iterator[Fragment]:
        yield Fragment("a", 0, {MASTER: buffer[:3]})
        buffer.zero_()
        yield Fragment("b", 0, {MASTER: buffer[3:]})

    with artifact.publish(tmp_path / "c", KIND) as draft:
        spans = write_rank(draft.folder, 0, views())
        write_position(draft.folder, POSITION, {"a": [3], "b": [3]}, [MASTER], [spans])
    found = Checkpoint(tmp_path / "c")
    assert found.tensor("a", MASTER).tolist() == [0, 1, 2]
    assert found.tensor("b", MASTER).tolist() == [0, 0, 0]


def test_a_missing_fragment_is_named(tmp_path: Path) -> None:
    """Parameter, slot, how much of it there is, and what to do; the others can be read."""
    shares = parts(2)
    assert shares[1] == [("w", 14, 6), ("b", 0, 7), ("scale", 0, 1)]
    shares[1].pop(0)
    found = Checkpoint(save(tmp_path / "checkpoint", shares))
    text = refusal(found.tensor, "w", "exp_avg")
    assert f"{tmp_path / 'checkpoint'}: w (exp_avg) has 14 of 20 elements" in text
    assert "use an older checkpoint of the phase's progress" in text
    assert torch.equal(found.tensor("b", MASTER), WHOLE[MASTER]["b"])


def test_parts_that_overlap_are_refused(tmp_path: Path) -> None:
    """Also where their lengths add up to the whole: a part of it would be missing."""
    shares = [[("w", 0, 14)], [("w", 8, 6), ("b", 0, 7), ("scale", 0, 1)]]
    checkpoint = Checkpoint(save(tmp_path / "checkpoint", shares))
    assert "w (exp_avg) has 14 of 20 elements" in refusal(checkpoint.tensor, "w", "exp_avg")


def test_a_removed_file_is_named(tmp_path: Path) -> None:
    """Before anything is loaded."""
    folder = save(tmp_path / "checkpoint", parts(2))
    (folder / "rank-00001-00000.safetensors").unlink()
    with pytest.raises(PipelineError, match=r"rank-00001-00000\.safetensors: listed in"):
        Checkpoint(folder)


def test_checkpoint_is_plain_json_and_safetensors(tmp_path: Path) -> None:
    """No pickle is in it, and the format says where each part of a tensor lies."""
    folder = save(tmp_path / "checkpoint", parts(2))
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.json",
        "manifest.json",
        "rank-00000-00000.safetensors",
        "rank-00001-00000.safetensors",
    ]
    document = json.loads((folder / "checkpoint.json").read_text())
    assert document["fragments"]["rank-00001"] == {"w": [14, 6], "b": [0, 7], "scale": [0, 1]}
