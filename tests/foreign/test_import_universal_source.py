"""A universal checkpoint as a start: DeepSpeed's own, and the ones written here."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.foreign.conftest import read, trained_there

from zerotrain.errors import PipelineError
from zerotrain.state.external import ExternalCheckpoint, open_external, write_universal

MADE = [
    pytest.param(2, 2, {}, id="zero2-two-ranks"),
    pytest.param(1, 1, {"precision": "bf16"}, id="zero1-bf16"),
    pytest.param(3, 2, {"sub_group_size": 20}, id="zero3-two-ranks-sub-groups"),
    pytest.param(3, 1, {"precision": "fp16"}, id="zero3-fp16"),
]


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    # As `ds_to_universal.py --inject_missing_state` does, in this process.
    ds_to_universal.main(
        Namespace(
            input_folder=str(source), output_folder=str(target), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def converted(made: Any, server: Any, tmp_path_factory: Any) -> Callable[..., tuple[Path, Path]]:
    """A checkpoint of DeepSpeed and what its own converter made of it, once for each."""
    done: dict[str, Path] = {}

    def make(stage: int, world: int, options: dict[str, Any]) -> tuple[Path, Path]:
        source = made(stage, world, **options) / "checkpoint"
        if str(source) not in done:
            done[str(source)] = tmp_path_factory.mktemp("universal")
            target = done[str(source)] / "global_step3_universal"
            job = server.Process(target=_convert, args=(source / "global_step3", target))
            job.start()
            job.join(60)
            assert job.exitcode == 0
        return source, done[str(source)]

    return make


@pytest.fixture
def copy(converted: Any, tmp_path: Path) -> Path:
    """The tag folder of a converted stage 2 checkpoint, which may be changed."""
    shutil.copytree(converted(2, 2, {})[1], tmp_path / "copy")
    return tmp_path / "copy" / "global_step3_universal"


def assert_same(found: ExternalCheckpoint, expected: ExternalCheckpoint) -> None:
    """Every tensor bit for bit, and the position but for what made it."""
    assert sorted(found.names) == sorted(expected.names)
    assert found.slots == expected.slots
    for name in expected.names:
        for slot in expected.slots:
            assert torch.equal(found.tensor(name, slot), expected.tensor(name, slot)), (name, slot)
    for key in ("step", "samples", "optimizer", "optimizer_step", "param_groups"):
        assert getattr(found.position, key) == getattr(expected.position, key), key


@pytest.mark.parametrize(("stage", "world", "options"), MADE)
def test_deepspeeds_own_is_the_checkpoint_that_it_was_made_from(
    converted: Any, stage: int, world: int, options: dict[str, Any]
) -> None:
    """Masters, moments, groups, step, frozen weights and ties of ds_to_universal's folder."""
    source, universal = converted(stage, world, options)
    found, expected = open_external(universal), open_external(source)
    assert_same(found, expected)
    assert found.tied == expected.tied
    assert found.frozen == expected.frozen
    for name in expected.frozen:
        assert torch.equal(found.frozen_tensor(name), expected.frozen_tensor(name))
    assert found.position.loss_scale == expected.position.loss_scale
    assert found.position.engine == expected.position.engine
    assert found.lost == []


@pytest.mark.parametrize("groups", [1, 2])
def test_ours_comes_back_bit_for_bit(made: Any, tmp_path: Path, groups: int) -> None:
    """What write_universal wrote is read with its groups; nothing of it is left out."""
    options = {"groups": 1} if groups == 1 else {}
    expected = open_external(made(2, 1 if groups == 1 else 2, **options) / "checkpoint")
    tag = write_universal(tmp_path, expected, tag="mine")
    found = open_external(tmp_path)
    assert found.folder == tag
    assert found.names == expected.names
    assert_same(found, expected)
    assert found.position.engine["engine"] == "deepspeed"
    assert len(found.position.param_groups) == groups
    assert found.lost == []
    again = open_external(write_universal(tmp_path, found, tag="again"))
    assert_same(again, expected)


def test_a_model_file_that_names_no_parameters_is_refused(made: Any, tmp_path: Path) -> None:
    tag = write_universal(tmp_path, open_external(made(2, 1, groups=1) / "checkpoint"))
    path = tag / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "param_shapes": None}, path)
    with pytest.raises(PipelineError, match=f"{path.name}: names no parameters"):
        open_external(tmp_path)


def test_latest_is_preferred_to_latest_universal(converted: Any, made: Any, tmp_path: Path) -> None:
    """A training that continued after the conversion is continued where it ended."""
    source, universal = converted(2, 2, {})
    shutil.copytree(universal, tmp_path / "both")
    shutil.copytree(source, tmp_path / "both", dirs_exist_ok=True)
    assert open_external(tmp_path / "both").folder.name == "global_step3"
    (tmp_path / "both" / "latest").unlink()
    assert open_external(tmp_path / "both").folder.name == "global_step3_universal"


