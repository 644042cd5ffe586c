"""Every switch that is tested: from which launch to which, how close it must be, and the table.

The model has all that makes a switch hard: parameters of odd sizes, two groups with rates and
decays of their own, a frozen layer, a tied weight, and two accumulations a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.export.export import export
from zerotrain.state.checkpoint import Checkpoint

PRESETS = ("torch", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
SWITCH, STEPS = 10, 20
BEGIN, END = "<!-- switches: generated -->", "<!-- switches: end -->"
EXACT = ("torch", "zero1", "zero2")
"""One process in fp32 gives the same bits under each of these: the same optimizer steps the same
float32 weights, and only flattening differs, which AdamW does not see."""
ROUNDED = {"bf16": 5e-3, "fp16": 1e-3}
"""Relative bound between engines in 16 bits, whose losses differ by what they round: plain PyTorch
casts layer by layer from float32 weights, ZeRO keeps weights and gradients in 16 bits. bf16 has 8
bits of mantissa, a relative rounding of 2^-9 = 2e-3 each; fp16 has 11, 2^-12 = 2.4e-4. Some ten of
them add up over the layers of a forward and a backward pass."""


@dataclass(frozen=True)
class Setup:
    """One way of training the tiny model."""

    preset: str
    processes: int = 1
    precision: str = "no"
    adapter: bool = False

    def __str__(self) -> str:
        words = [self.preset]
        if self.processes > 1:
            words.append(f"x{self.processes}")
        if self.precision != "no":
            words.append(self.precision)
        return "-".join([*words, "lora"] if self.adapter else words)

    def changes(self) -> dict[str, Any]:
        """The values of the phase."""
        found: dict[str, Any] = {
            "num_processes": self.processes,
            "mixed_precision": self.precision,
            "gradient_accumulation_steps": 2,
            "save_every": SWITCH,
            "keep": 10,
            "lr_scheduler_steps": STEPS + 5,
        }
        decay = {"learning_rate": 5e-4, "adam_weight_decay": 0.0}
        if self.adapter:
            lora = {"rank": 3, "alpha": 4.0, "dropout": 0.0, "target_modules": ["to_q", "to_v"]}
            found |= {"lora": lora, "param_groups": [{"parameters": ["lora_B"], **decay}]}
        else:
            found |= {
                "family": "tied",
                "frozen_parameters": [r"^time_embedding\.linear_1"],
                "param_groups": [{"parameters": [r"\.bias$", "norm"], **decay}],
            }
        return found


@dataclass(frozen=True)
class Switch:
    """From one way to another."""

    first: Setup
    second: Setup

    def __str__(self) -> str:
        return f"{self.first}->{self.second}"

    @property
    def bound(self) -> float:
        """Largest relative deviation of a loss from the reference; 0 demands the same bits."""
        first, second = self.first, self.second
        if first == second:
            return 0.0 if first.processes == 1 else 1e-5
        if first.precision != "no" or second.precision != "no":
            return max(ROUNDED.get(setup.precision, 0.0) for setup in (first, second))
        if max(first.processes, second.processes) > 1:
            return 1e-5
        return 0.0 if {first.preset, second.preset} <= set(EXACT) else 1e-6

    @property
    def reference(self) -> Setup:
        """Whose uninterrupted losses it is held to: the first's own where it is the same launch or
        16 bits, else plain PyTorch's on one process."""
        if self.first == self.second or self.first.precision != "no":
            return self.first
        return replace(self.first, preset="torch", processes=1)


def fp32_pairs() -> list[Switch]:
    """All ordered pairs of presets, one process, float32."""
    return [Switch(Setup(a), Setup(b)) for a in PRESETS for b in PRESETS]


def ring() -> list[Switch]:
    """Each preset once as first and once as second, one process, float32.

    Every engine writes its state and takes one over; other pairs follow, as the states that two
    presets write are compared, too (test_switch_state_is_the_same_from_every_engine).
    """
    return [
        Switch(Setup(a), Setup(b)) for a, b in zip(PRESETS, [*PRESETS[1:], PRESETS[0]], strict=True)
    ]


