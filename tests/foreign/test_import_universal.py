"""The universal checkpoints written here are what DeepSpeed's own loader takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.foreign import maker
from tests.foreign.maker import STEPS

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.state import state
from zerotrain.state.external import open_external, write_universal


@pytest.fixture(scope="module")
def loaded(made: Any, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """(source, what an engine holds that loaded it) for stages 1, 2, 3 and 3 with CPU offload.

    Stages 1 and 2 get a stage 3 checkpoint of two ranks with two param groups. Stage 3 gets one
    group: DeepSpeed's loader there gives all groups the first one's values.
    """
    folder = tmp_path_factory.mktemp("universal")
    two_groups = open_external(made(3, 2, sub_group_size=20) / "checkpoint")
    one_group = open_external(made(2, 1, groups=1) / "checkpoint")
    write_universal(folder / "two", two_groups)
    write_universal(folder / "one", one_group, tag="mine")
    loads = [
        (folder / "two", 1, {}),
        (folder / "two", 2, {}),
        (folder / "one", 3, {"groups": 1}),
        (folder / "one", 3, {"groups": 1, "offload": True}),
    ]
    ranks(maker.load_universal, loads, folder / "found.pt")
    found = torch.load(folder / "found.pt", weights_only=False)
    return list(zip([two_groups, two_groups, one_group, one_group], found, strict=True))


@pytest.mark.parametrize("case", range(4), ids=["zero1", "zero2", "zero3", "zero3-offload"])
def test_an_engine_holds_the_source_bit_for_bit(loaded: list[Any], case: int) -> None:
    """fp32 weights and both moments, through safe_get_*, of engines that had other weights."""
    source, found = loaded[case]
    assert set(found["live"]) == set(source.names)
    for name in source.names:
        for slot in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found["live"][name][slot], source.tensor(name, slot)), (name, slot)


@pytest.mark.parametrize("case", range(4), ids=["zero1", "zero2", "zero3", "zero3-offload"])
def test_an_engine_counts_on(loaded: list[Any], case: int) -> None:
    """Steps and samples are the source's, and two more updates make the optimizer's count 5."""
    source, found = loaded[case]
    assert found["global_steps"] == source.position.step == 3
    assert found["global_samples"] == source.position.samples
    assert set(found["steps"]) == {3}
    assert set(found["steps_after"]) == {5}
    for group, meant in zip(found["groups"], source.position.param_groups, strict=True):
        assert group == {
            "lr": meant["lr"], "betas": tuple(meant["betas"]), "eps": meant["eps"],
            "weight_decay": meant["weight_decay"],
        }  # fmt: skip


MORE = 5
"""Steps after the universal checkpoint."""
CONTINUED = {
    "zero1": (1, {}, 0.0),
    "zero2": (2, {}, 0.0),
    "zero2-offload": (2, {"offload": True}, 1e-6),
    "zero3-offload": (3, {"offload": True, "sub_group_size": 20}, 1e-6),
}
"""Stage, options and the largest relative deviation of an engine from the undisturbed training."""
UNABLE = {"zero3-torch": (3, {"sub_group_size": 20})}


@pytest.fixture(scope="module")
def continued(made: Any, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What engines hold MORE steps after they loaded a checkpoint with two param groups."""
    folder = tmp_path_factory.mktemp("continued")
    write_universal(folder, open_external(made(2, 1) / "checkpoint"))
    every = {**{name: case[:2] for name, case in CONTINUED.items()}, **UNABLE}
    ranks(
        maker.continue_universal, [(folder, *case) for case in every.values()], MORE, folder / "f"
    )
    return dict(zip(every, torch.load(folder / "f", weights_only=False), strict=True))


@pytest.mark.parametrize("case", CONTINUED)
def test_param_groups_continue_as_if_undisturbed(
    continued: dict[str, Any], made: Any, case: str
) -> None:
    """Groups of other learning rates and decay: every engine goes where the training would have."""
    expected = torch.load(made(2, 1, steps=STEPS + MORE) / "expected.pt", weights_only=False)
    found, (*_, bound) = continued[case], CONTINUED[case]
    assert found["groups"] == [(2e-2, 0.1), (1e-2, 0.0)]
    for slot in ("master", "exp_avg", "exp_avg_sq"):
        pairs = [(found["live"][name][slot], held[slot]) for name, held in expected["live"].items()]
        apart = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
        norm = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
        assert apart <= bound * norm, (slot, apart / norm)


def test_torchs_optimizer_stops_at_stage_3_instead_of_going_wrong(
    continued: dict[str, Any],
) -> None:
    """DeepSpeed's stage 3 gives all sub-groups one step counter, which AdamW would advance once for
    each of them: it refuses the counter that several groups are written with."""
    assert "`state_steps` argument must contain a list of singleton tensors" in str(
        continued["zero3-torch"].get("error")
    )


def test_a_state_is_written_as_well(tmp_path: Path, made: Any) -> None:
    """zerotrain's own state is a source like any other: the files hold its tensors."""
    source = open_external(made(2, 1, groups=1) / "checkpoint")
    with artifact.publish(tmp_path / "state", state.KIND) as draft:
        state.write_state(draft.folder, source.position, source.shapes, source.slots, source.tensor)
    own = state.State(tmp_path / "state")
    folder = write_universal(tmp_path, own)
    assert (tmp_path / "latest_universal").read_text() == folder.name == "global_step3_universal"
    for name in own.names:
        saved = torch.load(folder / "zero" / name / "exp_avg.pt")
        assert torch.equal(saved["param"], source.tensor(name, "exp_avg"))
    with pytest.raises(PipelineError, match="there already"):
        write_universal(tmp_path, own)
