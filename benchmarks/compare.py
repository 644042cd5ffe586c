"""What became slower or larger between two files of bench.py.

    python benchmarks/compare.py EARLIER.json LATER.json

A figure with an interval is worse if its interval excludes the earlier figure, on the side that is
away from the target; without one, if it differs by more than 10 %. Exit code 1 if any is worse.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import Benchmark, Figure, read_benchmarks

TOLERANCE = 0.1
"""Of a figure without an interval."""


def changes(
    benchmarks: list[Benchmark], earlier: Mapping[str, Any], later: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield `worse` or `better` for each figure that moved, and a sentence.

    Args:
        benchmarks: What was measured.
        earlier: Results of a file, by benchmark.
        later: Those of the other.
    """
    for benchmark in benchmarks:
        before, after = (found.get(benchmark.name, {}) for found in (earlier, later))
        for figure in benchmark.figures:
            if figure.key not in before or figure.key not in after:
                continue
            if (moved := _moved(figure, before, after)) is not None:
                values = f"{before[figure.key]:.4g} -> {after[figure.key]:.4g}"
                yield moved, f"{benchmark.name}: {figure.text}: {values}"


def _moved(figure: Figure, before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return whether a figure became better or worse; None if it did not move."""
    old, new = before[figure.key], after[figure.key]
    reach = TOLERANCE * abs(new)
    low, high = after.get(figure.interval or "") or (new - reach, new + reach)
    if low <= old <= high:
        return None
    if figure.at_least is not None and figure.at_most is not None:  # a ratio that is to be 1
        return "worse" if abs(new - 1) > abs(old - 1) else "better"
    larger_is_better = figure.at_least is not None
    return "better" if (new > old) == larger_is_better else "worse"


def main() -> None:
    """Print what moved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("earlier", type=Path)
    parser.add_argument("later", type=Path)
    options = parser.parse_args()
    files = [
        json.loads(path.read_text(encoding="utf-8")) for path in (options.earlier, options.later)
    ]
    machines = [file["machine"] for file in files]
    for name in sorted(machines[0].keys() | machines[1].keys()):
        old, new = (machine.get(name) for machine in machines)
        if old != new:
            print(f"machine: {name}: {old} -> {new}")
    found = list(changes(read_benchmarks(), *(file["results"] for file in files)))
    for verdict, text in found:
        print(f"{verdict}: {text}")
    if not found:
        print("no figure moved beyond its interval")
    sys.exit(any(verdict == "worse" for verdict, _ in found))


if __name__ == "__main__":
    main()