def covering() -> list[Switch]:
    """Each preset as first and as second, in every other respect: 16 bits, LoRA, two processes, one
    process to two and back."""
    following = list(zip(PRESETS, [*PRESETS[1:], PRESETS[0]], strict=True))
    found = [Switch(Setup(p, precision="bf16"), Setup(p, precision="bf16")) for p in PRESETS]
    for one, two in ((2, 2), (1, 2), (2, 1)):
        found += [Switch(Setup(a, one), Setup(b, two)) for a, b in following]
    for precision in ("bf16", "fp16"):
        found += [
            Switch(Setup(a, precision=precision), Setup(b, precision=precision))
            for a, b in following
        ]
    found += [Switch(Setup(a, adapter=True), Setup(b, adapter=True)) for a, b in following]
    found += [
        Switch(Setup("zero3_offload", precision="bf16", adapter=True),
               Setup("torch", precision="bf16", adapter=True)),
        Switch(Setup("zero2", 2, adapter=True), Setup("zero3", 1, adapter=True)),
        Switch(Setup("zero2_offload", 2, "bf16"), Setup("zero3_offload", 1, "bf16")),
        Switch(Setup("torch"), Setup("zero3_offload", precision="bf16")),
    ]  # fmt: skip
    return found


def chosen() -> list[Switch]:
    """The part of the covering sets that `make test-full` takes; the rest is for `make test-soak`.

    Of two processes, of bf16, of fp16 and of LoRA one switch each.
    """
    return [
        Switch(Setup("torch", 2), Setup("zero1", 2)),
        Switch(Setup("zero2", precision="bf16"), Setup("zero2_offload", precision="bf16")),
        Switch(Setup("torch", precision="fp16"), Setup("zero1", precision="fp16")),
        Switch(Setup("torch", adapter=True), Setup("zero1", adapter=True)),
    ]


def export_state(checkpoint: Path, state: Path) -> Path:
    """The state half of export_weights."""
    export(Checkpoint(checkpoint), checkpoint, None, state)
    return state


def deviation(losses: list[float], reference: list[float]) -> float:
    """Largest relative difference over equally many steps."""
    assert len(losses) == len(reference)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


class Matrix:
    """Trains each setup once without a switch, and continues from its middle under others."""

    def __init__(self, training: Any) -> None:
        self.training = training
        self._losses: dict[Setup, list[float]] = {}
        self.measured: dict[Switch, float] = {}

    def whole(self, setup: Setup) -> list[float]:
        """The losses of the uninterrupted run."""
        if setup not in self._losses:
            self._losses[setup] = self.training.run(
                str(setup), setup.preset, STEPS, **setup.changes()
            )
        return self._losses[setup]

    def state(self, setup: Setup) -> Path:
        """The state in the middle of the uninterrupted run."""
        self.whole(setup)
        state = self.training.folder / f"{setup}-state"
        if not state.exists():
            export_state(self.training.progress(str(setup)) / f"step-{SWITCH:08d}", state)
        return state

    def deviation(self, switch: Switch) -> float:
        """How far the losses of a switched run are from those of its reference."""
        if switch not in self.measured:
            self.measured[switch] = self.apart(switch, str(switch), self.state(switch.first))
        return self.measured[switch]

    def apart(self, switch: Switch, name: str, state: Path) -> float:
        """The same for a run of this name that continues from this state."""
        first, second = self.whole(switch.first), switch.second
        losses = self.training.run(name, second.preset, STEPS, state=state, **second.changes())
        assert losses[:SWITCH] == first[:SWITCH]
        return deviation(losses, self.whole(switch.reference))

    def write(self, page: Path) -> None:
        """Put the tables of all that was measured into the page."""
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(f"{before}{BEGIN}\n{self._tables()}{END}{after}", encoding="utf-8")

    def _tables(self) -> str:
        rows = ["| from \\ to | " + " | ".join(PRESETS) + " |", "|---" * (len(PRESETS) + 1) + "|"]
        for a in PRESETS:
            found = [_figure(self.measured[Switch(Setup(a), Setup(b))]) for b in PRESETS]
            rows.append(f"| {a} | {' | '.join(found)} |")
        rows += ["", "| from | to | deviation | bound |", "|---|---|---|---|"]
        for switch in covering():
            bound = f"{switch.bound:.0e}" if switch.bound else "equal bits"
            value = _figure(self.measured[switch])
            rows.append(f"| {switch.first} | {switch.second} | {value} | {bound} |")
        return "\n".join(rows) + "\n"


def _figure(value: float) -> str:
    return f"{value:.1e}" if value else "0"
