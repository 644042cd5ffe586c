"""All benchmarks of a CPU, one after the other, with the target of each figure in one table.

    make bench                                        # on an idle machine
    python benchmarks/bench.py --only step save       # some of them
    python benchmarks/bench.py --readme               # and write the table into README.md

What is measured, with which options and targets, is in bench.toml. Each benchmark compares two ways
in turns and prints JSON as its last line; its description is at the top of its file. The figures of
all are written to results/bench/DATE.json, with the machine, as each is measured. compare.py
compares two such files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from zerotrain.artifact.source_commit import source_commit
from zerotrain.machine.device import software
from zerotrain.machine.host import detect_host, gib

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
BEGIN, END = "<!-- bench: begin -->\n", "<!-- bench: end -->\n"


@dataclass(frozen=True)
class Figure:
    """A figure of a benchmark."""

    text: str
    key: str
    """In the benchmark's line of JSON."""
    interval: str | None = None
    """Key of the range that holds the true figure with 95 %."""
    at_most: float | None = None
    at_least: float | None = None

    def is_met(self, value: float) -> bool | None:
        """Whether a value meets the target; None without a target."""
        if self.at_most is None and self.at_least is None:
            return None
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return low <= value <= high

    def target(self) -> str:
        """Format the target."""
        low = "" if self.at_least is None else f">= {self.at_least:g}"
        high = "" if self.at_most is None else f"<= {self.at_most:g}"
        return ", ".join(filter(None, (low, high)))


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder, and the figures that count of what it prints."""

    name: str
    command: tuple[str, ...]
    seconds: float
    """After so many seconds it is ended and counts as failed."""
    figures: tuple[Figure, ...]


def read_benchmarks(path: Path = HERE / "bench.toml") -> list[Benchmark]:
    """Return the benchmarks that are listed in a file."""
    listed = tomllib.loads(path.read_text(encoding="utf-8"))["benchmark"]
    return [
        Benchmark(
            one["name"],
            tuple(one["command"]),
            one["seconds"],
            tuple(Figure(**figure) for figure in one["figures"]),
        )
        for one in listed
    ]


def describe_machine() -> dict[str, Any]:
    """Return what figures depend on: processor, cores, memory, versions."""
    host = detect_host()
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else ())
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": host.cores,
        "memory": gib(host.memory),
        "system": f"{platform.system()} {platform.release()}",
        **software(),
    }


def measure(benchmark: Benchmark) -> dict[str, Any]:
    """Run a benchmark; what it printed last, with its seconds and the load before it.

    A benchmark that fails or takes too long gives `error`. It has a session of its own: processes
    of a training end their whole group once their parent is gone.
    """
    load, began = os.getloadavg()[0], time.monotonic()
    script, *words = benchmark.command
    facts: dict[str, Any] = {"load_before": round(load, 2)}
    with subprocess.Popen(
        [sys.executable, str(HERE / script), *words],
        cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=benchmark.seconds)
        except subprocess.TimeoutExpired:
            return {**facts, "error": f"took longer than {benchmark.seconds:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    facts["took_seconds"] = round(time.monotonic() - began, 1)
    lines = output.strip().splitlines()
    if process.returncode or not lines:
        return {**facts, "error": "\n".join(lines[-8:]) or f"exit code {process.returncode}"}
    try:
        return {**json.loads(lines[-1]), **facts}
    except ValueError:
        return {**facts, "error": f"the last line is no JSON: {lines[-1][:200]}"}


def rows(
    benchmarks: list[Benchmark], results: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield text, figure, target and verdict of each figure that was to be measured."""
    for benchmark in benchmarks:
        found = results.get(benchmark.name)
        if found is None:
            continue
        for figure in benchmark.figures:
            value = found.get(figure.key)
            if value is None:
                yield figure.text, "", figure.target(), "not measured"
                continue
            low, high = found.get(figure.interval or "") or (None, None)
            range_ = "" if low is None or high is None else f" [{_short(low)}, {_short(high)}]"
            verdict = {None: "", True: "met", False: "not met"}[figure.is_met(value)]
            yield figure.text, f"{_short(value)}{range_}", figure.target(), verdict


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def print_table(benchmarks: list[Benchmark], results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line for each figure."""
    table = Table("figure", "measured", "target", "", box=None)
    colours = {"not met": "red", "not measured": "yellow"}
    for row in rows(benchmarks, results):
        table.add_row(*row, style=colours.get(row[-1]))
    Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120).print(table)


def write_readme(
    benchmarks: list[Benchmark], record: Mapping[str, Any], path: Path = README
) -> None:
    """Write the table between the marks of README.md, with date and machine."""
    machine = record["machine"]
    packages = ("torch", "deepspeed", "diffusers", "snakemake")
    versions = ", ".join(
        f"{name} {machine[f'versions.{name}']}"
        for name in packages
        if f"versions.{name}" in machine
    )
    head = f"{record['date'][:10]}, {machine['cores']} cores of {machine['processor']}, {versions}."
    lines = [head, "", "| figure | measured | target | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(benchmarks, record["results"])]
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


def main() -> None:
    """Measure all or some, and print the table."""
    benchmarks = read_benchmarks()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [one.name for one in benchmarks]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, help="file of the figures")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    options = parser.parse_args()
    if options.readme and {*options.only} != {*names}:
        parser.error("--readme writes the whole table: leave --only out")
    chosen = [one for one in benchmarks if one.name in options.only]
    now = datetime.now(UTC)
    out = options.out or HERE.parent / "results" / "bench" / f"{now:%Y-%m-%d-%H%M}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "date": f"{now:%Y-%m-%dT%H:%MZ}", "commit": source_commit(),
        "machine": describe_machine(), "results": {},
    }  # fmt: skip
    for benchmark in chosen:
        print(f"{benchmark.name}: {' '.join(benchmark.command)}", flush=True)
        found = record["results"][benchmark.name] = measure(benchmark)
        print(f"  {found.get('error') or str(found['took_seconds']) + ' s'}", flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print_table(chosen, record["results"])
    print(f"figures  {out}")
    if options.readme:
        write_readme(chosen, record)
    if any(row[-1] == "not measured" for row in rows(chosen, record["results"])):
        sys.exit(1)


if __name__ == "__main__":
    main()
