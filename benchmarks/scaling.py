"""What a training costs by its samples and GPUs: the tables and plots of docs/scaling.md.

    python benchmarks/scaling.py            # from the project's root, in its environment
    python benchmarks/scaling.py --config config/cats.yaml --gpu "RTX 4090" --step-seconds 1.9 \
        --gpus-per-machine 4 --link 12e9 --network 1.2e9
    python benchmarks/scaling.py --write    # writes the tables and plots of the page

Memory, operations, transfers between host and GPU, and bytes on disks are the planner's. Seconds of
a micro batch, of a start and of encoding are those of measured/nvidia-h200.jsonl unless options
give others. What GPUs send one another is counted from the code of DeepSpeed 0.19 and DDP; rings
send it. See the page for each assumption.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from scaling_model import (
    ROOT,
    Model,
    default_assumptions,
    default_run,
)
from scaling_plots import plot
from scaling_tables import TABLES

from zerotrain.config.read import read_config
from zerotrain.config.stage_settings import PlannedRun
from zerotrain.launch.planner.gpus import read_gpu
from zerotrain.launch.planner.tracing import micro_batch, trace

PAGE = ROOT / "docs/scaling.md"


def marks(name: str) -> tuple[str, str]:
    """Return what encloses a table in the page."""
    return f"<!-- {name}: benchmarks/scaling.py -->\n", "\n<!-- end -->"


def in_page(text: str, name: str) -> list[str]:
    """Return the lines of a table in the page."""
    begin, end = marks(name)
    return text.partition(begin)[2].partition(end)[0].splitlines()


def write_page(model: Model) -> None:
    """Write the tables between their marks in the page, and the plots."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        begin, end = marks(name)
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = before + begin + "\n".join(table(model)) + end + after
    PAGE.write_text(text, encoding="utf-8")
    plot(model)


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="a run's configuration; default: SDXL")
    parser.add_argument("--phase", help="one of its phases; default: the first")
    parser.add_argument("--gpu", help="as 'RTX 4090'; default: H200")
    parser.add_argument("--step-seconds", type=float, help="of a micro batch on one GPU")
    parser.add_argument("--gpus-per-machine", type=int)
    parser.add_argument("--link", type=float, help="bytes/s of a GPU within its machine")
    parser.add_argument("--network", type=float, help="bytes/s of a machine to the others")
    parser.add_argument("--disk", type=float, help="bytes/s of the shared folder")
    parser.add_argument("--host-memory", type=float, help="bytes/s of a machine's memory")
    parser.add_argument("--images-per-second", type=float, help="encoded by one GPU")
    parser.add_argument("--failure-hours", type=float, help="GPU-hours between two failures")
    parser.add_argument("--write", action="store_true", help="write the page and its plots")
    options = parser.parse_args()
    names = ("gpus_per_machine", "link", "network", "disk", "host_memory", "images_per_second",
             "failure_hours")  # fmt: skip
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    given = replace(default_assumptions(), **values)
    if options.gpu or options.config or options.step_seconds:
        gpu = read_gpu(options.gpu) if options.gpu else given.gpu
        given = replace(given, gpu=gpu, compute=options.step_seconds)
    run: PlannedRun = read_config(options.config) if options.config else default_run()
    phase = run.phase(options.phase or run.phases[0].name)
    if run.is_text:
        parser.error("--config: a run of images is needed: encoding is a part of the tables")
    model = Model(run, phase, trace(run, phase, None), given)
    if options.write:
        write_page(model)
        return
    print(f"{run.family} {run.base}, micro batch {micro_batch(phase)}, {given.gpu.name}")
    for name, table in TABLES.items():
        if name == "planned" and options.config:
            continue
        print("", name, *table(model), sep="\n")


if __name__ == "__main__":
    main()
