"""Whether checkpoints of other programs continue here as they do there, layout by layout.

    python benchmarks/external_checkpoints.py                 # all, from the project's root
    python benchmarks/external_checkpoints.py accelerate      # rows whose name has this word
    python benchmarks/external_checkpoints.py --write         # puts the rows into the docs

Each program of benchmarks/external_programs trains 5 steps on a CPU in fp32, saves with its own
library, and trains 5 more. Its checkpoint is imported, and our own training does the 5 steps that
follow. Compared are the imported tensors, bit by bit, and after the steps weights, moments and
losses. A deviation is the norm of the difference over the norm of the values, of all parameters
together; of losses the largest of the five. Prints a table and, last, a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "external-checkpoints.md"
BEGIN, END = "<!-- external checkpoints: generated -->", "<!-- external checkpoints: end -->"
BOUND = 1e-6
IMAGE_SIDE, IMAGE_COUNT = 32, 16
COLUMNS = (
    "layout",
    "weights",
    "moments",
    "step",
    "groups",
    "master",
    "exp_avg",
    "exp_avg_sq",
    "loss",
)


@dataclass(frozen=True)
class Measured:
    """One row: what came over exactly, and how far apart both are five steps later."""

    weights: bool
    moments: bool | None
    """None: the checkpoint has none."""
    step: bool
    groups: str
    apart: Mapping[str, float]
    """Largest relative deviation of master, exp_avg, exp_avg_sq and loss."""

    @property
    def worst(self) -> float:
        """The largest deviation."""
        return max(self.apart.values())

    def row(self, name: str) -> str:
        """Return the row of the table."""
        words = {True: "yes", False: "**no**", None: "none"}
        flags = [words[flag] for flag in (self.weights, self.moments, self.step)]
        figures = [f"{value:.1e}" if value else "0" for value in self.apart.values()]
        return f"| {' | '.join([name, *flags, self.groups, *figures])} |"


class Inputs:
    """Base, cache and dataset of each family, made by the stages when they are asked for."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def folder(self, family: str) -> Path:
        """Return the folder with `dataset`, `base` and `cache`."""
        from zerotrain.config.stage_settings import BuildSettings, CacheSettings
        from zerotrain.models.families import autoencoders
        from zerotrain.stages.build_base import build_base
        from zerotrain.stages.cache_latents import cache_latents
        from zerotrain.stages.prepare_dataset import prepare_dataset

        folder = self._place / family
        if not folder.exists():
            folder.mkdir()
            if family == "sdxl":
                _write_images(folder / "images")
            config = run_config(folder, family)
            autoencoders.VAE_STEPS = 3
            prepare_dataset(config.data, folder / "dataset")
            build_base(BuildSettings.of(config), folder / "dataset", folder / "base")
            size = config.cache_size(config.phases[0])
            settings = CacheSettings.of(config)
            cache_latents(settings, size, folder / "dataset", folder / "base", folder / "cache")
        return folder


def _write_images(folder: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir()
    digits = load_digits()
    pairs = zip(digits.images[:IMAGE_COUNT], digits.target, strict=False)
    for number, (scan, digit) in enumerate(pairs):
        image = Image.fromarray((scan * 15).astype("uint8")).resize((IMAGE_SIDE, IMAGE_SIDE))
        image.convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a handwritten {digit}")


def run_config(
    folder: Path, family: str, program: Any = None, checkpoint: Path | None = None
) -> Any:
    """Our run: the common values, and the program's own."""
    from external_programs import BATCH, BETAS, CLIP, DECAY, EPSILON, LAST_STEP, RATE

    from zerotrain.config.read import parse_config

    own = dict(program.config) if program else {}
    text = family.endswith("_lm")
    raw: dict[str, Any] = {
        "run": "continued",
        "family": family,
        "base": "nano",
        "data": {"source": "sums", "holdout": 0.1} if text else {"images": str(folder / "images")},
        "train": {
            **({"max_length": 32} if text else {"resolution": IMAGE_SIDE}),
            "global_batch_size": BATCH, "learning_rate": RATE, "lr_scheduler": "constant",
            "lr_warmup_steps": 0, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1],
            "adam_epsilon": EPSILON, "adam_weight_decay": DECAY, "max_grad_norm": CLIP,
            "save_every": LAST_STEP, "log_every": 1, **own.pop("train", {}),
        },
        "launch": {"num_cpu_threads_per_process": 1},
        "phases": [
            {
                "name": "on", "until": LAST_STEP, "allow": own.pop("allow", []),
                "launch": program.preset if program else "torch",
            }
        ],
        **own,
    }  # fmt: skip
    if checkpoint is not None:
        options = program.resume
        folder_of = str(checkpoint)
        raw["resume_from_checkpoint"] = {"folder": folder_of, **options} if options else folder_of
    return parse_config(raw, program.name if program else family)


