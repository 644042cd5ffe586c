"""The arithmetic of memory: model states to the byte, buffers as DeepSpeed's code takes them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from zerotrain.launch.planner.buckets import (
    Coordinator,
    Live,
    gradients_of_partition,
    largest_fill,
    live_parameters,
    sub_groups,
)
from zerotrain.launch.planner.inputs import (
    MemoryPart,
    Moment,
    ParameterSizes,
    PlannedLaunch,
    at,
    peak,
    resident_peak,
    since,
    states,
)
from zerotrain.launch.planner.memory_parts import memory_parts, saves_nothing
from zerotrain.launch.planner.storage import Traffic, storage, swap_files, traffic
from zerotrain.launch.preset import read_preset
from zerotrain.launch.zero import LIMIT

SDXL = 2_567_463_684
GIB = 2**30
LAYER = 1_638_400
BUCKETS = {
    "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}  # fmt: skip
OFFLOADED = {
    "stage3_max_live_parameters": 100_000_000, "stage3_max_reuse_distance": 100_000_000,
    "sub_group_size": 100_000_000,
}  # fmt: skip
"""Elements: what a launch for such a model may have."""


def launch(
    name: str, precision: str = "bf16", processes: int = 1, **values: object
) -> PlannedLaunch:
    """A shipped preset's launch."""
    preset = read_preset(Path(f"config/launch/{name}.yaml"))
    return PlannedLaunch(
        engine=preset.engine,
        stage=preset.zero_stage,
        offload_optimizer=preset.offload_optimizer,
        offload_param=preset.offload_param,
        zero={**BUCKETS, **(OFFLOADED if preset.offload_param != "none" else {})},
        mixed_precision=precision,
        processes=processes,
        **values,  # type: ignore[arg-type]
    )


def sdxl() -> ParameterSizes:
    """As many parameters as SDXL's U-Net has, the largest as large as its largest."""
    largest = 1280 * 2560 * 9
    layers, rest = divmod(SDXL - largest, LAYER)
    sizes = {"largest.weight": largest, "rest.weight": rest}
    sizes |= {f"layer{number}.weight": LAYER for number in range(layers)}
    return ParameterSizes(sizes, (tuple(sizes),))


@pytest.mark.parametrize("name", ["torch", "zero1", "zero2", "zero3"])
def test_nothing_offloaded_takes_sixteen_bytes_a_parameter(name: str) -> None:
    """SDXL: 38.3 GiB on one device; torch's float32 comes to the same."""
    assert states(memory_parts(launch(name), sdxl(), 0), "device") == 16 * SDXL
    assert f"{16 * SDXL / GIB:.1f}" == "38.3"


def test_an_average_takes_four_bytes_a_parameter_where_the_masters_are() -> None:
    """Shared by the processes; on the host where the optimizer is, or where it is asked for."""
    for chosen, expected in (
        (launch("torch", average=True), (4 * SDXL, 0)),
        (launch("zero2", processes=4, average=True), (SDXL, 0)),
        (launch("zero3", average=True, average_on_host=True), (0, 4 * SDXL)),
        (launch("zero3_offload", average=True), (0, 4 * SDXL)),
    ):
        parts = [p for p in memory_parts(chosen, sdxl(), 0) if p.name == "moving average"]
        found = tuple(sum(p.bytes for p in parts if p.where == w) for w in ("device", "host"))
        assert found == expected
        plain, averaged = (
            storage(replace(chosen, average=kept), sdxl(), "fp32") for kept in (False, True)
        )
        assert [b.bytes - a.bytes for a, b in zip(plain, averaged, strict=True)] == [
            8 * SDXL, 4 * SDXL, 0
        ]  # fmt: skip


def test_offload_at_stage_2_is_the_facts_arithmetic() -> None:
    """4.8 GiB on the device, 43.1 GiB on the host with the buffer for the largest gradient."""
    parts = memory_parts(launch("zero2_offload"), sdxl(), 0)
    assert states(parts, "device") == 2 * SDXL
    assert states(parts, "host") == 18 * SDXL
    buffer = sum(p.bytes for p in parts if p.name == "gradient on its way" and p.where == "host")
    assert f"{2 * SDXL / GIB:.1f}" == "4.8"
    assert f"{(18 * SDXL + buffer) / GIB:.1f}" == "43.1"


