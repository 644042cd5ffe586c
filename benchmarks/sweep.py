"""A sweep of 200 runs planned by `snakemake -n`, resources of every job printed.

    python benchmarks/sweep.py             # from the project's root, in its environment

The runs are config/config.yaml with one phase and learning rates of their own. They are planned
without stored forecasts once, then several times with them; what each job asks for is compared with
what the planner says. Then every output is made of small files, and the plan's look for damaged
folders is timed alone. The last line is JSON: seconds, the median and the interval, and the look's
share of a plan.
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
from types import SimpleNamespace

from zerotrain.artifact import MANIFEST, write_json
from zerotrain.config.read import read_config
from zerotrain.launch.planner.forecast import machine_memory
from zerotrain.pipeline.rebuild import find_damaged
from zerotrain.pipeline.sweep import sweep

RUNS = 200
REPEATS = 5
GOAL_SECONDS = 5.0
COPIED = ("Snakefile", "rules", "config", "profiles", "envs", "workflow/zerotrain", "data")
ASKED = ["--default-resources", "mem_mb=1000", "disk_mb=1000"]
FILES = 10
"""In each folder: launch has 3, weights of SDXL 20."""
OUTPUTS = re.compile(r"^rule (\w+):.*?^    output: ([^\n]*)", re.MULTILINE | re.DOTALL)
JOB = re.compile(r"^rule (\w+):.*?^    resources: ([^\n]*)", re.MULTILINE | re.DOTALL)


def make_runs(folder: Path) -> None:
    """Make a copy of the project with the sweep's configurations."""
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


def planned(folder: Path, *words: str) -> tuple[float, str]:
    """Seconds of a dry run, and what it printed."""
    command = ["snakemake", "-n", "train", "--configfile", "config/lr.yaml", *ASKED, *words]
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


def made_outputs(folder: Path, said: str) -> list[SimpleNamespace]:
    """Make every planned folder of FILES small files, whose content no look reads; its jobs."""
    jobs = []
    for rule, outputs in OUTPUTS.findall(said):
        paths = [folder / output for output in outputs.split(", ")]
        named = [str(path) for path in paths]
        jobs.append(SimpleNamespace(rule=SimpleNamespace(name=rule), output=named))
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            files = {}
            for number in range(FILES):
                (path.parent / f"{number}.bin").write_bytes(b"x")
                files[f"{number}.bin"] = {"sha256": "0" * 64, "bytes": 1}
            if path.name == MANIFEST:
                write_json(path, {"content": {}, "files": files, "parents": {}, "made_by": {}})
    return jobs


def look_seconds(jobs: list[SimpleNamespace]) -> float:
    """Seconds in which no damage is found."""
    start = time.perf_counter()
    assert not find_damaged(jobs)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_runs(folder)
        first, _ = planned(folder)
        said = planned(folder, "--verbose")[1]
        times = [planned(folder)[0] for _ in range(REPEATS)]
        jobs, wrong = mismatches(folder, said)
        made = made_outputs(folder, said)
        looks = [look_seconds(made) for _ in range(REPEATS)]
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
                "look_seconds": round(statistics.median(looks), 3),
                "look_ratio": round(statistics.median(looks) / median, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
