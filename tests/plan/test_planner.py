"""A whole plan of SDXL: states to the byte, what fits, what is recommended, and why."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders.commands import run_zerotrain
from tests.builders.refusals import refusal
from tests.builders.runs import make_config, make_run

from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.fit import search
from zerotrain.launch.planner.gpus import Gpu
from zerotrain.launch.planner.inputs import states
from zerotrain.launch.planner.options import PlanOptions
from zerotrain.launch.planner.planner import (
    RESERVE,
    Plan,
    PlannedMachine,
    choose,
    choose_preset,
    plan,
    this_machine,
)
from zerotrain.launch.planner.report import parts_table, plan_report, table
from zerotrain.launch.planner.storage import Traffic, step_time
from zerotrain.launch.planner.trace_store import TracedModel
from zerotrain.launch.planner.tracing import Tracer, trace
from zerotrain.launch.preset import read_preset

GIB = 2**30
SDXL = 2_567_463_684
ORDER = ("torch", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme")


def config(processes: int = 1, *, batch: int = 8, **launch: Any) -> RunConfig:
    """Full training of SDXL at 1024 px in bf16."""
    return make_config(
        run="plan",
        base="stabilityai/stable-diffusion-xl-base-1.0",
        data={"images": "images"},
        train={"global_batch_size": batch * processes, "gradient_checkpointing": True},
        launch={"mixed_precision": "bf16", "num_processes": processes, **launch},
    )


@pytest.fixture(scope="module")
def traced() -> TracedModel:
    """A micro batch of eight."""
    run = config()
    return trace(run, run.phase("a"), None)


def made(
    traced: TracedModel, memory: float | None, processes: int = 1, gpu: str = "", **launch: Any
) -> Plan:
    """The plan for a GPU of so many GiB."""
    machine = PlannedMachine(None if memory is None else int(memory * GIB), 128 * GIB, gpu)
    return plan(config(processes, **launch), "a", machine, traced=traced)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4])
def test_states_are_those_of_the_arithmetic(traced: TracedModel, processes: int) -> None:
    """2 B a weight, 2 B a gradient, 12 B of master and moments: sharded and moved by the stage."""
    rows = made(traced, None, processes).rows
    found = {
        name: tuple(states(row["checkpointed"].parts, where) for where in ("device", "host"))
        for name, row in rows.items()
    }
    part = SDXL // processes
    assert SDXL % 4 == 0
    assert found["torch"] == (16 * SDXL, 0)
    padding = 64  # of flat tensors, whose parts are equal
    assert found["zero2_offload"] == pytest.approx((2 * SDXL, 18 * part), abs=padding)
    if processes == 1:
        assert found["zero1"] == found["zero2"] == found["zero3"] == (16 * SDXL, 0)
        assert found["zero2_offload"] == (2 * SDXL, 18 * SDXL)
        assert found["zero3_offload"] == (0, 18 * SDXL)
    else:
        # A process keeps the gradients of parameters that only begin in its part, and norms whole.
        assert found["zero1"] == pytest.approx((4 * SDXL + 12 * part, 0), abs=padding)
        assert found["zero2"][0] == pytest.approx(2 * SDXL + 14 * part, rel=2e-3)
        assert found["zero3"][0] == pytest.approx(16 * part, rel=2e-3)


def test_the_lowest_that_fits_is_recommended(traced: TracedModel) -> None:
    """And each one before it has a reason."""
    choice = made(traced, 24).choice
    assert choice is not None
    assert choice.chosen is not None
    assert choice.chosen.preset == "zero2_offload"
    assert "torch needs 48." in choice.why
    assert "zero1 saves nothing on one process" in choice.why
    large = made(traced, 80).choice
    assert large is not None
    assert large.chosen is not None
    assert large.chosen.preset == "torch"


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_recommendations_are_monotone_in_device_memory(traced: TracedModel, processes: int) -> None:
    """More memory never asks for a preset that offloads more."""
    column = made(traced, None, processes).column("checkpointed")
    found = []
    for memory in range(1, 120):
        chosen = choose(column, memory * GIB, None, has_disk=True).chosen
        found.append(ORDER.index(chosen.preset) if chosen else len(ORDER))
    assert found == sorted(found, reverse=True)
    assert found[0] == len(ORDER)
    assert found[-1] == 0
    assert len(set(found)) >= 3


def test_nothing_is_swapped_without_a_disk_and_the_host_counts(traced: TracedModel) -> None:
    """A preset needs its path, and all its places."""
    column = made(traced, None).column("checkpointed")
    small = int(column[-2].device) + RESERVE
    assert choose(column, small, None).chosen is column[-2]
    assert choose(column, small, 10 * GIB).chosen is None
    assert choose(column, small, 40 * GIB, has_disk=True).chosen is column[-1]


@pytest.mark.slow
def test_auto_says_what_it_took_and_what_to_do_where_nothing_fits(traced: TracedModel) -> None:
    """The reason goes into run.yaml; a refusal names the least there is."""
    name, why = choose_preset(made(traced, 24))
    assert name == "zero2_offload"
    assert why.startswith("auto: zero2_offload takes 10.")
    text = refusal(choose_preset, made(traced, 4))
    assert "launch: auto, but no preset fits" in text
    assert "`zerotrain plan --fit` searches" in text
    with pytest.raises(PipelineError, match="the memory of this machine's GPU is not known"):
        choose_preset(made(traced, None))


def test_an_engine_that_cannot_run_here_is_left_out(traced: TracedModel) -> None:
    """On MPS plain PyTorch is what there is, and it is reported."""
    machine = PlannedMachine(
        64 * GIB, None, engines={"torch": "", "deepspeed": "DeepSpeed does not run on MPS"}
    )
    found = plan(config(), "a", machine, traced=traced)
    name, said = choose_preset(found)
    assert name == "torch"
    assert "DeepSpeed does not run on MPS" in said


def test_more_memory_needs_no_more_offload(traced: TracedModel) -> None:
    """Of presets and of activations; ZeRO on one process brings nothing."""
    rows = made(traced, None, 4).rows
    for row in rows.values():
        assert row["plain"].device >= row["checkpointed"].device >= row["on_host"].device
        assert row["plain"].host <= row["on_host"].host
    device = {name: row["checkpointed"].device for name, row in rows.items()}
    for chain in (("zero1", "zero2", "zero3", "zero3_offload"), ("zero2", "zero2_offload")):
        assert [device[n] for n in chain] == sorted((device[n] for n in chain), reverse=True)
    alone = made(traced, None).rows
    useless = {name for name, row in alone.items() if row["plain"].useless}
    assert useless == {"zero1", "zero2", "zero3"}


def test_the_table_shows_all_of_it(traced: TracedModel) -> None:
    """A row for each preset, a mark for what fits, the advice, encoders, cache and EMA."""
    lines = table(made(traced, 24, gpu="RTX 4090"), width=100)
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    rows = {line.split()[0].strip(">"): line for line in lines if line[:2] in ("> ", "  ")}
    assert set(ORDER) - {"zero2_offload"} <= rows.keys()
    assert "> zero2_offload 57.0 10.7+" in text
    assert "2,567,463,684 parameters, all trained" in text
    assert "Recommended: zero2_offload, the lowest that fits." in text
    assert "text_encoder_2 1.3 GiB" in text
    assert "The cache takes 131.1 kB an image and 318.0 kB a distinct caption (bf16)." in text
    assert "An EMA of the weights would take 9.6 GiB more" in text
    without = "\n".join(table(made(traced, None)))
    assert "No GPU is known here" in without
    part_lines = parts_table(made(traced, 24).rows["zero2_offload"]["checkpointed"])
    assert any("state weights: 2 B a trained parameter" in line for line in part_lines)


def test_the_page_shows_this_table(traced: TracedModel) -> None:
    """docs/planner.md prints rows of the command that it names."""
    machine = replace(made(traced, None).machine, host_memory=64 * GIB, name="RTX 4090")
    machine = replace(machine, device_memory=24_564 * 2**20)
    lines = table(plan(config(), "a", machine, traced=traced), width=100)
    page = Path("docs/planner.md").read_text(encoding="utf-8")
    rows = [line for line in lines if line[:2] in ("> ", "  ")]
    assert len(rows) == 3 + len(ORDER)
    assert "\n".join(f"    {row}" for row in rows) in page


@pytest.mark.slow
def test_the_page_on_zero_has_the_planners_figures() -> None:
    """Its table: with gradient checkpointing, for one GPU and for four."""
    run = config(batch=1)
    traced = trace(run, run.phase("a"), None)
    rows: dict[str, list[str]] = {}
    for processes, host in ((1, 64 * GIB), (4, 256 * GIB)):
        machine = PlannedMachine(24_564 * 2**20, host, "RTX 4090")
        for line in table(plan(config(processes, batch=1), "a", machine, traced=traced), width=100):
            words = line.strip("> ").split()
            if words and words[0] in ORDER[:-1]:
                rows.setdefault(words[0], []).extend((words[2].strip("+"), words[4], words[-1]))
    page = Path("docs/zero.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- planned -->\n")[2].partition("\n<!-- end -->")[0].splitlines()[2:]
    assert shown == [f"| `{name}` | {' | '.join(figures)} |" for name, figures in rows.items()]


def test_the_page_on_scaling_has_the_scripts_tables(
    traced: TracedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/scaling.md, every table; `python benchmarks/scaling.py --write` writes them again."""
    monkeypatch.syspath_prepend("benchmarks")
    scaling = importlib.import_module("scaling")
    run = scaling.default_run()
    model = scaling.Model(run, run.phases[0], traced, scaling.default_assumptions())
    page = Path("docs/scaling.md").read_text(encoding="utf-8")
    for name, made_of in scaling.TABLES.items():
        assert scaling.in_page(page, name) == made_of(model), name
    # All-reduced gradients and gathered weights of 2 bytes, through a ring of 64 GPUs at 50 GB/s.
    step = model.step(model.prediction("zero1", 64))
    assert step.communication == pytest.approx(6 * SDXL * 63 / 64 / 50e9)
    _, interval, least = model.failures(64)
    assert least < min(model.lost(64, 0.9 * interval), model.lost(64, 1.1 * interval))


