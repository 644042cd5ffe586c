"""What a training takes and how fast it is on one NVIDIA GPU, with the true architectures.

    python benchmarks/gpu.py --out gpu.jsonl --minutes 5   # from the project's root
    python benchmarks/gpu.py --predict gpu.jsonl           # the planner's figures, on any machine
    python benchmarks/gpu.py --dry-run                     # all measurements on a CPU, tiny
    python benchmarks/gpu.py --tune                        # defaults against other values, in turns

Measurements run in the order of their importance, each in a process of its own with a time limit
(gpu_processes.py).
A line of JSON is appended to --out after each, a failure with the last lines of its error, so that
a run that is cut keeps what it has, and the next does what is missing. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_cases
import gpu_inputs
import gpu_tune
from gpu_inputs import SMALL_UNET, Training
from gpu_processes import MOST_LINES, OPS_SECONDS, Ops, Processes, append

RESERVE_SECONDS = 5


@dataclass(frozen=True)
class Measurement:
    """One measurement, with the seconds that it is expected to take on an H100, and its limit."""

    name: str
    seconds: int
    limit: int
    run: Callable[[Path, bool], dict[str, Any]]
    training: Training | None = None
    needs_ops: bool = False


def training(name: str, seconds: int, limit: int, case: Training) -> Measurement:
    """Return the measurement of a training."""
    return Measurement(
        name, seconds, limit,
        lambda folder, nano: gpu_cases.measure_training(folder, case, nano),
        case, case.preset != "torch",
    )  # fmt: skip


def switch(name: str, seconds: int, limit: int, change: dict[str, Any]) -> Measurement:
    """Return the measurement of a switch of launches."""
    return Measurement(
        name, seconds, limit,
        lambda folder, nano: gpu_cases.measure_switch(folder, nano, change), needs_ops=True,
    )  # fmt: skip


def sdxl(preset: str, size: int, batch: int, **values: Any) -> Training:
    """Return a training of SDXL's whole U-Net."""
    return Training("sdxl", preset, size, batch, **values)


ALL = (
    Measurement("ceilings", 12, 60, gpu_cases.measure_ceilings),
    training("sdxl_zero2_offload_128_8", 60, 150, sdxl("zero2_offload", 128, 8)),
    training("sdxl_zero2_offload_1024_1", 60, 150, sdxl("zero2_offload", 1024, 1)),
    training("sdxl_zero2_offload_1024_8", 65, 150, sdxl("zero2_offload", 1024, 8)),
    training(
        "sdxl_zero2_offload_1024_8_cpu_checkpointing", 70, 150,
        sdxl("zero2_offload", 1024, 8, launch={"cpu_checkpointing": True}),
    ),
    switch("switch_small_unet", 90, 200, SMALL_UNET),
    training("sdxl_torch_1024_1", 25, 100, sdxl("torch", 1024, 1)),
    training("sdxl_torch_1024_8", 30, 100, sdxl("torch", 1024, 8)),
    Measurement("encode_1024", 30, 120, gpu_cases.measure_encoding),
    training("sdxl_zero3_offload_1024_8", 75, 180, sdxl("zero3_offload", 1024, 8)),
    training("sd3_lora_1024_4", 30, 100, Training("sd3", "torch", 1024, 4, lora=True)),
    training(
        "causal_lm_12_layers_zero3_offload_2048_1", 90, 200,
        Training("causal_lm", "zero3_offload", 2048, 1, steps=5, change={"num_hidden_layers": 12}),
    ),
    training(
        "qwen_image_20_layers_lora_zero3_offload_1024_1", 90, 200,
        Training(
            "qwen_image", "zero3_offload", 1024, 1, steps=5, lora=True, change={"num_layers": 20}
        ),
    ),
    training("sdxl_torch_768_8", 30, 100, sdxl("torch", 768, 8)),
    training("sdxl_zero2_offload_768_8", 60, 150, sdxl("zero2_offload", 768, 8)),
    training("sdxl_zero3_offload_128_8", 70, 180, sdxl("zero3_offload", 128, 8)),
)  # fmt: skip
"""Most important first."""


def tuning(name: str, arm: Training | int | None) -> Measurement:
    """Return the measurement of an arm of a comparison."""
    if isinstance(arm, Training):
        return training(name, 35, 120, arm)
    return Measurement(
        name, 30, 120, lambda folder, nano: gpu_cases.measure_encoding(folder, nano, arm)
    )


TUNE = tuple(tuning(name, arm) for name, arm in gpu_tune.names())
NAMES = {one.name: one for one in (*ALL, *TUNE)}


