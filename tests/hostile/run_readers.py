"""Readers of whole run folders, as watch, doctor, compare, switch, the report and the page read
them; and of the files that DVC and the page leave next to runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from tests.builders.phases import make_phase
from tests.builders.states import make_position, publish_checkpoint
from tests.builders.watched_runs import WatchedRun
from tests.hostile.reader import Reader, vouch_for
from tests.machine.fakes import machine as cpu_machine

from zerotrain import artifact
from zerotrain.artifact.documents import read_text
from zerotrain.artifact.layout import RunFolder
from zerotrain.builder import live, processes, run_pages
from zerotrain.config.read import read_config
from zerotrain.config.runs import read_runs
from zerotrain.errors import PipelineError
from zerotrain.graph.dvc.files import load_pipeline, parse_lock
from zerotrain.graph.switch import point
from zerotrain.launch.files import write_launch_files, write_run_yaml
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.machine.processes import this_process
from zerotrain.run.compare.sides import find_sides, read_facts
from zerotrain.run.doctor.report import Report, look_at_run
from zerotrain.run.runs import choose_runs, trained_models
from zerotrain.run.view import RunView
from zerotrain.run.watch import state
from zerotrain.state.open import open_view
from zerotrain.state.show import show
from zerotrain.state.state import write_state
from zerotrain.training.checkpointing.progress_folder import step_folder
from zerotrain.training.process.ending import ExitRecord
from zerotrain.training.reporting import heartbeat

RUN = "digits"
VALUES = ("launch", "metrics", "evaluation", "ran_on", "weights", "exported", "engine", "end")
"""What a view reads of a phase."""


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    here = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)


def write_run(folder: Path) -> None:
    """A run whose first phase is finished, and whose second one was killed."""
    with _inside(folder):
        run = WatchedRun(RUN)
        run.make_data()
        shutil.rmtree(run.folder.base)
        with artifact.publish(run.folder.base, "base") as draft:
            (draft.folder / "unet").mkdir()
            save_file({"a.weight": torch.ones(10, 10)}, draft.folder / "unet/a.safetensors")
        run.finish("plain", 300)
        for name in ("plain", "offload"):
            path = RunFolder(RUN).phase(name).path
            launch = path / "launch"
            launch.mkdir(parents=True, exist_ok=True)
            phase = make_phase("torch" if name == "plain" else "zero2_offload")
            write_run_yaml(phase, launch / "run.yaml")
            write_launch_files(phase, launch, launch)
        run.log("plain", 10, 20, 300)
        run.log("offload", 301, 302)
        progress = run.lock("offload")
        (progress / "exit.json").write_text(json.dumps(asdict(ExitRecord(1, "no", "again", "x"))))
        (progress / "ended-0.json").write_text('{"0": -9, "1": 1}')
        (progress / heartbeat.RANKS).mkdir()
        status = heartbeat.RankStatus(0, this_process(), 303, "a.py:1 (f)", False, 0.5, 9.0)
        (progress / heartbeat.RANKS / "00000.json").write_text(json.dumps(asdict(status)))
        publish_checkpoint(step_folder(progress, 302), 302)
        metrics = {"prompt_accuracy": 1.0, "train_seconds": 3.0, "peak_host_bytes": 9, "step": 300}
        (RunFolder(RUN).phase("plain").path / "metrics.json").write_text(json.dumps(metrics))
        run.write_stage_log("train_phase.offload", "RuntimeError: no\n")
        started = {"process": asdict(this_process()), "words": ["snakemake", "train"]}
        for what in ("train", "switch"):
            (run.folder.path / f"logs/builder.{what}.log").write_text("$ snakemake\n")
            record = run.folder.path / f"logs/builder.{what}.json"
            record.write_text(json.dumps(started))
        (run.folder.path / "benchmarks").mkdir()
        (run.folder.path / "benchmarks/a.tsv").write_text("s\th:m:s\n1.5\t0:00:01\n")


def _each(*calls: Callable[[], object]) -> None:
    """Call all; one may refuse the input, and then the others are called as well."""
    refused: list[PipelineError] = []
    for call in calls:
        try:
            call()
        except PipelineError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def _watch(folder: Path, _: Path) -> None:
    with _inside(folder):
        choose_runs()
        view = RunView(RUN)
        for _again in range(2):
            json.dumps(state._read(view).as_json())  # `read_state` shows tracebacks as a state


def _doctor(folder: Path, _: Path) -> None:
    with _inside(folder):
        report = Report({})
        look_at_run(f"config/{RUN}.yaml", cpu_machine(), report)


def _report(folder: Path, _: Path) -> None:
    with _inside(folder):
        folders = [RunFolder(RUN).phase(name).path for name in ("plain", "offload")]
        view = RunView(RUN, folders=folders)
        _each(
            *(partial(getattr, phase, name) for phase in view.phases for name in VALUES),
            lambda: view.curves,
            lambda: [read_facts(side) for side in find_sides([f"{RUN}/plain", f"{RUN}/offload"])],
        )


def _switch(folder: Path, _: Path) -> None:
    with _inside(folder):
        file = Path(f"config/{RUN}.yaml")
        config = read_config(file)

        def look() -> None:
            phase, until = point.unfinished_phase(config, file)
            step = point.choose_step(config, phase, "last", until, file)
            place = step_folder(point.phase_folder(config, phase) / "progress", step)
            point.launch_differences(place, phase)

        _each(look, lambda: trained_models(RUN))


def _page(folder: Path, _: Path) -> None:
    with _inside(folder):
        run_pages.find_sources()
        for run in live.known_runs():
            state._read(RunView(run)), live.find_pictures(run), processes.is_at_work(run)
            processes.is_asked_to_stop(run)
        for what in ("train", "switch"):
            processes.read_started(RUN, what), processes.read_output(RUN, what, 15)


def _write_dvc(folder: Path) -> None:
    stage = {
        "cmd": "zerotrain train_phase", "deps": [{"path": "a", "hash": "md5", "md5": "0" * 32}],
        "params": {"config/config.yaml": {"train": {"resolution": 32}}},
        "outs": [{"path": "results/digits/plain/weights", "md5": f"{'1' * 32}.dir", "nfiles": 2}],
    }  # fmt: skip
    (folder / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": {"a": stage}}))
    stage = {"cmd": "x", "deps": ["a"], "outs": [{"results/digits/plain/weights": {"cache": True}}]}
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"a": stage}}))


def _read_dvc(folder: Path, _: Path) -> None:
    _each(
        lambda: load_pipeline(folder / "dvc.yaml"),
        lambda: parse_lock(read_text(folder / "dvc.lock")),
    )


def _write_state(folder: Path) -> None:
    with artifact.publish(folder / "state", "state") as draft:
        slots = ["master", "exp_avg", "exp_avg_sq"]
        write_state(draft.folder, make_position(), {"w": [2]}, slots, lambda *_: torch.ones(2))


def _read_state(folder: Path, file: Path) -> None:
    vouch_for(folder / "state", file)
    list(show(open_view(folder / "state"), tensors=True))


def _plan(folder: Path, _: Path) -> None:
    find_architecture("sdxl", str(folder))


def _write_list(folder: Path) -> None:
    with _inside(folder):
        WatchedRun("one"), WatchedRun("two")
        Path("config/both.yaml").write_text(
            "runs: [config/one.yaml, config/two.yaml]\n", encoding="utf-8"
        )


def _read_list(folder: Path, _: Path) -> None:
    with _inside(folder):
        read_runs(Path("config/both.yaml"))


RUN_READERS: dict[str, Reader] = {
    "run folder, watch": Reader(write_run, _watch, "results/**/*"),
    "run folder, doctor": Reader(write_run, _doctor),
    "run folder, report": Reader(write_run, _report, "results/**/*"),
    "run folder, switch": Reader(write_run, _switch),
    "run folder, page": Reader(write_run, _page),
    "files of DVC": Reader(_write_dvc, _read_dvc),
    "several runs": Reader(_write_list, _read_list),
    "training state": Reader(_write_state, _read_state, "**/*.*"),
}
