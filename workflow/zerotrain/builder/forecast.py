"""What each preset takes, as bars: memory of GPU and host by kind, what fits, seconds a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from pydantic import TypeAdapter, ValidationError

from zerotrain.builder.draft import Draft
from zerotrain.builder.traces import Traces, Tracing, trace_inputs
from zerotrain.config.models import Phase
from zerotrain.config.run import RunConfig
from zerotrain.config.section import Memory
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.inputs import MemoryPart, Place, peak, resident_peak
from zerotrain.launch.planner.planner import (
    AUTO,
    PlannedMachine,
    choose,
    described_machine,
    fits,
    this_machine,
)
from zerotrain.launch.planner.prediction import MODES, Mode, Prediction, predict
from zerotrain.launch.planner.trace_store import TracedModel
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.machine.detect import Machine, detect
from zerotrain.machine.host import gib

KINDS = ("weights", "gradients", "optimizer", "activations", "buckets", "other")
"""Kinds of memory, in the order in which they are stacked."""
MOST = 64
"""Predictions that are kept."""
RATES = {
    "learning_rate", "lr_scheduler", "lr_scheduler_args", "lr_warmup_steps", "lr_warmup_ratio",
    "lr_scheduler_steps", "adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay",
    "max_grad_norm",
}  # fmt: skip
"""Keys of `train` that take no memory and no time."""
LEGEND = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states and masters",
    "activations": "activations",
    "buckets": "buckets and buffers",
    "other": "copies for a moment",
}
STARTS = {
    "weights before": "other", "weights copied": "other", "weights converted": "other",
    "weights in parts": "other", "weights on their way to the disk": "buckets",
    "weights": "weights", "frozen weights": "weights", "quantized weights": "weights",
    "live parameters": "weights", "persistent parameters": "weights", "moving average": "weights",
    "masters before": "other", "masters": "optimizer", "optimizer states": "optimizer",
    "zeros for the states": "other", "gradients made flat": "other",
    "gradients in float32": "other", "gradient": "gradients", "activations": "activations",
    "reduce bucket": "buckets", "copy of the bucket": "buckets", "buckets": "buckets",
    "buffers": "buckets", "gloo's": "buckets",
}  # fmt: skip
"""Kinds by the beginning of the parts' names, the longer ones first; the rest is `other`."""


@dataclass(frozen=True)
class Segment:
    """A part of a bar, in shares of its whole length."""

    kind: str
    start: float
    length: float
    bytes: int


@dataclass(frozen=True)
class Bar:
    """Memory of one place at its peak.

    Attributes:
        segments: The kinds, stacked.
        total: Bytes of all.
        limit: What the machine has; None if unknown.
        mark: The limit as a share of the bar's length; None if unknown.
    """

    segments: tuple[Segment, ...]
    total: int
    limit: int | None
    mark: float | None

    @property
    def over(self) -> bool:
        """Whether it is more than the machine has."""
        return self.limit is not None and self.total > self.limit


@dataclass(frozen=True)
class Row:
    """A preset.

    Attributes:
        name: Its name.
        device: Memory of one GPU; None if the preset is refused.
        host: Memory of the machine; None on a CPU, where both are one.
        fits: Whether it fits; None if the machine is unknown.
        note: What is special: why it saves nothing, is refused, or needs a disk.
        seconds: Of a step; None if the GPU's speed is unknown.
        recommended: Whether `launch: auto` takes it.
        chosen: Whether the phase names it.
    """

    name: str
    device: Bar | None = None
    host: Bar | None = None
    fits: bool | None = None
    note: str = ""
    seconds: float | None = None
    recommended: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class Forecast:
    """The forecast of a phase.

    Attributes:
        rows: The presets, in the order of `launch: auto`; empty while the model is traced.
        machine: The machine in words.
        mode: What becomes of activations.
        parameters: Of the model, and of them those that are trained.
        why: Why auto takes its choice, or none.
        pending: The trace that is being made.
        traced: The trace; None while it is being made.
        recommended: What auto takes.
    """

    rows: tuple[Row, ...] = ()
    machine: str = ""
    mode: str = ""
    parameters: tuple[int, int] = (0, 0)
    why: str = ""
    pending: Tracing | None = None
    traced: TracedModel | None = None
    recommended: str = ""