@pytest.mark.parametrize(
    "name",
    ["zero/first.weight/fp32.pt", "zero/first.weight/exp_avg.pt", "zero/last.bias/step.pt",
     "zero/optimizer_state.pt", "mp_rank_00_model_states.pt"],
)  # fmt: skip
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_file_is_named(copy: Path, name: str, damage: str) -> None:
    """At opening, or when its tensor is asked for; nothing stands in for it."""
    path = copy / name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[data.index(b"data.pkl") + 80] ^= 1
        path.write_bytes(data)

    def read() -> list[torch.Tensor]:
        found = open_external(copy)
        return [found.tensor("first.weight", slot) for slot in found.slots]

    with pytest.raises(PipelineError, match=path.name) as caught:
        read()
    said = {"missing": "no such file", "truncated": "truncated", "flipped": "damaged"}[damage]
    assert said in caught.value.what


def test_exchanged_files_are_refused(copy: Path) -> None:
    """Moments under each other's names: torch.save keeps a file's name in it."""
    folder = copy / "zero" / "first.weight"
    (folder / "exp_avg.pt").rename(folder / "spare")
    (folder / "exp_avg_sq.pt").rename(folder / "exp_avg.pt")
    (folder / "spare").rename(folder / "exp_avg_sq.pt")
    with pytest.raises(PipelineError, match=r"exp_avg.pt: was saved as exp_avg_sq.pt"):
        open_external(copy).tensor("first.weight", "exp_avg")


def test_weights_of_another_training_are_refused(copy: Path) -> None:
    """The model file that the converter copied holds the weights in the training's precision."""
    path = copy / "zero" / "first.bias" / "fp32.pt"
    document = torch.load(path)
    document["param"] = document["param"].detach() + 1e-3
    torch.save(document, path)
    with pytest.raises(PipelineError, match=r"first.bias/fp32.pt: differs from mp_rank_00_model"):
        open_external(copy)


def test_another_step_is_refused(copy: Path) -> None:
    """All parameters of one save have one step."""
    torch.save(torch.tensor(9.0), copy / "zero" / "last.bias" / "step.pt")
    with pytest.raises(PipelineError, match=r"last.bias/step.pt: step 9, .* 3"):
        open_external(copy)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The tag folder of a universal checkpoint of step 3, written here."""
    model = trained_there(tmp_path / "there", lambda own: own.values())
    return write_universal(tmp_path, read(tmp_path / "there", model), tag="mine")


def _count(tag: Path, steps: int, skipped: int) -> None:
    path = tag / "mp_rank_00_model_states.pt"
    document = torch.load(path, weights_only=False)
    torch.save({**document, "global_steps": steps, "skipped_steps": skipped}, path)


def _as_stage3(tag: Path) -> None:
    """The step in optimizer_state.pt alone, as ds_to_universal leaves it at stage 3."""
    for path in (tag / "zero").glob("*/step.pt"):
        path.unlink()


def _with_weights(tag: Path) -> None:
    """The module's weights in the model file, as at stages 1 and 2."""
    path = tag / "mp_rank_00_model_states.pt"
    document = torch.load(path, weights_only=False)
    document["module"] = {name: torch.load(tag / "zero" / name / "fp32.pt")["param"].bfloat16()
                          for group in document["param_shapes"] for name in group}  # fmt: skip
    torch.save(document, path)


@pytest.mark.parametrize("steps", [2, 20])
def test_a_model_file_of_another_step_is_refused(written: Path, steps: int) -> None:
    """Copied from another tag: its counters are not those of the moments."""
    _count(written, steps, 0)
    sentence = rf"mp_rank_00_model_states\.pt: counts {steps} updates, .*/step\.pt 3"
    with pytest.raises(PipelineError, match=sentence):
        open_external(written)


def test_an_earlier_model_file_of_stage_3_is_refused(written: Path) -> None:
    """No optimizer makes more updates than its engine."""
    _as_stage3(written)
    _count(written, 2, 0)
    with pytest.raises(PipelineError, match=r"counts 2 updates, zero/optimizer_state\.pt 3"):
        open_external(written)


def test_steps_that_fp16_skipped_are_no_updates(written: Path) -> None:
    """The engine's count is of steps, the optimizer's of updates."""
    _count(written, 10, 7)
    position = open_external(written).position
    assert (position.step, position.optimizer_step) == (10, 3)


@pytest.mark.parametrize("form", [_as_stage3, _with_weights])
def test_an_optimizer_that_was_started_later_is_reported(written: Path, form: Any) -> None:
    """Of a training that loaded weights alone: both counts are kept, as from DeepSpeed's files."""
    form(written)
    _count(written, 10, 0)
    found = open_external(written)
    assert (found.position.step, found.position.optimizer_step) == (10, 3)
    assert found.lost == ["the engine counts 10 updates, the optimizer 3: both are kept"]


@pytest.mark.parametrize(
    ("path", "held", "what"),
    [
        ("zero/first.bias/step.pt", torch.ones(2), r"step\.pt: step is a tensor of .* \[2\], no"),
        ("zero/first.bias/step.pt", {"step": 3}, r"step\.pt: step is \{'step': 3\}, no number"),
        (
            "zero/optimizer_state.pt", {"param_groups": [{"lr": "fast"}]},
            r"optimizer_state\.pt: lr of param group 0 is 'fast', no number",
        ),
        ("zero/optimizer_state.pt", {"param_groups": [1]}, r"optimizer_state\.pt: holds no param_"),
    ],
)  # fmt: skip
def test_odd_values_are_one_sentence(written: Path, path: str, held: Any, what: str) -> None:
    """With the file and the value; no traceback."""
    torch.save(held, written / path)
    with pytest.raises(PipelineError, match=what):
        open_external(written)
