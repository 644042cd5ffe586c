"""After an out of memory: planned and measured memory, the preset that fits, a line that works."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders.phases import make_phase
from tests.builders.states import publish_checkpoint
from typer.testing import CliRunner

from zerotrain.cli import command_line
from zerotrain.config.read import read_config
from zerotrain.graph import reruns
from zerotrain.graph.switch import point as switch_checks
from zerotrain.launch.planner import fit
from zerotrain.launch.planner.planner import RESERVE, Plan, PlannedMachine, plan
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.host import gib
from zerotrain.training.checkpointing.progress_folder import step_folder

ROOT = Path(__file__).parents[2]
CONFIG = """\
run: flowers
base: nano
data: {images: photos}
train: {resolution: 64, global_batch_size: 4}
phases:
  - {name: plain, until: 300, launch: torch}
"""
FILE = Path("config/flowers.yaml")
HOST = 64 * 2**30


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project with a run on a machine with a GPU; Snakemake plans what a cut needs."""
    monkeypatch.setattr(reruns, "count_jobs", lambda *_: dict.fromkeys(switch_checks.PUBLISHING, 1))
    (tmp_path / "Snakefile").touch()
    for part in ("launch", "models"):
        shutil.copytree(ROOT / "config" / part, tmp_path / "config" / part)
    monkeypatch.chdir(tmp_path)
    FILE.write_text(CONFIG, encoding="utf-8")
    monkeypatch.setattr(fit, "this_machine", lambda _: PlannedMachine(2**40, HOST, "a GPU"))


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        file = tmp_path_factory.mktemp("run") / "flowers.yaml"
        file.write_text(CONFIG)
        return plan(read_config(file), "plain", PlannedMachine(2**40, HOST), base=None)


@pytest.fixture
def traced_once(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without tracing the model again."""

    def again(config: Any, name: str, machine: PlannedMachine, **options: Any) -> Plan:
        return plan(config, name, machine, auto=options["auto"], traced=planned.traced)

    monkeypatch.setattr(fit, "plan", again)


def phase(**changes: Any) -> ResolvedPhase:
    """The phase that ran out of memory."""
    shape = {"run": "flowers", "phase": "plain", "preset": "torch", "micro_batch_size": 4}
    return make_phase().with_values(**(shape | {"until_step": 300} | changes))


def device(planned: Plan, preset: str) -> dict[str, int]:
    """A device that has room for a preset and nothing more, and what was measured on it."""
    total = planned.rows[preset]["plain"].device + RESERVE
    assert planned.rows["torch"]["plain"].device + RESERVE > total
    return {"total": total, "allocated": total - 2**20, "reserved": total}


def save(step: int) -> None:
    """A checkpoint of the phase."""
    progress = Path("results/flowers/plain/progress")
    publish_checkpoint(step_folder(progress, step), step)


@pytest.mark.parametrize("copies", [0, 1])
def test_the_line_of_the_switch_works(planned: Plan, traced_once: None, copies: int) -> None:
    """It names the lowest preset that fits, the file where several have the run, and the real
    command takes it and would switch."""
    save(200)
    if copies:
        Path("config/copy.yaml").write_text(CONFIG.replace("plain", "other"), encoding="utf-8")
    measured = device(planned, "zero2_offload")
    found = fit.advise_after_out_of_memory(phase(), Path("base"), 200, measured)
    (line,) = re.findall(r"`(zerotrain switch [^`]*)`", found.what_to_do)
    named = "config/flowers.yaml" if copies else "flowers"
    rows = {name: row["plain"] for name, row in planned.rows.items()}
    fitting = [n for n, one in rows.items() if one.device + RESERVE <= measured["total"]]
    least = next(name for name in fitting if not rows[name].useless)
    assert line == f"zerotrain switch {named} --to {least}"
    assert "continues from step 200" in found.what_to_do
    done = CliRunner().invoke(command_line(), [*shlex.split(line)[1:], "--dry-run"])
    assert done.exit_code == 0, done.output
    assert f"launch: {least}" in done.output
    own = rows["torch"]
    assert found.facts == (
        f"measured: {gib(measured['allocated'])} in use at most, {gib(measured['reserved'])} "
        f"reserved, of {gib(measured['total'])}",
        f"planned for torch: {gib(own.device)} of the device, {gib(own.host)} of host memory",
    )


def test_without_a_checkpoint_the_launch_is_to_be_changed(planned: Plan, traced_once: None) -> None:
    """A switch would find nothing to cut."""
    measured = device(planned, "zero2_offload")
    found = fit.advise_after_out_of_memory(phase(), Path("base"), None, measured)
    assert "zerotrain switch" not in found.what_to_do
    assert "into phase plain of config/flowers.yaml and start again" in found.what_to_do
    assert "raise gradient_accumulation_steps above 1" in found.what_to_do


def test_where_nothing_fits_the_search_is_named(planned: Plan, traced_once: None) -> None:
    """And a host that is full is not helped by an offload to it."""
    tiny = {"total": 2**20, "allocated": 2**20, "reserved": 2**20}
    full = device(planned, "zero2_offload")
    for measured, kind in ((tiny, "device_memory"), (full, fit.HOST_MEMORY)):
        found = fit.advise_after_out_of_memory(phase(), Path("base"), 200, measured, kind)
        assert "no preset after torch fits here: `zerotrain plan config/flowers.yaml" in (
            found.what_to_do
        )
        assert "zerotrain switch" not in found.what_to_do


def test_a_disk_that_is_not_configured_is_no_way_out(planned: Plan, traced_once: None) -> None:
    """What swaps to one, and what saves nothing on one process, is passed over."""
    rows = {name: row["plain"] for name, row in planned.rows.items()}
    own = max(rows.values(), key=lambda one: one.device)
    for name, one in rows.items():
        if one.swap or one.useless:
            made = replace(planned, rows={own.preset: planned.rows[own.preset], name: {
                "plain": replace(one, parts=())}})  # fmt: skip
            assert own.preset == name or fit._find_lighter_preset(made, own) is None


def test_an_engine_that_the_machine_refuses_is_no_way_out(
    planned: Plan, traced_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A switch to it would be refused at once."""
    refusing = PlannedMachine(2**40, HOST, "a GPU", {"deepspeed": "DeepSpeed does not run here"})
    monkeypatch.setattr(fit, "this_machine", lambda _: refusing)
    measured = device(planned, "zero2_offload")
    found = fit.advise_after_out_of_memory(phase(), Path("base"), 200, measured)
    assert "no preset after torch fits here" in found.what_to_do


def test_a_run_that_is_not_in_config_gets_what_is_known() -> None:
    """No traceback on the way to an advice."""
    FILE.unlink()
    found = fit.advise_after_out_of_memory(phase(), Path("base"), 200, {})
    assert found.facts == ()
    assert found.what_to_do.startswith("raise gradient_accumulation_steps above 1")
    assert "what would fit is not known: no file in config has the run flowers" in found.what_to_do
