"""`zerotrain switch` to other processes, machines and precision: what it writes and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.switch.conftest import refusal, save

from zerotrain.config.read import read_config
from zerotrain.config.relaunch import share_batch
from zerotrain.errors import PipelineError
from zerotrain.graph.options import SwitchOptions
from zerotrain.graph.switch import command as switch
from zerotrain.graph.switch.plan import is_met

pytestmark = pytest.mark.usefixtures("project")

FILE = Path("config/flowers.yaml")


def write(phase: str, run: str = "") -> None:
    """A run of one phase; `run` are lines above its phases."""
    FILE.write_text(
        f"run: flowers\nbase: nano\ndata: {{images: photos}}\n{run}phases:\n  - {phase} # fits\n",
        encoding="utf-8",
    )


def planned(**wanted: Any) -> tuple[list[str], str]:
    """What a dry run adds to the file, and the line that would stand for the phase that is cut."""
    said = switch.switch(SwitchOptions("flowers", **wanted, dry_run=True))
    found = [line[1:].strip() for line in said.splitlines() if line.startswith("+  ")]
    return [line for line in found if "plain-" in line], found[0]


@pytest.mark.parametrize(
    ("global_batch", "processes", "micro", "accumulation"),
    [(64, 4, 4, 4), (64, 8, 8, 1), (12, 3, 4, 1), (12, 2, 4, 2), (12, 2, 5, 2), (12, 1, 5, 3),
     (14, 2, 4, 7), (4, 1, 9, 1)],
)  # fmt: skip
def test_accumulation_follows_the_processes(global_batch, processes, micro, accumulation) -> None:
    """The micro batch is the former one, or its largest neighbour below that divides the share."""
    assert share_batch(global_batch, processes, micro) == accumulation
    assert global_batch % (processes * accumulation) == 0
    assert global_batch // (processes * accumulation) <= micro


def test_half_of_the_processes_accumulate_twice() -> None:
    """8 processes are preempted to 4: same preset, same global batch, same micro batch."""
    write(
        "{name: plain, until: 300, launch: {preset: zero2, num_processes: 8}, "
        "global_batch_size: 64, gradient_accumulation_steps: 2}"
    )
    save("plain", 200, preset="zero2", world_size=8, mixed_precision="no",
         global_batch_size=64, gradient_accumulation_steps=2)  # fmt: skip
    added, cut = planned(num_processes=4)
    assert added == [
        "- {name: plain-x4, until: 300, launch: {preset: zero2, num_processes: 4}, "
        "global_batch_size: 64, gradient_accumulation_steps: 4}"
    ]
    assert cut.startswith("- {name: plain, until: 200, launch: {preset: zero2, num_processes: 8}")
    assert cut.endswith("# fits")
    assert planned(num_processes=16)[0][0].endswith("gradient_accumulation_steps: 1}")


@pytest.mark.parametrize(
    ("launch", "wanted", "written"),
    [
        # The number of processes on each machine stays.
        ("num_processes: 8, machines: 2", {"machines": 1}, "num_processes: 4, machines: 1"),
        ("processes_per_machine: 4, machines: 2", {"machines": 1},
         "processes_per_machine: 4, machines: 1"),
        ("processes_per_machine: 4, machines: 2", {"num_processes": 4},
         "processes_per_machine: 2, machines: 2"),
        ("num_processes: 8, machines: 2", {"machines": 1, "num_processes": 2},
         "num_processes: 2, machines: 1"),
        ("num_processes: 8, processes_per_machine: 4, machines: 2", {"machines": 1},
         "num_processes: 4, processes_per_machine: 4, machines: 1"),
    ],
)  # fmt: skip
def test_machines_keep_their_processes(launch: str, wanted: Any, written: str) -> None:
    """The keys that the file has are written, so that none contradicts another."""
    write(f"{{name: plain, until: 300, launch: {{{launch}}}, global_batch_size: 8}}")
    save("plain", 200, world_size=8, global_batch_size=8, gradient_accumulation_steps=1)
    [added], _ = planned(**wanted)
    assert f"launch: {{{written}}}, global_batch_size: 8, gradient_accumulation_steps: " in added


def test_what_the_run_says_of_processes_is_overridden_in_the_new_phase() -> None:
    """The cut phase keeps the run's values."""
    write(
        "{name: plain, until: 300, global_batch_size: 8}",
        "launch: {preset: zero1, processes_per_machine: 4, machines: 2}\n",
    )
    save("plain", 200, preset="zero1", world_size=8)
    added, _ = planned(machines=1)
    assert added == [
        "- {name: plain-x4, until: 300, global_batch_size: 8, launch: {machines: 1}, "
        "gradient_accumulation_steps: 2}"
    ]


def test_a_batch_that_the_processes_cannot_share_is_refused() -> None:
    """With the numbers that can."""
    write("{name: plain, until: 300, launch: {num_processes: 4}, global_batch_size: 12}")
    save("plain", 200, world_size=4)
    assert refusal(to=None, num_processes=5) == (
        "ERROR: flowers/plain: global_batch_size 12 cannot be shared equally by 5 processes\n"
        "  Hint: --num-processes takes 1, 2, 3, 4, 6 or 12"
    )
    assert refusal(to=None, num_processes=5, machines=2) == (
        "ERROR: --num-processes 5 --machines 2: no equal number of processes on each machine\n"
        "  Hint: give a multiple of 2, or another --machines"
    )
    assert "--num-processes takes 2, 4, 6 or 12" in refusal(to=None, num_processes=8, machines=2)


