"""Damaged files of a run's folder end in a sentence or count as missing, never in a traceback.

`run.yaml` decides what is trained, so it is refused; a lock, a process's report and the record of
an ending only inform, so they are left out.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import pytest
import yaml
from tests.builders.mutations import dumped, mutated_bytes, mutated_values
from tests.builders.phases import make_phase
from tests.builders.refusals import refused

from zerotrain.errors import PipelineError
from zerotrain.launch.run_yaml import read_run_yaml, write_run_yaml
from zerotrain.training.process import lock
from zerotrain.training.process.ending import ExitRecord, read_exit_codes, read_exit_record
from zerotrain.training.process.lock_owner import this_process
from zerotrain.training.reporting import heartbeat

COUNT = 150


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    """The file of a phase."""
    write_run_yaml(make_phase("zero2"), tmp_path / "run.yaml")
    return tmp_path / "run.yaml"


def test_a_damaged_run_yaml(run_yaml: Path) -> None:
    """Another value, a missing key, cut or changed bytes: refused with the file's name, or it is
    a phase whose values have their types."""
    content = run_yaml.read_bytes()
    values = mutated_values(yaml.safe_load(content), COUNT // 2)
    files = chain(map(as_yaml, values), mutated_bytes(content, COUNT // 2))
    refusals = []
    for changed in files:
        run_yaml.write_bytes(changed)
        try:
            phase = read_run_yaml(run_yaml)
        except PipelineError as error:
            refusals.append(error.what)
            continue
        phase.numbers(), phase.rounding(), list(phase.explain())
        assert phase.derived.until_step - phase.derived.start_step is not None
        assert phase.processes_per_machine * phase.launch.machines <= phase.launch.num_processes
    assert len(refusals) > COUNT // 2
    assert {one.partition(" (")[0] for one in refusals} == {
        f"{run_yaml}: not what this version writes"
    }


def as_yaml(document: object) -> bytes:
    """A document as a file has it."""
    return bytes(yaml.dump(document, Dumper=yaml.CSafeDumper, encoding="utf-8"))


def test_a_value_of_another_type_is_named(run_yaml: Path) -> None:
    """Its key, and what it should be."""
    text = run_yaml.read_text().replace("until_step: {value: 300", "until_step: {value: soon")
    run_yaml.write_text(text)
    assert "until_step: Input should be a valid integer" in refused(read_run_yaml, run_yaml).what


def test_aliases_are_not_followed(run_yaml: Path) -> None:
    """A few hundred bytes would name a document of millions of values."""
    lines = ["a0: &a0 {value: 1, source: user}"]
    lines += [f"a{n}: &a{n} {{{', '.join(f'k{m}: *a{n - 1}' for m in range(9))}}}"
              for n in range(1, 20)]  # fmt: skip
    run_yaml.write_text("\n".join(lines))
    assert "aliases" in refused(read_run_yaml, run_yaml).what


def test_a_damaged_lock(tmp_path: Path) -> None:
    """It has no owner, or one that can be looked for and described."""
    me = asdict(this_process(120))
    content = dumped(me)
    for changed in chain(map(dumped, mutated_values(me, COUNT)), mutated_bytes(content, COUNT)):
        (tmp_path / lock.LOCK).write_bytes(changed)
        if owner := lock.read_owner(tmp_path):
            lock.is_alive(tmp_path, owner)
            assert lock.describe(tmp_path, owner).startswith(f"pid {owner.pid} on ")
    (tmp_path / lock.LOCK).write_bytes(content)
    assert lock.read_owner(tmp_path) == this_process(120)


def test_a_damaged_report_of_a_process(tmp_path: Path) -> None:
    """It is left out, or can be described."""
    folder = tmp_path / heartbeat.RANKS
    folder.mkdir()
    status = heartbeat.RankStatus(0, "n1", 17, 1.0, 3, "a.py:1 (f)", False, 0.5, time.time())
    values = asdict(status)
    for changed in chain(
        map(dumped, mutated_values(values, COUNT)), mutated_bytes(dumped(values), COUNT)
    ):
        (folder / "00000.json").write_bytes(changed)
        heartbeat.describe_hang(tmp_path, time.time())
        heartbeat.describe_past_hang(tmp_path)
    (folder / "00000.json").write_bytes(dumped(values))
    assert heartbeat.read_statuses(tmp_path) == [status]


def test_a_damaged_record_of_an_ending(tmp_path: Path) -> None:
    """It counts as missing, or has a code and a reason; so do the exit codes of processes."""
    record = ExitRecord(85, "stopped", "start again", "device_memory", {"total": 1})
    values, codes = asdict(record), {"0": -9, "1": 1}
    for changed in chain(
        map(dumped, mutated_values(values, COUNT)), mutated_bytes(dumped(values), COUNT)
    ):
        (tmp_path / "exit.json").write_bytes(changed)
        if found := read_exit_record(tmp_path):
            assert (type(found.code), type(found.reason)) == (int, str)
    for changed in chain(
        map(dumped, mutated_values(codes, COUNT)), mutated_bytes(dumped(codes), COUNT)
    ):
        (tmp_path / "ended-0.json").write_bytes(changed)
        assert all(type(code) is int for code in read_exit_codes(tmp_path).values())
    (tmp_path / "exit.json").write_bytes(dumped(values))
    (tmp_path / "ended-0.json").write_bytes(dumped(codes))
    assert read_exit_record(tmp_path) == record
    assert read_exit_codes(tmp_path) == {0: -9, 1: 1}