@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload"])
def test_states_in_bf16_take_four_bytes_less_of_the_host(name: str) -> None:
    """33.5 GiB of states for SDXL in place of 43.0; where nothing is offloaded nothing changes."""
    parts = memory_parts(launch(name, bf16_states=True), sdxl(), 0)
    assert states(parts, "host") == 14 * SDXL
    assert f"{14 * SDXL / GIB:.1f}" == "33.5"
    other = name.removesuffix("_offload")
    assert states(memory_parts(launch(other, bf16_states=True), sdxl(), 0), "device") == 16 * SDXL


def test_offload_at_stage_3_is_the_facts_arithmetic_and_deepspeeds_own_memory() -> None:
    """43.0 GiB of states; gradients in 16 bits, which it keeps in addition to those in float32."""
    parts = memory_parts(launch("zero3_offload"), sdxl(), 0)
    assert states(parts, "device") == 0
    assert states(parts, "host") == 18 * SDXL
    assert f"{18 * SDXL / GIB:.1f}" == "43.0"
    (more,) = [p for p in parts if p.name == "gradients in the type of the weights"]
    assert (more.bytes, more.where) == (2 * SDXL, "host")


def test_the_update_of_stage_2_takes_copies_of_the_gradients() -> None:
    """16-bit gradients are made flat and then float32: six bytes a parameter in addition to the
    states."""
    parts = memory_parts(launch("zero2"), sdxl(), 0)
    assert at(parts, Moment.STEP, "device") == (16 + 6) * SDXL
    bucket = 2 * 50_000_000
    assert at(parts, Moment.BACKWARD, "device") == 16 * SDXL + bucket


def test_masters_are_shared_among_processes() -> None:
    """Twelve of the bytes are divided at stage 1, fourteen at stage 2, all at stage 3."""
    model = ParameterSizes(
        {f"l{n}.weight": 2**20 for n in range(64)}, (tuple(f"l{n}.weight" for n in range(64)),)
    )
    for name, whole, shared in (("zero1", 4, 12), ("zero2", 2, 14), ("zero3", 0, 16)):
        parts = memory_parts(launch(name, processes=4), model, 0)
        assert states(parts, "device") == model.numel * whole + model.numel * shared // 4, name


CHAINS = [
    ("torch", "zero1", "zero2", "zero3", "zero3_offload", "zero3_nvme"),
    ("zero2", "zero2_offload", "zero3_offload"),
]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("processes", [2, 3, 8])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_device_memory_never_grows_along_the_presets(
    chain: tuple[str, ...], processes: int, precision: str
) -> None:
    """With several processes each preset takes no more than the one before it.

    zero2_offload and zero3 are on two branches: which takes less depends on the processes.
    """
    parts = [memory_parts(launch(name, precision, processes), sdxl(), GIB) for name in chain]
    peaks = [peak(found, "device")[0] for found in parts]
    assert peaks == sorted(peaks, reverse=True), dict(zip(chain, peaks, strict=True))


def test_zero3_takes_more_than_zero2_offload_of_few_processes_and_less_of_many() -> None:
    def device(name: str, processes: int) -> int:
        return peak(memory_parts(launch(name, "bf16", processes), sdxl(), 0), "device")[0]

    assert device("zero3", 2) > device("zero2_offload", 2)
    assert device("zero3", 64) < device("zero2_offload", 64)


def test_it_is_reported_where_zero_saves_nothing() -> None:
    assert "one process" in (saves_nothing(launch("zero2")) or "")
    assert saves_nothing(launch("zero2", processes=2)) is None
    assert saves_nothing(launch("zero2_offload")) is None
    assert saves_nothing(launch("torch")) is None
    one = {name: memory_parts(launch(name), sdxl(), 0) for name in ("torch", "zero1", "zero2")}
    assert peak(one["zero1"], "device")[0] >= peak(one["zero2"], "device")[0]
    assert peak(one["zero2"], "device")[0] > peak(one["torch"], "device")[0]


def test_frozen_parameters_have_weights_alone() -> None:
    """Of a LoRA: 2 B a frozen parameter under DeepSpeed, 4 B where autocast casts them."""
    sizes = {"base.weight": 10**9, "lora.weight": 10**6}
    model = ParameterSizes(sizes, (("lora.weight",),))
    assert states(memory_parts(launch("zero2"), model, 0), "device") == 2 * 10**9 + 16 * 10**6
    assert states(memory_parts(launch("torch"), model, 0), "device") == 4 * 10**9 + 16 * 10**6
    assert (
        states(memory_parts(launch("zero3", processes=2), model, 0), "device") == 10**9 + 8 * 10**6
    )