def render(config: Any, inputs: Path, start: Path | None, output: Path) -> Path:
    """Return the launch folder of our phase."""
    from zerotrain.config.stage_settings import LaunchSettings
    from zerotrain.stages.render_launch import render_launch

    preset = ROOT / "config" / "launch" / f"{config.phases[0].launch.preset}.yaml"
    cache = inputs / "cache" if config.is_text else None
    settings = LaunchSettings.of(config, "on")
    render_launch(settings, inputs / "dataset", preset, inputs / "base", start, output, cache)
    return output


def run_program(program: Any, inputs: Path, place: Path) -> Path:
    """Run a program to its end; the folder it wrote into."""
    place.mkdir(parents=True)
    out = place / "there"
    out.mkdir()
    launch = render(run_config(inputs, program.family, program), inputs, None, place / "launch0")
    job = place / "job.json"
    paths = {"base": inputs / "base", "cache": inputs / "cache", "launch": launch, "out": out}
    values = {**{key: str(path) for key, path in paths.items()}, "options": dict(program.options)}
    job.write_text(json.dumps(values))
    starter = [sys.executable]
    if program.processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        starter += ["-m", "torch.distributed.run", "--nproc-per-node", str(program.processes)]
        starter += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    module = ["-m", f"external_programs.{program.module}", str(job)]
    _run([*starter, *module], place / "there.log", program.environment)
    return out


def continue_here(program: Any, inputs: Path, place: Path, out: Path) -> tuple[Path, Path, str]:
    """Import the program's checkpoint and train on: state, checkpoint, what the import said."""
    from zerotrain.config.stage_settings import ImportSettings
    from zerotrain.stages.import_checkpoint import import_checkpoint

    checkpoint = out / program.checkpoint
    config = run_config(inputs, program.family, program, checkpoint)
    state = place / "state"
    with redirect_stderr(StringIO()) as said:
        import_checkpoint(ImportSettings.of(config), checkpoint, inputs / "base", state)
    launch = render(config, inputs, state, place / "launch")
    words = {
        "launch": launch, "base": inputs / "base", "cache": inputs / "cache", "start": state,
        "progress": place / "progress", "output": place / "checkpoint",
    }  # fmt: skip
    options = [word for key, path in words.items() for word in (f"--{key}", str(path))]
    command = [sys.executable, "-m", "zerotrain", "train_phase", *options]
    _run(command, place / "here.log", {})
    return state, place / "checkpoint", said.getvalue()


def _run(command: list[str], log: Path, environment: Mapping[str, str]) -> None:
    places = os.pathsep.join(str(ROOT / name) for name in ("benchmarks", "workflow"))
    variables = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", **environment}
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(command, env=variables, stdout=stream, stderr=stream, check=False)
    if done.returncode:
        end = log.read_text(encoding="utf-8")[-6000:]
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{end}")