@cache
def _this() -> Machine:
    """Describe this machine once: drivers are asked, which takes a while."""
    return detect()


def find_machine(values: Mapping[str, str], phase: Phase) -> PlannedMachine:
    """Return the machine that a form describes; without a GPU this one.

    Raises:
        PipelineError: a GPU or a size is not known, or a GPU is named without its host's memory.
    """
    gpu = values.get("gpu", "")
    device, host = (
        _size(f"machine.{key}", values.get(key, "")) for key in ("device_memory", "host_memory")
    )
    if gpu or device is not None:
        host = phase.launch.host_memory if host is None else host
        try:
            found = described_machine(device, host, gpu or None, _this())
        except PipelineError as error:
            what = error.what.replace("--gpu ", "machine.gpu: ", 1)
            hint = error.hint.replace("--device-memory '24 GiB'", "device_memory, as 24 GiB,")
            raise PipelineError(what, hint=hint) from error
        if found.host_is_ours:
            raise PipelineError(
                "machine.host_memory: the memory of the host of "
                f"{gpu or f'a GPU of {gib(device or 0)}'} is not given",
                hint="presets that offload depend on it: write it, as 64 GiB",
            )
        return found
    return this_machine(phase, _this(), host)


def _size(name: str, text: str) -> int | None:
    if not text:
        return None
    try:
        return int(TypeAdapter(Memory).validate_python(text))
    except ValidationError as error:
        raise PipelineError(f"{name}: {text!r} is no size", hint="write it as 24 GiB") from error


def forecast(draft: Draft, run: RunConfig, traces: Traces, *, begin: bool = True) -> Forecast:
    """Return the forecast of the draft's phase.

    Args:
        draft: The draft.
        run: Its configuration.
        traces: The known traces.
        begin: Whether to make a trace that is not known.

    Raises:
        PipelineError: the machine or the model is unknown.
    """
    phase = run.phases[draft.index]
    machine = find_machine(draft.machine, phase)
    traced = traces.find(draft, run, phase, cpu=machine.cpu, begin=begin)
    mode: Mode = "plain"
    if phase.train.gradient_checkpointing:
        mode = "on_host" if phase.launch.cpu_checkpointing else "checkpointed"
    if isinstance(traced, Tracing):
        return Forecast(machine=machine.describe(), mode=MODES[mode], pending=traced)
    key = f"{machine.cpu} {mode} {_inputs(run, phase)}"
    if (predicted := traces.predictions.get(key)) is None:
        if len(traces.predictions) >= MOST:
            traces.predictions.pop(next(iter(traces.predictions)), None)
        predicted = traces.predictions[key] = _predict(run, phase, traced, mode, machine)
    known = {n: one for n, one in predicted.items() if isinstance(one, Prediction)}
    choice = None
    if machine.device_memory is not None:
        usable = [one for one in known.values() if not machine.refusal(_preset(one.preset))]
        disk = phase.launch.offload_path is not None
        choice = choose(usable, machine.device_memory, machine.host_memory, has_disk=disk)
    recommended = choice.chosen.preset if choice and choice.chosen else ""
    bars = _bars(known, machine)
    rows = []
    for name, one in predicted.items():
        row = Row(name, recommended=name == recommended, chosen=name == phase.launch.preset)
        if isinstance(one, PipelineError):
            rows.append(replace(row, note=one.what, fits=False))
            continue
        refusal = machine.refusal(_preset(name))
        gpu = machine.gpu
        seconds = one.time(gpu, traced.parameters.trained_numel).seconds if gpu else None
        fitting = None
        if machine.device_memory is not None:
            fitting = not refusal and fits(one, machine.device_memory, machine.host_memory)
        note = refusal or one.useless or ""
        if one.swap and phase.launch.offload_path is None:
            note = f"needs offload_path, a disk with {gib(sum(one.swap.values()))} free"
        device, host = bars[name]
        rows.append(
            replace(row, device=device, host=host, fits=fitting, note=note, seconds=seconds)
        )
    return Forecast(
        rows=tuple(rows),
        machine=machine.describe(),
        mode=MODES[mode],
        parameters=(traced.model.parameters, traced.model.trained_parameters),
        why=choice.why if choice else "the memory of the GPU is not known",
        traced=traced,
        recommended=recommended,
    )