def test_a_step_is_what_its_parts_take() -> None:
    """100 TFLOP at 40 % of 250, 25 GB over PCIe, a million parameters on the CPU."""
    gpu = Gpu("a GPU", (1,), 250.0)
    found = step_time(1e14, gpu, Traffic(to_host=25 * 10**9), 10**6, 1)
    assert (found.compute, found.transfer) == (1.0, 1.0)
    assert found.host_optimizer == pytest.approx(48e6 / 40e9)
    assert step_time(1e14, replace(gpu, pcie=5), Traffic(to_host=25 * 10**9), 0, 1).transfer == 0.5


def nano(**train: Any) -> RunConfig:
    """The small model, whose traces take no time."""
    return make_config(
        run="plan",
        data={"images": "images"},
        train={"resolution": 64, "global_batch_size": 8, **train},
    )


@pytest.mark.slow
def test_fit_lowers_the_micro_batch_first() -> None:
    """The global batch stays; smaller images only where not one sample fits."""
    run = nano(global_batch_size=2)
    rows = plan(run, "a", PlannedMachine(None, None)).rows
    small = rows["torch"]["checkpointed"].device + RESERVE - 1
    lines = search(run, "a", PlannedMachine(small, None))
    torch = [line for line in lines if line.strip().startswith("torch")]
    assert any("micro batch 1   accumulation 2   gradient_checkpointing" in line for line in torch)
    assert not any("micro batch 2   accumulation 1   activations kept" in line for line in torch)
    whole = search(run, "a", PlannedMachine(rows["torch"]["plain"].device + RESERVE, None))
    assert whole[1].strip().startswith("torch")
    assert "micro batch 2   accumulation 1   activations kept" in whole[1]