def measure(program: Any, inputs: Path, place: Path) -> Measured:
    """Run a program, continue it here, and compare."""
    import torch
    from external_programs import LAST_STEP, SAVED_STEP

    from zerotrain.state.checkpoint import Checkpoint
    from zerotrain.state.position import ADAM_SLOTS, MASTER
    from zerotrain.state.state import State

    out = run_program(program, inputs, place)
    state_folder, checkpoint_folder, said = continue_here(program, inputs, place, out)
    recorded = torch.load(out / "recorded.pt")
    there = {int(step): held for step, held in recorded["held"].items()}
    state, ours = State(state_folder), Checkpoint(checkpoint_folder)
    names = set(there[SAVED_STEP])
    if names != set(state.names) or names != set(ours.names):
        sys.exit(f"{program.name}: other parameters here than there: {names ^ set(state.names)}")

    def same(slot: str) -> bool:
        held = there[SAVED_STEP]
        return slot in state.slots and all(
            torch.equal(state.tensor(name, slot), held[name][slot]) for name in names
        )

    def apart(slot: str) -> float:
        expected = {name: there[LAST_STEP][name][slot].double() for name in names}
        differences = [ours.tensor(name, slot) - expected[name] for name in names]
        return _norm(differences) / _norm(expected.values())

    log = (place / "progress" / "metrics.jsonl").read_text().splitlines()
    losses = {line["step"]: line["loss"] for line in map(json.loads, log) if "loss" in line}
    loss = max(
        abs(losses[step + 1] - recorded["losses"][step]) / abs(recorded["losses"][step])
        for step in range(SAVED_STEP, LAST_STEP)
    )
    position = state.position
    if said:
        print(f"  {program.name}: {said.strip()}", file=sys.stderr)
    counted = 0 if program.without_moments else SAVED_STEP
    return Measured(
        weights=same(MASTER),
        moments=None if program.without_moments else all(same(slot) for slot in ADAM_SLOTS),
        step=(position.step, position.optimizer_step) == (SAVED_STEP, counted),
        groups=str(len(position.param_groups) or "none"),
        apart={**{slot: apart(slot) for slot in (MASTER, *ADAM_SLOTS)}, "loss": loss},
    )


def _norm(tensors: Iterable[Any]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def table(rows: Iterable[str]) -> str:
    """Return the table in Markdown."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*head, *rows]) + "\n"


def rows_of(page: str) -> dict[str, list[str]]:
    """Return the cells of a page's table by the name of their row."""
    text = page.partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip("| ").split(" | ") for line in text.strip().splitlines()[2:]]
    return {name: cells for name, *cells in lines}


def write(page: Path, measured: Mapping[str, Measured], names: Iterable[str]) -> None:
    """Put rows into a page's table; those of other programs stay, those of none go."""
    text = page.read_text(encoding="utf-8")
    rows = {name: f"| {' | '.join([name, *cells])} |" for name, cells in rows_of(text).items()}
    rows |= {name: found.row(name) for name, found in measured.items()}
    before, _, rest = text.partition(BEGIN)
    found = table(rows[name] for name in names if name in rows)
    page.write_text(f"{before}{BEGIN}\n{found}{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> None:
    """Measure the programs and print the table."""
    from external_programs import all_programs

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="rows whose name has one of these")
    parser.add_argument("--write", action="store_true", help=f"put the rows into {PAGE.name}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all files there")
    arguments = parser.parse_args()
    chosen = [
        program
        for program in all_programs()
        if not arguments.words or any(word in program.name for word in arguments.words)
    ]
    measured: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as temporary:
        place = arguments.keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        inputs = Inputs(place)
        for number, program in enumerate(chosen):
            folder = place / f"program-{number:02}"
            measured[program.name] = measure(program, inputs.folder(program.family), folder)
            print(measured[program.name].row(program.name), file=sys.stderr, flush=True)
    print(table(found.row(name) for name, found in measured.items()))
    if arguments.write:
        write(PAGE, measured, [program.name for program in all_programs()])
    worst = max(found.worst for found in measured.values())
    facts = {"layouts": len(measured), "bound": BOUND, "largest_deviation": worst}
    rows = {name: dict(found.apart) for name, found in measured.items()}
    print(json.dumps({**facts, "deviation_ratio": worst / BOUND, "deviations": rows}))
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
