"""The readers of files that people exchange, each with whole files to damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.builders.phases import make_phase
from tests.builders.states import publish_checkpoint

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.config.runs import read_runs
from zerotrain.importers.command_line import import_command
from zerotrain.importers.reading import import_file
from zerotrain.launch.run_yaml import read_run_yaml, write_run_yaml
from zerotrain.models.base import check_config, check_model_index, layout_of
from zerotrain.models.families import load_family
from zerotrain.models.sizes import read_header
from zerotrain.pipeline.lineage import report
from zerotrain.pipeline.lineage.walk import trace
from zerotrain.state.external import open_external
from zerotrain.state.position import read_position
from zerotrain.training.process import lock
from zerotrain.training.process.ending import ExitRecord, read_exit_codes, read_exit_record
from zerotrain.training.process.lock_owner import this_process
from zerotrain.training.reporting import heartbeat

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Reader:
    """A reader, and how to make a folder with a whole input."""

    write: Callable[[Path], None]
    """Writes the files into a folder."""
    read: Callable[[Path, Path], object]
    """Reads a folder, one of whose files is damaged; it may only raise PipelineError."""
    files: str = "**/*"
    """Which of the files are damaged."""


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
    status = heartbeat.RankStatus(0, "n1", 17, 1.0, 3, "a.py:1 (f)", False, 0.5, 9.0)
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


def _write_base(folder: Path) -> None:
    index = {"_class_name": "StableDiffusionXLPipeline", "_diffusers_version": "0.36.0"}
    index |= {part: ["diffusers", name] for part, name in layout_of("sdxl").classes.items()}
    (folder / "model_index.json").write_text(json.dumps(index))
    config = {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def _read_base(folder: Path, _: Path) -> None:
    check_config(folder / "config.json", load_family("causal_lm"), "the base")
    check_model_index(folder / "model_index.json", layout_of("sdxl"), "the base")


def _write_external(folder: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    (folder / "accelerate").mkdir()
    save_file(model.state_dict(), folder / "accelerate" / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "accelerate" / "optimizer.bin")


def _read_external(folder: Path, _: Path) -> None:
    open_external(folder / "accelerate")


def _write_launches(folder: Path) -> None:
    for path in (ROOT / "tests/importing/references").rglob("*.*"):
        shutil.copy(path, folder / f"{path.parent.name}-{path.name}")


def _read_launch(_: Path, file: Path) -> None:
    if file.suffix == ".sh":
        import_command(file.read_text(encoding="utf-8", errors="replace"))
    else:
        import_file(file)


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
    "configuration": Reader(_copy("config/config.yaml", "config/sums.yaml"), _read_config),
    "run.yaml": Reader(_write_run_yaml, _read_run_yaml),
    "lock": Reader(_write_lock, _read_lock),
    "report of a process": Reader(_write_report, _read_report),
    "record of an ending": Reader(_write_ending, _read_ending),
    "checkpoint": Reader(_write_checkpoint, _read_checkpoint, "**/*.json"),
    "safetensors": Reader(_write_header, lambda _, file: read_header(file)),
    "base": Reader(_write_base, _read_base),
    "launch files": Reader(_write_launches, _read_launch),
    "lineage": Reader(_write_lineage, _read_lineage, "**/*.json"),
    "external checkpoint": Reader(_write_external, _read_external, "accelerate/*"),
}