def test_quantized_weights_take_their_bytes_alone() -> None:
    """On the device, in no engine's type and without autocast's copy; loaded whole first."""
    sizes = {"base.weight": 10**9, "lora.weight": 10**6}
    model = ParameterSizes(sizes, (("lora.weight",),), 2, {"base.weight": 516 * 10**6})
    for name in ("torch", "zero1", "zero2"):
        parts = memory_parts(launch(name), model, 0)
        assert states(parts, "device") == 516 * 10**6 + 16 * 10**6
        assert not {"frozen weights"} & {part.name for part in parts}
        (loaded,) = [part.bytes for part in parts if part.name == "model as it is loaded"]
        assert loaded == 4 * sum(sizes.values())
        assert sum(p.bytes for p in parts if p.name.startswith("weights cast by")) <= 2 * 10**6


def test_accumulation_keeps_gradients_on_the_host() -> None:
    """At stage 2 with offload, micro batches are summed up in 16 bits in addition to the float32
    ones."""
    one = memory_parts(launch("zero2_offload"), sdxl(), 0)
    four = memory_parts(launch("zero2_offload", accumulation=4), sdxl(), 0)
    more = at(four, Moment.STEP, "host") - at(one, Moment.STEP, "host")
    assert more == 2 * SDXL
    assert [p.bytes for p in four if p.name == "gradients accumulated"] == [2 * SDXL]


def test_a_model_that_is_built_in_parts_is_never_whole() -> None:
    """Where launch.zero3_init reads one parameter after another: 2 B of the largest on the device,
    all others on the host. Frozen ones lie in page-locked memory of their own, and only once."""
    sizes = {"base.weight": 2**30, "base.bias": 3 * 2**18, "lora.weight": 2**20}
    model = ParameterSizes(sizes, (("lora.weight",),))
    whole, parts = (
        memory_parts(launch("zero3_offload", init=init), model, 0) for init in (False, True)
    )
    assert at(whole, Moment.PLACE, "device") == 2 * sum(sizes.values())
    assert at(parts, Moment.PLACE, "device") == 2 * 2**30
    assert at(parts, Moment.PLACE, "host") == 2 * sum(sizes.values()) + 2 * 2**30
    (pages,) = [p for p in parts if p.name == "locked pages beyond the weights"]
    assert pages.bytes == 2 * 2**18
    (kept,) = [p for p in parts if p.name == "locked pages of the weights before they were flat"]
    assert (kept.bytes, kept.when[-1]) == (2 * 2**20, Moment.BUCKETS)


def test_only_small_locked_pages_are_taken_in_powers_of_two() -> None:
    """None of SDXL's buffers is small: the least is for a gradient on its way."""
    assert LIMIT < 2 * 1280 * 2560 * 9
    parts = memory_parts(launch("zero2_offload"), sdxl(), 0)
    assert not [p for p in parts if p.name == "locked pages beyond the tensors"]
    small = ParameterSizes({"a": 3 * 2**20}, (("a",),))
    parts = memory_parts(launch("zero2_offload"), small, 0)
    (found,) = [p for p in parts if p.name == "locked pages beyond the tensors"]
    assert found.bytes == 2 * (2**24 - 3 * 2**22) + 2 * (2**23 - 3 * 2**21)


FIGURE = re.compile(r"\((\d+) GiB for SDXL's U-Net in bf16\)")


@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload"])
def test_a_presets_comment_has_the_planners_figure(name: str) -> None:
    """What one process keeps in host memory while it trains."""
    text = Path(f"config/launch/{name}.yaml").read_text(encoding="utf-8").replace("\n# ", " ")
    host = peak(memory_parts(launch(name), sdxl(), 0), "host")[0]
    (figure,) = FIGURE.findall(text)
    assert int(figure) == round(host / GIB)


def test_an_offloaded_optimizer_takes_what_its_states_take() -> None:
    """18 B a parameter on the host (43 GiB for SDXL's U-Net), and buffers of one parameter."""
    host = peak(memory_parts(launch("zero2_offload"), sdxl(), 0), "host")[0]
    assert 18 * SDXL <= host <= 18 * SDXL + 2**28


def test_a_bucket_is_emptied_before_what_does_not_fit() -> None:
    assert largest_fill([3, 4, 2, 5], 8) == 7
    assert largest_fill([9, 3], 8) == 3
    assert largest_fill([], 8) == 0


def test_a_partition_keeps_whole_gradients_of_what_it_cuts() -> None:
    """Two processes, parameters of 6, 4 and 10: the border lies between the second and third."""
    assert gradients_of_partition([[6, 4, 10]], 2) == 10
    assert gradients_of_partition([[6, 8, 6]], 2) == 14