def _inputs(run: RunConfig, phase: Phase) -> str:
    """Return all of a phase that its predictions may depend on."""
    train = phase.train.model_dump_json(exclude=RATES)
    return f"{trace_inputs(run, phase)} {train} {phase.launch.model_dump_json()} {run.export}"


@cache
def _preset(name: str) -> Preset:
    return read_preset(AUTO.with_name(f"{name}.yaml"))


def _predict(
    run: RunConfig, phase: Phase, traced: TracedModel, mode: Mode, machine: PlannedMachine
) -> dict[str, Prediction | PipelineError]:
    """Predict each preset; one that the phase's own values do not go with has its error."""
    found: dict[str, Prediction | PipelineError] = {}
    for name in read_preset(AUTO).choose:
        try:
            found[name] = predict(run, phase, _preset(name), traced, mode, cpu=machine.cpu)
        except PipelineError as error:
            found[name] = error
    return found


def _bars(
    known: Mapping[str, Prediction], machine: PlannedMachine
) -> dict[str, tuple[Bar, Bar | None]]:
    """Return the bars of all presets: those of a place have one scale, with room for its limit."""
    devices = {name: _at_peak(one, "device") for name, one in known.items()}
    hosts = {name: _at_peak(one, "host") for name, one in known.items()}
    scale = _scale(devices, machine.device_memory)
    host_scale = _scale(hosts, machine.host_memory)
    return {
        name: (
            _bar(devices[name], scale, machine.device_memory),
            None if machine.cpu else _bar(hosts[name], host_scale, machine.host_memory),
        )
        for name in known
    }


def _scale(places: Mapping[str, Mapping[str, int]], limit: int | None) -> int:
    """Return the bytes of a bar's whole length; a giant beside a small limit is cut off."""
    longest = max((sum(kinds.values()) for kinds in places.values()), default=0)
    if limit:
        longest = min(max(longest, round(limit * 1.1)), limit * 3)
    return max(longest, 1)


def _at_peak(one: Prediction, place: Place) -> dict[str, int]:
    """Return the bytes of each kind at a place's peak, of all processes that share the place."""
    if one.launch.cpu:
        _, moment = resident_peak(one.parts)
        parts = [(part, part.resident) for part in one.parts if moment in part.when]
    else:
        _, moment = peak(one.parts, place)
        parts = [
            (part, part.bytes) for part in one.parts if part.where == place and moment in part.when
        ]
    times = one.launch.processes if one.launch.cpu or place == "host" else 1
    found = dict.fromkeys(KINDS, 0)
    for part, size in parts:
        found[kind_of(part)] += times * size
    return found


def kind_of(part: MemoryPart) -> str:
    """Return the kind of a part of memory."""
    starts = sorted(STARTS, key=len, reverse=True)
    return next((STARTS[start] for start in starts if part.name.startswith(start)), "other")


def _bar(kinds: Mapping[str, int], scale: int, limit: int | None) -> Bar:
    segments, start = [], 0.0
    for kind, size in kinds.items():
        length = min(size / scale, 1 - start)
        if length > 0:
            segments.append(Segment(kind, start, length, size))
        start += length
    mark = limit / scale if limit else None
    return Bar(tuple(segments), sum(kinds.values()), limit, mark)