def test_what_is_asked_for_already_is_no_switch() -> None:
    """Neither is nothing."""
    save("plain", 200)
    assert refusal(to=None) == (
        "ERROR: nothing to switch is named\n"
        "  Hint: give --to PRESET, --num-processes N, --machines N or --mixed-precision "
        "no|bf16|fp16"
    )
    assert refusal(to=None, num_processes=1, mixed_precision="no").startswith(
        "ERROR: flowers/plain trains under torch with num_processes 1, mixed_precision no already\n"
    )
    assert refusal(to=None, mixed_precision="fp8") == (
        "ERROR: --mixed-precision fp8: no such precision\n  Hint: it takes no, bf16 or fp16"
    )
    assert refusal(to=None, num_processes=0).startswith("ERROR: --num-processes 0: ")


@pytest.mark.parametrize(
    ("precision", "written"),
    [("bf16", "mixed_precision: bf16"), ("no", 'mixed_precision: "no"')],
)
def test_fp16_leaves_its_loss_scale_behind(precision: str, written: str) -> None:
    """The switch itself allows that, and says so; fp16's own section stays with the cut phase."""
    write(
        "{name: plain, until: 300, global_batch_size: 4, launch: {preset: zero2, "
        "mixed_precision: fp16, fp16: {hysteresis: 2}}}"
    )
    save("plain", 200, preset="zero2", mixed_precision="fp16")
    [added], cut = planned(mixed_precision=precision)
    name = "bf16" if precision == "bf16" else "fp32"
    assert added == (
        f"- {{name: plain-{name}, until: 300, global_batch_size: 4, launch: {{preset: zero2, "
        f"{written}}}, allow: [loss_scale]}}"
    )
    assert "fp16: {hysteresis: 2}" in cut
    save("plain", 210, preset="zero2", mixed_precision="fp16")
    [added], _ = planned(num_processes=2)
    assert "allow" not in added


def test_everything_at_once_in_block_style() -> None:
    """Another preset, processes and precision; comments and columns stay."""
    FILE.write_text(
        "run: flowers\nbase: nano\ndata: {images: photos}\nphases:\n  - name: plain # one\n"
        "    until: 300\n    global_batch_size:   8 # as it was\n    launch: torch\n",
        encoding="utf-8",
    )
    save("plain", 200)
    said = switch.switch(
        SwitchOptions("flowers", "zero2", num_processes=2, mixed_precision="bf16", dry_run=True)
    )
    assert "+    until: 200\n     global_batch_size:   8 # as it was\n     launch: torch\n" in said
    assert said.split("launch: torch\n")[1].startswith(
        "+  - name: plain-zero2-x2-bf16\n+    until: 300\n+    global_batch_size:   8\n"
        "+    launch: {preset: zero2, num_processes: 2, mixed_precision: bf16}\n"
    )
    assert "gradient_accumulation_steps" not in said  # 8 samples, and now 4: one pass each


def test_a_launch_that_was_edited_beforehand_is_switched_to() -> None:
    """The file has 4 processes already; the cut phase gets its 8 back, and its accumulation."""
    write(
        "{name: plain, until: 300, launch: {preset: zero2, num_processes: 4}, "
        "global_batch_size: 16}"
    )
    engine = {"global_batch_size": 16, "gradient_accumulation_steps": 1}
    save("plain", 200, preset="zero2", world_size=8, **engine)
    [added], cut = planned(num_processes=4)
    assert added == (
        "- {name: plain-x4, until: 300, launch: {preset: zero2, num_processes: 4}, "
        "global_batch_size: 16, gradient_accumulation_steps: 2}"
    )
    assert "until: 200, launch: {preset: zero2, num_processes: 8}" in cut
    write(
        "{name: plain, until: 300, launch: {machines: 3, num_processes: 3}, global_batch_size: 12}"
    )
    save("plain", 210, world_size=4, global_batch_size=12, gradient_accumulation_steps=1)
    [_], cut = planned(machines=3)
    assert "launch: {machines: 1, num_processes: 4}" in cut


def test_accumulation_that_was_written_beforehand_stays() -> None:
    """Whoever has written it for the new processes knows what fits."""
    write(
        "{name: plain, until: 300, launch: {preset: zero2, num_processes: 4}, "
        "global_batch_size: 16, gradient_accumulation_steps: 1}"
    )
    engine = {"global_batch_size": 16, "gradient_accumulation_steps": 2}
    save("plain", 200, preset="zero2", world_size=8, **engine)
    assert planned(num_processes=4)[0][0].endswith("gradient_accumulation_steps: 1}")
    assert planned(num_processes=2)[0][0].endswith("gradient_accumulation_steps: 2}")


def test_a_planned_launch_stays_planned() -> None:
    """`auto` is chosen again for the processes of the new phase."""
    write("{name: plain, until: 300, launch: auto, global_batch_size: 8}")
    save("plain", 200, preset="zero2", world_size=1)
    [added], _ = planned(num_processes=2)
    assert "{name: plain-x2, until: 300, launch: {preset: auto, num_processes: 2}," in added


def test_the_same_request_is_met_by_what_it_made() -> None:
    """So that a job script may call it at each start."""
    write(
        "{name: plain, until: 300, launch: {num_processes: 4, machines: 2}, global_batch_size: 8}"
    )
    launch = read_config(FILE).phases[0].launch
    for wanted, met in (
        ({"num_processes": 4}, True), ({"machines": 2}, True), ({"machines": 1}, False),
        ({"num_processes": 2}, False), ({"mixed_precision": "bf16"}, False),
        ({"to": "zero2"}, False),
    ):  # fmt: skip
        assert is_met(SwitchOptions("run", **wanted), 200, "plain", launch) is met


def test_a_count_is_refused_by_its_name() -> None:
    """As a sentence of the function; the command's own parser has its own."""
    with pytest.raises(PipelineError, match="cannot be shared equally by 3 processes"):
        share_batch(8, 3, 1)