def test_a_sub_group_ends_where_it_reaches_its_size() -> None:
    assert sub_groups([[4, 4, 4, 4]], 1, 6) == [8, 8]
    assert sub_groups([[4, 4, 4], [2]], 2, 4) == [4, 2, 1]


def live(*, gathers: bool = False, **limits: int) -> Live:
    """What is live of four modules under these limits."""
    modules = ((10,), (20, 1), (30,), (5,))
    by = Coordinator(kept=1, bucket=40, gathers=gathers, **limits)
    return live_parameters(modules, by)


def test_live_parameters_follow_the_limits() -> None:
    """Without prefetch and reuse one module is live at a time; with both, all of them."""
    assert live(prefetch=0, max_live=0, reuse=0) == Live(30, 30, 20)
    assert live(prefetch=100, max_live=1000, reuse=1000) == Live(65, 65, 30)
    ahead = live(prefetch=1, max_live=1000, reuse=0)
    assert ahead.forward == 20 + 30
    assert ahead.backward == 30 + 20 + 10


def test_what_is_gathered_lies_in_a_buffer_first() -> None:
    """One module at a time, twice; all at once: the first, and the other three in one buffer. On a
    CPU a gathering that continues has a copy."""
    alone, far = {"prefetch": 0, "max_live": 0, "reuse": 0}, {"max_live": 1000, "reuse": 1000}
    assert live(gathers=True, **alone) == Live(60, 60, 20)
    assert live(gathers=True, prefetch=100, **far) == Live(65 + 55, 65, 30)
    modules = ((1,), (5,), (5,), (5,), (20,), (20,))
    limits = {"prefetch": 15, "max_live": 1000, "reuse": 1000, "kept": 0, "bucket": 40}
    one = live_parameters(modules, Coordinator(**limits, gathers=True))
    assert one.forward == 56 + 20  # the copy of the last that is waited for
    copied = live_parameters(modules, Coordinator(**limits, gathers=True, copies=True))
    assert copied.forward == 56 + 15 + 20  # one goes on while the buffer of the fives is there


def test_gloo_gathers_the_new_weights_into_a_copy() -> None:
    """On CPUs, where processes talk through it; NCCL takes no memory of its own."""
    copy = [
        p
        for p in memory_parts(launch("zero2", processes=2, cpu=True), sdxl(), 0)
        if "gloo" in p.name
    ]
    assert [(p.bytes, p.when) for p in copy] == [(2 * SDXL, (Moment.GATHER,))]
    for other in (launch("zero2", processes=2), launch("zero2", cpu=True)):
        assert not [p for p in memory_parts(other, sdxl(), 0) if "gloo" in p.name]


def test_storage_counts_what_is_new_before_what_is_old() -> None:
    rolling, state, weights = storage(launch("zero2", keep=3), sdxl(), "bf16")
    assert (rolling.bytes, rolling.spike) == (36 * SDXL, 48 * SDXL)
    assert (state.bytes, weights.bytes, weights.spike) == (12 * SDXL, 2 * SDXL, 4 * SDXL)


def test_stage_2_moves_six_bytes_a_parameter() -> None:
    """Offloaded Adam must move 4; DeepSpeed takes the gradients down in float32."""
    assert traffic(launch("zero2_offload"), sdxl()) == Traffic(4 * SDXL, 2 * SDXL)
    assert traffic(launch("zero3_offload"), sdxl()) == Traffic(6 * SDXL, 6 * SDXL)
    assert traffic(launch("zero2"), sdxl()) == Traffic()


def test_swap_files_hold_the_optimizer_and_the_weights() -> None:
    """The first max_in_cpu weights stay in host memory, and have files all the same."""
    files = swap_files(launch("zero3_nvme"), sdxl())
    assert files["masters"] == pytest.approx(4 * SDXL, abs=2**20)
    assert files["optimizer states"] == 2 * files["masters"]
    assert files["gradients"] <= 4 * SDXL
    kept = [p for p in memory_parts(launch("zero3_nvme"), sdxl(), 0) if p.name == "weights"]
    assert sum(p.bytes for p in kept) == pytest.approx(2 * 10**9, rel=0.2)


def test_a_peak_names_its_moment() -> None:
    parts = [
        MemoryPart("a", 5, "device", since(Moment.FORWARD), ""),
        MemoryPart("b", 7, "device", (Moment.STEP,), "", touched=1),
        MemoryPart("c", 3, "host", (Moment.BACKWARD,), ""),
    ]
    assert peak(parts, "device") == (12, Moment.STEP)
    assert resident_peak(parts) == (8, Moment.BACKWARD)
