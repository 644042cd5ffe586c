"""Damaged files of a run's folder end in a sentence or count as missing.

`run.yaml` decides what is trained, so it is refused; a lock, a process's report and the record of
an ending only inform, so they are left out. test_fuzz.py damages them in more ways.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.phases import make_phase
from tests.builders.refusals import refused
from tests.builders.states import make_position
from tests.hostile.reader import vouch_for

from zerotrain import artifact
from zerotrain.launch.files import read_run_yaml, write_run_yaml
from zerotrain.machine.processes import this_process
from zerotrain.state.state import State, write_state
from zerotrain.training.process import lock
from zerotrain.training.process.ending import ExitRecord, read_exit_codes, read_exit_record
from zerotrain.training.reporting import heartbeat

ODD: tuple[Any, ...] = ({}, [], "x", -1, 10**30, float("nan"))


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    """The file of a phase."""
    write_run_yaml(make_phase("zero2"), tmp_path / "run.yaml")
    return tmp_path / "run.yaml"


def test_a_value_of_another_type_is_named(run_yaml: Path) -> None:
    """Its key, and what it should be."""
    text = run_yaml.read_text(encoding="utf-8").replace(
        "until_step: {value: 300", "until_step: {value: soon"
    )
    run_yaml.write_text(text, encoding="utf-8")
    assert "until_step: Input should be a valid integer" in refused(read_run_yaml, run_yaml).what


def test_aliases_are_not_followed(run_yaml: Path) -> None:
    """A few hundred bytes would name a document of millions of values."""
    lines = ["a0: &a0 {value: 1, source: user}"]
    for number in range(1, 20):
        inside = ", ".join(f"k{place}: *a{number - 1}" for place in range(9))
        lines.append(f"a{number}: &a{number} {{{inside}}}")
    run_yaml.write_text("\n".join(lines), encoding="utf-8")
    assert "aliases" in refused(read_run_yaml, run_yaml).what


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_an_odd_lock_has_no_owner(tmp_path: Path, odd: Any) -> None:
    """Nor does it end what looks for one."""
    me = asdict(this_process(120))
    for key in ("pid", "started", "lease"):
        (tmp_path / lock.LOCK).write_text(json.dumps({**me, key: odd}))
        assert lock.read_owner(tmp_path) is None
    (tmp_path / lock.LOCK).write_text(json.dumps(me))
    assert lock.read_owner(tmp_path) == this_process(120)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_an_odd_report_is_left_out(tmp_path: Path, odd: Any) -> None:
    """Those of the other processes are read."""
    folder = tmp_path / heartbeat.RANKS
    folder.mkdir()
    status = heartbeat.RankStatus(1, this_process(), 3, "a.py:1 (f)", False, 0.5, time.time())
    (folder / "00001.json").write_text(json.dumps(asdict(status)))
    whole = asdict(status)
    for key in ("pid", "step", "time"):
        part = {"process": {**whole["process"], key: odd}} if key == "pid" else {key: odd}
        (folder / "00000.json").write_text(json.dumps({**whole, **part}))
        assert heartbeat.read_statuses(tmp_path) == [status]


@pytest.mark.parametrize("odd", [{}, [], 1.5, None])
def test_an_odd_record_of_an_ending_counts_as_missing(tmp_path: Path, odd: Any) -> None:
    """So do odd exit codes of a machine's processes."""
    record = ExitRecord(85, "stopped", "start again", "device_memory", {"total": 1})
    for key in ("code", "reason"):
        (tmp_path / "exit.json").write_text(json.dumps({**asdict(record), key: odd}))
        assert read_exit_record(tmp_path) is None
    (tmp_path / "exit.json").write_text(json.dumps(asdict(record)))
    assert read_exit_record(tmp_path) == record
    (tmp_path / "ended-0.json").write_text(json.dumps({"0": odd}))
    (tmp_path / "ended-1.json").write_text(json.dumps({"1": -9}))
    assert read_exit_codes(tmp_path) == {1: -9}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda found: found["slots"]["exp_avg"].clear(), "slots.exp_avg and shapes have"),
        (lambda found: found["slots"].pop("master"), "slots.master and shapes have"),
        (lambda found: found.update(loss_scale={"good_steps": 1}), "loss_scale"),
        (lambda found: found.update(loss_scale={"scale": "9", "good_steps": 1}), "loss_scale"),
    ],
)
def test_a_damaged_state_is_refused(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    """Before a tensor of it is asked for; its hash is that of the damaged file."""
    with artifact.publish(tmp_path / "state", "state") as draft:
        slots = ["master", "exp_avg", "exp_avg_sq"]
        write_state(draft.folder, make_position(), {"w": [2]}, slots, lambda *_: torch.ones(2))
    assert {*State(tmp_path / "state").slots} == {*slots}
    path = tmp_path / "state" / "state.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    damage(found)
    path.write_text(json.dumps(found), encoding="utf-8")
    vouch_for(tmp_path / "state", path)
    assert message in refused(State, tmp_path / "state").what