def finished(out: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a file by their names, the last of each."""
    if not out.is_file():
        return {}
    lines = [
        json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    return {line["name"]: line for line in lines}


def machine_environment(nano: bool) -> dict[str, str]:
    """Return variables that libraries read when they are loaded, as a training has them.

    A tiny model is no faster on two cores, and far slower where other processes use them, too.
    """
    from zerotrain.stages.train_phase import ALLOCATOR

    threads = "1" if nano else str(len(os.sched_getaffinity(0)))
    return {
        **ALLOCATOR,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def child_environment(one: Measurement, fallback: bool) -> dict[str, str]:
    """Return the environment of a measurement's process, as the train_phase stage would set it."""
    from zerotrain.launch import zero
    from zerotrain.machine import compiled_ops
    from zerotrain.machine.ports import free_port

    environment = {
        **os.environ,
        **compiled_ops.environment(),
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    if one.needs_ops:
        environment |= zero.limit(os.environ)
    if fallback:
        environment[gpu_cases.FALLBACK] = "1"
    return environment


def run_named(name: str, folder: Path, nano: bool) -> None:
    """Run a measurement in this process; write its result."""
    result = NAMES[name].run(folder, nano)
    (folder / gpu_cases.RESULT).write_text(json.dumps(result, default=str), encoding="utf-8")


def measure(
    processes: Processes, one: Measurement, nano: bool, limit: float, fallback: bool
) -> dict[str, Any]:
    """Run a measurement in a process of its own; return its line."""
    began = time.monotonic()
    line: dict[str, Any] = {"name": one.name, "ok": False}
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        folder = Path(name)
        code, said = processes.run(
            run_named, limit, child_environment(one, fallback), one.name, folder, nano
        )
        if code == 0:
            line |= {
                "ok": True,
                **json.loads((folder / gpu_cases.RESULT).read_text(encoding="utf-8")),
            }
        else:
            line |= {"exit": code, "last_lines": said[-MOST_LINES:]}
    if code is None:
        line["error"] = f"not finished after {limit:.0f} s"
    if fallback:
        line["optimizer"] = "torch's AdamW on the host: DeepSpeed's did not compile"
    return {**line, "seconds": round(time.monotonic() - began, 1)}


def predict(out: Path) -> None:
    """Append the planner's prediction for every measured training of a file."""
    from zerotrain.config.read import parse_config
    from zerotrain.config.stage_settings import LaunchSettings
    from zerotrain.launch.planner.prediction import Mode
    from zerotrain.launch.planner.prediction import predict as predicted
    from zerotrain.launch.planner.tracing import trace
    from zerotrain.launch.preset import read_preset

    known = finished(out)
    for name, line in list(known.items()):
        if "case" not in line or f"{name}:planner" in known or name.startswith("tune_"):
            continue
        values = dict(line["case"])
        nano = values.pop("nano")
        values.pop("zero3_init", None)  # of files from before 2026-11-27
        case = Training(**values)
        config = LaunchSettings.of(
            parse_config(gpu_inputs.raw_config(case, nano, case.steps + 5), "gpu.py"), "measured"
        )
        phase = config.phases[-1]
        traced = trace(config, phase, None)
        mode: Mode = "checkpointed" if case.checkpointing else "plain"
        if phase.launch.cpu_checkpointing:
            mode = "on_host"
        preset = read_preset(Path(f"config/launch/{case.preset}.yaml"))
        found = predicted(config, phase, preset, traced, mode)
        plain = traced.engines[found.launch.engine].flops_per_sample(False)
        append(
            out,
            {
                "name": f"{name}:planner", "ok": True,
                "device_mib": round(found.device / 2**20, 1),
                "host_mib": round(found.host / 2**20, 1),
                "tflop_per_step": round(found.flops / 1e12, 6),
                "tflop_per_step_without_recomputation": round(plain * traced.batch / 1e12, 6),
                "parts": {
                    f"{part.where}: {part.name}": round(part.bytes / 2**20, 1)
                    for part in found.parts
                },
            },
        )  # fmt: skip


def check() -> bool:
    """Prepare every training at its true size, without weights; return whether all succeed."""
    works = True
    for one in ALL:
        if one.training is None:
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-") as name:
            try:
                _, family = gpu_inputs.prepare(Path(name) / "inputs", one.training, False, 12)
                model = family.empty_model(Path(name) / "inputs" / "base")
                count = sum(parameter.numel() for parameter in model.parameters())
                print(f"{one.name:48} {count:,} parameters", flush=True)
            except Exception as error:
                works = False
                print(f"{one.name:48} FAILED: {error}", flush=True)
    return works


def show(out: Path) -> None:
    """Print the measurements as a table."""
    known = finished(out)
    top = known.get("ceilings", {}).get("matmul_bf16_tflops")
    print(f"{'':38}{'GPU MiB: peak':>14}{'reserved':>9}{'driver':>8}{'planned':>8}"
          f"{'host MiB':>9}{'s/step':>8}{'MFU':>6}")  # fmt: skip
    for name, line in known.items():
        if not line["ok"]:
            words = line.get("error") or " ".join(line.get("last_lines", line.get("said", []))[-1:])
            print(f"{name:38}FAILED: {words[:90]}")
        elif "case" in line:
            plan = known.get(f"{name}:planner", {})
            flops = plan.get("tflop_per_step_without_recomputation")
            share = flops / line["seconds_per_step"] / top if flops and top else None
            print(
                f"{name:38}{line['device']['allocated_mib']:14.0f}"
                f"{line['device']['reserved_mib']:9.0f}{line.get('device_driver_mib', 0):8.0f}"
                f"{plan.get('device_mib', 0):8.0f}{line['host_available_fell_by_mib']:9.0f}"
                f"{line['seconds_per_step']:8.3f}" + (f"{share:6.1%}" if share else "")
            )
        elif not name.endswith(":planner"):
            told = {k: v for k, v in line.items() if isinstance(v, (int, float, str))}
            print(f"{name:38}{ {k: v for k, v in told.items() if k not in ('name', 'ok')} }")
    print(*gpu_tune.table(known), sep="\n")


def walk(chosen: Sequence[Measurement], options: argparse.Namespace, end: float) -> None:
    """Measure what can be measured until a time, each line as soon as it is known."""
    os.environ.update(machine_environment(options.dry_run))
    nano, waiting = options.dry_run, [*chosen]
    ops = Ops(options.out, end - time.monotonic() if nano else OPS_SECONDS)
    try:
        processes = Processes(nano, options.spawn)
        while waiting:
            one = waiting[0]
            if ops.runs() and not options.tune:  # the GPU need not wait for the compilers
                one = next((other for other in waiting if not other.needs_ops), one)
            waiting.remove(one)
            left = end - time.monotonic()
            if left < (1 if nano else one.seconds):
                print(f"{one.name}: skipped, {left:.0f} s are left", flush=True)
                continue
            fallback = one.needs_ops and not ops.wait()
            # A dry run finds what is missing, not what is slow.
            limit = end - time.monotonic() if nano else min(one.limit, end - time.monotonic())
            line = measure(processes, one, nano, limit, fallback)
            if "full_determinism: false" in " ".join(line.get("last_lines", [])):
                # An operation has no deterministic kernel here: the next ones do without, too.
                append(options.out, {**line, "name": f"{one.name}:deterministic"})
                os.environ[gpu_inputs.NOT_DETERMINISTIC] = "1"
                line = measure(processes, one, nano, min(limit, end - time.monotonic()), fallback)
            append(options.out, line)
            print(json.dumps(line)[:700], flush=True)
    finally:
        ops.close()
    if nano:
        code, said = processes.run(predict, 60 * options.minutes, os.environ, options.out)
        if code != 0:
            sys.exit("\n".join(["the planner failed:", *said[-MOST_LINES:]]))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="file to append to")
    parser.add_argument("--minutes", type=float, default=60, help="end within this time")
    parser.add_argument("--only", help="names, with commas between")
    parser.add_argument("--dry-run", action="store_true", help="tiny models; works on a CPU")
    parser.add_argument("--tune", action="store_true", help="compare defaults with other values")
    parser.add_argument("--list", action="store_true", help="print the plan, and measure nothing")
    parser.add_argument("--check", action="store_true", help="prepare the true sizes, train none")
    parser.add_argument("--predict", type=Path, metavar="FILE", help="add the planner's figures")
    parser.add_argument("--retry", action="store_true", help="repeat measurements that failed")
    parser.add_argument("--spawn", action="store_true", help="a new Python for each measurement")
    options = parser.parse_args()
    os.chdir(Path(__file__).parent.parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # end the processes
    if options.check:
        sys.exit(not check())
    if options.predict:
        predict(options.predict)
        show(options.predict)
        return
    began = time.monotonic()
    if unknown := {*(options.only or "").split(",")} - {*NAMES, ""}:
        parser.error(f"--only {', '.join(sorted(unknown))}: known are {', '.join(NAMES)}")
    usual = TUNE if options.tune else ALL
    if options.dry_run:  # one round walks every arm
        first = tuple(one for one in TUNE if one.name.endswith(":1"))
        usual = first if options.tune else (*ALL, *first)
    chosen = [NAMES[name] for name in options.only.split(",")] if options.only else usual
    done = finished(options.out)
    chosen = [
        one for one in chosen
        if one.name not in done or (options.retry and not done[one.name]["ok"])
    ]  # fmt: skip
    for one in chosen:
        print(f"{one.name:40} about {one.seconds:4} s, at most {one.limit} s")
    print(f"{sum(one.seconds for one in chosen)} s in all, of {60 * options.minutes:.0f}")
    if options.list:
        return
    if chosen:
        walk(chosen, options, began + 60 * options.minutes - RESERVE_SECONDS)
    show(options.out)
    if options.dry_run and not all(line["ok"] for line in finished(options.out).values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
