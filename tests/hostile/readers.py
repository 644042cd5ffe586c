"""The readers of files that people exchange, each with whole files to damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.builders.phases import make_phase
from tests.builders.states import publish_checkpoint
from tests.hostile.data_readers import DATA_READERS
from tests.hostile.foreign_readers import FOREIGN_READERS
from tests.hostile.reader import Reader
from tests.hostile.run_readers import RUN_READERS

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.documents import read_header
from zerotrain.config.runs import read_runs
from zerotrain.launch.files import read_run_yaml, write_run_yaml
from zerotrain.machine.processes import this_process
from zerotrain.run.lineage import report
from zerotrain.run.lineage.trace import trace
from zerotrain.state.position import read_position
from zerotrain.training.process import lock
from zerotrain.training.process.ending import ExitRecord, read_exit_codes, read_exit_record
from zerotrain.training.reporting import heartbeat

ROOT = Path(__file__).parents[2]


def _copy(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in names:
            shutil.copy(ROOT / name, folder)

    return write


def _read_config(_: Path, file: Path) -> None:
    read_runs(file)


def _write_run_yaml(folder: Path) -> None:
    write_run_yaml(make_phase("zero2_offload"), folder / "run.yaml")


def _read_run_yaml(_: Path, file: Path) -> None:
    phase = read_run_yaml(file)
    phase.numbers(), phase.rounding(), list(phase.explain())
    assert phase.derived.until_step - phase.derived.start_step is not None


def _write_lock(folder: Path) -> None:
    # A name as JSON files have it, for which more kinds of damage are known.
    (folder / "lock.json").write_text(json.dumps(asdict(this_process(120))))


def _read_lock(folder: Path, file: Path) -> None:
    file.rename(folder / lock.LOCK)
    if owner := lock.read_owner(folder):
        lock.is_alive(folder, owner)
        assert lock.describe(folder, owner).startswith(f"pid {owner.pid} on ")


def _write_report(folder: Path) -> None:
    (folder / heartbeat.RANKS).mkdir()
    status = heartbeat.RankStatus(0, this_process(), 3, "a.py:1 (f)", False, 0.5, 9.0)
    (folder / heartbeat.RANKS / "00000.json").write_text(json.dumps(asdict(status)))


def _read_report(folder: Path, _: Path) -> None:
    heartbeat.describe_hang(folder, 10.0)
    heartbeat.describe_past_hang(folder)


def _write_ending(folder: Path) -> None:
    record = ExitRecord(85, "stopped", "start again", "device_memory", {"total": 1})
    (folder / "exit.json").write_text(json.dumps(asdict(record)))
    (folder / "ended-0.json").write_text('{"0": -9, "1": 1}')


def _read_ending(folder: Path, _: Path) -> None:
    if found := read_exit_record(folder):
        assert (type(found.code), type(found.reason)) == (int, str)
    assert all(type(code) is int for code in read_exit_codes(folder).values())


def _write_checkpoint(folder: Path) -> None:
    publish_checkpoint(folder / "checkpoint", 12)


def _read_checkpoint(folder: Path, _: Path) -> None:
    found = artifact.read(folder / "checkpoint", "checkpoint", verify=False)
    if "checkpoint.json" in found.files:
        read_position(found, "checkpoint.json")


def _write_header(folder: Path) -> None:
    save_file({"a": torch.ones(3, 2), "b": torch.zeros(1)}, folder / "a.safetensors", {"k": "v"})


def _write_lineage(folder: Path) -> None:
    results = folder / "results"
    parents: dict[str, Artifact] = {}
    chain = {
        "data/d": "dataset", "data/d/cache/32": "cache",
        "r/p/checkpoint": "checkpoint", "r/p/weights": "weights",
    }  # fmt: skip
    for name, kind in chain.items():
        with artifact.publish(results / name, kind, parents=parents) as draft:
            (draft.folder / "a.bin").write_bytes(b"a")
            draft.content = {"run": "r", "phase": "p", "samples": [], "repeats": 1, "bad": []}
        parents = {kind: artifact.read(results / name, kind)}


def _read_lineage(folder: Path, _: Path) -> None:
    walk = trace(folder / "results" / "r" / "p" / "weights")
    report.text(walk)
    report.document(walk)
    report.flowchart(walk)


READERS: dict[str, Reader] = {
    **FOREIGN_READERS,  # first, as they take longest
    "configuration": Reader(_copy("config/config.yaml", "config/sums.yaml"), _read_config),
    "run.yaml": Reader(_write_run_yaml, _read_run_yaml),
    "lock": Reader(_write_lock, _read_lock, opens=False),
    "report of a process": Reader(_write_report, _read_report),
    "record of an ending": Reader(_write_ending, _read_ending),
    "checkpoint": Reader(_write_checkpoint, _read_checkpoint, "**/*.json"),
    "safetensors": Reader(_write_header, lambda _, file: read_header(file)),
    "lineage": Reader(_write_lineage, _read_lineage, "**/*.json"),
    **DATA_READERS,
    **RUN_READERS,
}