@pytest.mark.slow
def test_fit_takes_smaller_images_last() -> None:
    """And says where nothing fits, or nothing is known."""
    run = nano(global_batch_size=1)
    least = min(one.device for row in plan(run, "a", PlannedMachine(None, None)).rows.values()
                for one in row.values())  # fmt: skip
    lines = search(run, "a", PlannedMachine(least + RESERVE - 1, None))
    assert lines[0] == "Nothing fits at 64 px."
    assert re.search(r"at (56|48|40|32) px", lines[1])
    with pytest.raises(PipelineError, match="nothing fits"):
        search(run, "a", PlannedMachine(RESERVE + 1000, None))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["causal_lm", pytest.param("seq2seq_lm", marks=pytest.mark.soak)]
)
def test_fit_takes_shorter_rows_last(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of text lengths are tokens; nothing of it has pixels."""
    run = make_config(
        run="plan",
        family=family,
        data={"source": "sums"},
        train={"max_length": 256, "global_batch_size": 1},
    )
    rows = plan(run, "a", PlannedMachine(None, None)).rows.values()
    least = min(one.device for row in rows for one in row.values())
    lines = search(run, "a", PlannedMachine(least + RESERVE - 1, None))
    assert lines[0] == "Nothing fits at 256 tokens."
    assert re.search(r"at (192|128|64) tokens, global batch 1", lines[1])
    with pytest.raises(PipelineError, match="a quarter of the length"):
        search(run, "a", PlannedMachine(RESERVE + 1000, None))
    monkeypatch.setattr("zerotrain.launch.planner.fit.fits", lambda *_: True)
    assert "at 256 tokens" in search(run, "a", PlannedMachine(RESERVE, None))[0]


def test_a_language_model_is_planned_without_a_configuration() -> None:
    """By --max-length in place of --resolution."""
    values = {
        "family": "causal_lm", "base": "nano", "resolution": 1024, "max_length": 64,
        "batch_size": 2, "precision": "no", "processes": 1, "lora_rank": None,
        "gradient_checkpointing": False,
    }  # fmt: skip
    text = "\n".join(plan_report(PlanOptions(**values, device_memory="24 GiB")))
    assert "64 tokens" in text
    assert "px" not in text


def test_fit_traces_one_sample_a_size_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the host's memory is what refuses: a larger micro batch takes no less."""
    asked: list[tuple[int, int]] = []
    whole = Tracer.trace

    def trace(self: Tracer, batch: int, size: int) -> TracedModel:
        asked.append((batch, size))
        return whole(self, batch, size)

    monkeypatch.setattr(Tracer, "trace", trace)
    raw = make_run(
        run="plan",
        family="causal_lm",
        data={"source": "sums"},
        train={"max_length": 64, "global_batch_size": 8},
    )
    with pytest.raises(PipelineError, match="nothing fits"):
        search(parse_config(raw, "c"), "a", PlannedMachine(RESERVE, 1))
    assert asked == [(1, 64), (1, 48), (1, 32), (1, 16)]


def test_fit_needs_a_device() -> None:
    """Nothing is traced for a GPU that no one knows."""
    with pytest.raises(PipelineError, match="no GPU is known here"):
        search(nano(), "a", PlannedMachine(None, None))


@pytest.mark.slow
def test_on_a_cpu_all_is_the_machines_memory() -> None:
    """Without a GPU, `auto` takes what fits the machine."""
    run = nano()
    machine = this_machine(run.phase("a"))
    assert machine.device_memory
    if machine.cpu:
        assert machine.device_memory == machine.host_memory
    found = plan(run, "a", replace(machine, cpu=True, device_memory=8 * GIB, host_memory=8 * GIB))
    assert choose_preset(found)[0] == "torch"
    assert all(row["plain"].host == 0 for row in found.rows.values())


def test_the_presets_are_those_that_auto_names() -> None:
    """Every shipped preset, the lowest first."""
    assert read_preset(Path("config/launch/auto.yaml")).choose == ORDER


@pytest.mark.slow
def test_the_command_plans_a_configuration(tmp_path: Path) -> None:
    """The example, part by part; a mistake is one sentence."""
    words = ("config/config.yaml", "--phase", "offload", "--parts", "zero2_offload")
    shown = run_zerotrain("plan", *words)
    assert shown.returncode == 0, shown.stderr
    assert "state masters" in shown.stdout
    wrong = run_zerotrain("plan", "--base", "stabilityai/sdxl", "--device-memory", "24 GiB")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("ERROR: base: 'stabilityai/sdxl' is no folder or file here")


@pytest.mark.slow
def test_shipped_configurations_are_planned() -> None:
    """Each phase of the examples in config/; tests/workflow/test_recipes.py plans the recipes."""
    examples = [p for p in Path("config").glob("*.yaml") if "# Machine:" not in p.read_text()]
    assert len(examples) == 5
    for path in examples:
        run = parse_config(json.loads(json.dumps(_read(path))), str(path))
        for phase in run.phases:
            assert plan(run, phase.name, PlannedMachine(8 * GIB, 64 * GIB)).choice is not None


def _read(path: Path) -> Any:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))
