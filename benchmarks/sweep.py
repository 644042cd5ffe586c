"""A sweep of 200 runs planned by `snakemake -n`, resources of every job printed.

    python benchmarks/sweep.py             # from the project's root, in its environment

The runs are config/config.yaml with one phase and learning rates of their own. They are planned
without stored forecasts once, then several times with them; what each job asks for is compared with
what the planner says. The last line is JSON: seconds, the median and the interval.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from zerotrain.config import read_config
from zerotrain.plan.forecast import machine_memory
from zerotrain.sweep import sweep

RUNS = 200
REPEATS = 5
GOAL_SECONDS = 5.0
COPIED = ("Snakefile", "rules", "config", "profiles", "envs", "workflow/zerotrain", "data")
ASKED = ["--default-resources", "mem_mb=1000", "disk_mb=1000"]
JOB = re.compile(r"^rule (\w+):.*?^    resources: ([^\n]*)", re.MULTILINE | re.DOTALL)


def make_runs(folder: Path) -> None:
    """A copy of the project with the sweep's configurations."""
    for name in COPIED:
        source = Path(name)
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, folder / name)
    text = (folder / "config/config.yaml").read_text()
    second = text[text.index("  - name: offload") : text.index("evaluate:")]
    one = folder / "one.yaml"
    one.write_text(text.replace(second, "\n"))
    rates = ",".join(f"{1e-4 + number * 1e-6:.7f}" for number in range(RUNS))
    sweep(one, [f"train.learning_rate={rates}"], folder / "config/lr")


def planned(folder: Path) -> tuple[float, str]:
    """Seconds of a dry run, and what it printed."""
    command = ["snakemake", "-n", "train", "--configfile", "config/lr.yaml", *ASKED]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def mismatches(folder: Path, said: str) -> tuple[int, int]:
    """Jobs whose memory the planner tells, and those of them that ask for another."""
    run = read_config(folder / "one.yaml")
    wanted = machine_memory(run, run.phases[0].name)
    jobs = [(rule, text) for rule, text in JOB.findall(said) if rule in wanted]
    wrong = [
        rule for rule, text in jobs if f"mem_mb={-(-wanted[rule] // 2**20)}," not in f"{text},"
    ]
    return len(jobs), len(wrong)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_runs(folder)
        first, said = planned(folder)
        times = [planned(folder)[0] for _ in range(REPEATS)]
        jobs, wrong = mismatches(folder, said)
    median = statistics.median(times)
    print(f"{RUNS} runs, {len(JOB.findall(said))} jobs printed; goal {GOAL_SECONDS} s")
    print(f"without stored forecasts {first:.2f} s, with them {median:.2f} s")
    print(f"memory of {jobs} jobs compared with the planner's: {wrong} differ")
    print(
        json.dumps(
            {
                "plan_seconds": round(median, 2),
                "interval": [round(min(times), 2), round(max(times), 2)],
                "first_seconds": round(first, 2),
                "runs": RUNS,
                "jobs_compared": jobs,
                "jobs_that_differ": wrong,
            }
        )
    )


if __name__ == "__main__":
    main()
