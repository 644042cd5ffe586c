"""The bars are the planner's figures."""

from __future__ import annotations

import pytest
from tests.builders.traced_models import traced_model

from zerotrain.builder.draft import read_draft
from zerotrain.builder.forecast import KINDS, find_machine, forecast, kind_of
from zerotrain.builder.traces import Traces
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.planner import choose_preset, fits, plan

FULL = "config/sdxl-full-24gb.yaml"
CARD = {"machine.gpu": "RTX 4090", "machine.host_memory": "64 GiB"}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    """Traces that have one of any model."""
    traced = traced_model(batch=8)
    monkeypatch.setattr(Traces, "find", lambda *_, **__: traced)
    return Traces()


@pytest.mark.parametrize(
    "form",
    [
        CARD,
        {**CARD, "train.gradient_checkpointing": "false"},
        {**CARD, "launch.num_processes": "4"},
        {"machine.device_memory": "48 GiB", "machine.host_memory": "32 GiB"},
        {"machine.host_memory": "300 GiB"},  # this machine, whatever it has
    ],
)
def test_bars_add_up_to_the_plan(form: dict[str, str], traces: Traces) -> None:
    """Each preset's memory, what fits, seconds a step, and auto's choice are those of `plan`."""
    draft = read_draft({"from": FULL, **form})
    assert draft.run is not None
    phase = draft.run.phases[0]
    machine = find_machine(draft.machine, phase)
    made = plan(draft.run, phase.name, machine, traced=traced_model(batch=8))
    found = forecast(draft, draft.run, traces)
    assert [row.name for row in found.rows] == list(made.rows)
    for row in found.rows:
        one = made.rows[row.name][made.mode]
        assert row.device is not None
        assert row.device.total == one.device
        assert (row.host.total if row.host else 0) == one.host
        if machine.device_memory is not None:
            assert row.fits == fits(one, machine.device_memory, machine.host_memory)
        if machine.gpu:
            assert (
                row.seconds == one.time(machine.gpu, made.traced.parameters.trained_numel).seconds
            )
        else:
            assert row.seconds is None
        for bar in filter(None, (row.device, row.host)):
            assert sum(part.bytes for part in bar.segments) == bar.total
            assert all(part.start + part.length <= 1 + 1e-9 for part in bar.segments)
    if made.choice is not None and made.choice.chosen is not None:
        assert found.recommended == choose_preset(made)[0]
        assert [row.name for row in found.rows if row.recommended] == [found.recommended]


def test_what_a_card_holds_is_marked(traces: Traces) -> None:
    """The limit is a line in each bar, and a bar beyond it says so."""
    draft = read_draft({"from": FULL, **CARD})
    assert draft.run is not None
    rows = {row.name: row for row in forecast(draft, draft.run, traces).rows}
    small, large = rows["zero2_offload"], rows["torch"]
    assert (small.fits, small.recommended, small.chosen) == (True, True, True)
    assert (large.fits, large.recommended, large.chosen) == (False, False, False)
    assert small.device is not None
    assert large.device is not None
    assert large.device.over
    assert not small.device.over
    assert small.device.limit == large.device.limit == 24_564 * 2**20
    assert small.device.mark == large.device.mark
    assert "offload_path" in rows["zero3_nvme"].note


def test_every_state_of_a_training_has_a_kind_of_its_own(traces: Traces) -> None:
    """Weights, gradients, masters and moments are in no preset counted as copies."""
    draft = read_draft({"from": FULL, **CARD, "train.use_ema": "true"})
    assert draft.run is not None
    machine = find_machine(draft.machine, draft.run.phases[0])
    for processes in (1, 4):
        run = read_draft({"from": FULL, "launch.num_processes": str(processes)}).run
        assert run is not None
        made = plan(run, run.phases[0].name, machine, traced=traced_model(batch=8))
        parts = [part for row in made.rows.values() for one in row.values() for part in one.parts]
        kinds = {part.name: kind_of(part) for part in parts}
        assert {kinds[part.name] for part in parts if part.state} == {*KINDS[:3]}
        assert kinds["activations"] == "activations"
        assert kinds["reduce bucket"] == kinds["reduce buckets"] == "buckets"


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ({"machine.gpu": "RTX 4900"}, "machine.gpu: RTX 4900: this GPU is not known"),
        ({"machine.device_memory": "24 apples"}, "machine.device_memory: '24 apples' is no size"),
        ({"machine.host_memory": "-1"}, "machine.host_memory: '-1' is no size"),
        (
            {"machine.gpu": "RTX 4090"},
            "machine.host_memory: the memory of the host of RTX 4090 is not given",
        ),
        (
            {"machine.device_memory": "24 GiB"},
            "machine.host_memory: the memory of the host of a GPU of 24.0 GiB is not given",
        ),
    ],
)
def test_a_machine_that_is_none_is_refused(form: dict[str, str], what: str, traces: Traces) -> None:
    """The sentence names the field; the nearest GPUs are in the hint."""
    draft = read_draft({"from": FULL, **form})
    assert draft.run is not None
    with pytest.raises(PipelineError) as refused:
        forecast(draft, draft.run, traces)
    assert refused.value.what == what
