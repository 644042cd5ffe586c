"""What a training takes and how fast it is on one NVIDIA GPU, with the true architectures.

    python benchmarks/gpu.py --out gpu.jsonl --minutes 5   # from the project's root
    python benchmarks/gpu.py --predict gpu.jsonl           # the planner's figures, on any machine
    python benchmarks/gpu.py --dry-run                     # every measurement on a CPU, tiny
    python benchmarks/gpu.py --tune                        # defaults against other values, in turns

Measurements run in the order of their importance, each in a process of its own with a time limit.
A line of JSON is appended to --out after each, a failure with the last lines of its error, so that
a run that is cut keeps what it has, and the next does what is missing. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gpu_cases
import gpu_inputs
import gpu_tune
from gpu_inputs import SMALL_UNET, Training

MOST_LINES = 25
"""Of a failure's output."""
RESERVE_SECONDS = 5
OPS_SECONDS = 150
"""Limit for DeepSpeed's ops to be compiled, which begins with the run."""


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


def append(out: Path, line: dict[str, Any]) -> None:
    """Append a line, and see that it is on the disk."""
    with out.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


class Ops:
    """The compilation of DeepSpeed's ops, which runs while other things are measured."""

    def __init__(self, out: Path, limit: float) -> None:
        self._out, self._limit, self._began = out, limit, time.monotonic()
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zerotrain.machine.compiled_ops"],
            stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.works: bool | None = None

    def wait(self) -> bool:
        """Wait until they are compiled; return whether they are."""
        if self.works is None:
            try:
                code = self._process.wait(self._limit)
            except subprocess.TimeoutExpired:
                self.close()
                code = -1
            self.works = code == 0
            self._log.seek(0)
            said = self._log.read().splitlines()[-MOST_LINES:]
            seconds = round(time.monotonic() - self._began, 1)
            append(
                self._out,
                {"name": "compiled_ops", "ok": self.works, "seconds": seconds, "said": said},
            )
            print(f"DeepSpeed's ops: {'compiled' if self.works else said} ({seconds} s)")
        return self.works

    def close(self) -> None:
        """End the compilers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()


def child_environment(one: Measurement, fallback: bool) -> dict[str, str]:
    """Return the environment of a measurement's process, as the train_phase stage would set it."""
    from zerotrain.launch import pinned_memory
    from zerotrain.machine import compiled_ops
    from zerotrain.machine.ports import free_port
    from zerotrain.stages.train_phase import ALLOCATOR

    threads = str(len(os.sched_getaffinity(0)))
    environment = {
        **os.environ,
        **compiled_ops.environment(),
        **ALLOCATOR,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    if one.needs_ops:
        environment |= pinned_memory.limit(os.environ)
    if fallback:
        environment[gpu_cases.FALLBACK] = "1"
    return environment


def measure(one: Measurement, nano: bool, limit: float, fallback: bool) -> dict[str, Any]:
    """Run a measurement in a process of its own; return its line."""
    began = time.monotonic()
    line: dict[str, Any] = {"name": one.name, "ok": False}
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        log = Path(name) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", one.name, name, *["--dry-run"] * nano],
                stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
                env=child_environment(one, fallback),
            )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            line["error"] = f"not finished after {limit:.0f} s"
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
        if code == 0:
            line |= {"ok": True, **json.loads(said[-1])}
        else:
            line |= {"exit": code, "last_lines": said[-MOST_LINES:]}
    if fallback:
        line["optimizer"] = "torch's AdamW on the host: DeepSpeed's did not compile"
    return {**line, "seconds": round(time.monotonic() - began, 1)}


def predict(out: Path) -> None:
    """Append the planner's prediction for every measured training of a file."""
    from zerotrain.config.read import parse_config
    from zerotrain.config.stage_settings import LaunchSettings
    from zerotrain.launch.planner.prediction import predict as predicted
    from zerotrain.launch.planner.tracing import trace
    from zerotrain.launch.preset import read_preset

    known = finished(out)
    for name, line in list(known.items()):
        if "case" not in line or f"{name}:planner" in known or name.startswith("tune_"):
            continue
        values = dict(line["case"])
        nano = values.pop("nano")
        case = Training(**values)
        config = LaunchSettings.of(
            parse_config(gpu_inputs.raw_config(case, nano, case.steps + 5), "gpu.py"), "measured"
        )
        phase = config.phases[-1]
        traced = trace(config, phase, None)
        mode: Literal["checkpointed", "plain"] = "checkpointed" if case.checkpointing else "plain"
        preset = read_preset(Path(f"config/launch/{case.preset}.yaml"))
        found = predicted(config, phase, preset, traced, mode)
        plain = traced.engines[found.launch.engine].flops_per_sample(False)
        append(
            out,
            {
                "name": f"{name}:planner", "ok": True,
                "device_mib": round(found.device / 2**20, 1),
                "host_mib": round(found.host / 2**20, 1),
                "tflop_per_step": round(found.flops / 1e12, 3),
                "tflop_per_step_without_recomputation": round(plain * traced.batch / 1e12, 3),
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
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.chdir(Path(__file__).parent.parent)
    if options.child:
        name, folder = options.child
        gpu_cases.finish(NAMES[name].run(Path(folder), options.dry_run))
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
    if options.tune and options.dry_run:  # one round walks every arm
        usual = tuple(one for one in TUNE if one.name.endswith(":1"))
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
    ops = Ops(options.out, 60 * options.minutes if options.dry_run else OPS_SECONDS)
    try:
        for one in chosen:
            left = 60 * options.minutes - (time.monotonic() - began) - RESERVE_SECONDS
            if left < (1 if options.dry_run else one.seconds):
                print(f"{one.name}: skipped, {left:.0f} s are left", flush=True)
                continue
            fallback = one.needs_ops and not ops.wait()
            # A dry run finds what is missing, not what is slow.
            limit = left if options.dry_run else min(one.limit, left)
            line = measure(one, options.dry_run, limit, fallback)
            if "full_determinism: false" in " ".join(line.get("last_lines", [])):
                # An operation has no deterministic kernel here: the next ones do without, too.
                append(options.out, {**line, "name": f"{one.name}:deterministic"})
                os.environ[gpu_inputs.NOT_DETERMINISTIC] = "1"
                left = 60 * options.minutes - (time.monotonic() - began) - RESERVE_SECONDS
                line = measure(one, options.dry_run, min(limit, left), fallback)
            append(options.out, line)
            print(json.dumps(line)[:700], flush=True)
    finally:
        ops.close()
    if options.dry_run:
        predict(options.out)
    show(options.out)
    if options.dry_run and not all(line["ok"] for line in finished(options.out).values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
