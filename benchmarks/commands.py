"""How long commands take that have nothing to do, against the least that could take their place.

    python benchmarks/commands.py [--rounds 5]    # from the project's root, in its environment

Works on a copy of the project, in which a tiny language model is trained in two phases. In turns:

    help      `zerotrain --help`
    program   `--help` of a typer program of one command
    dry_run   `snakemake -n train` with nothing to do
    one_rule  `snakemake -n` with nothing to do, of a Snakefile of one rule
    repro     `dvc repro` with nothing to do

`help_ratio` and `dry_run_ratio` are medians of the rounds' ratios, with the interval that holds the
true one with 95 %. The first two are short, and take HELP_ROUNDS times as many rounds. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from families import config
from step import middle

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = (
    "import typer\napp = typer.Typer()\n\n\n@app.command()\ndef main():\n    pass\n\n\napp()\n"
)
HELP_ROUNDS = 9
ONE_RULE = "rule all:\n    output: 'done'\n    shell: 'touch {output}'\n"


def call(folder: Path, *words: object) -> str:
    """Run a command in a folder; return its output."""
    environment = {
        **os.environ, "PYTHONPATH": str(folder / "workflow"), "HOME": str(folder.parent),
        "GIT_AUTHOR_NAME": "x", "GIT_AUTHOR_EMAIL": "x@x",
        "GIT_COMMITTER_NAME": "x", "GIT_COMMITTER_EMAIL": "x@x",
    }  # fmt: skip
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{words}\n{done.stdout[-4000:]}")
    return done.stdout


def train(project: Path) -> None:
    """Make a copy of the project with a trained run that DVC knows."""
    ignored = shutil.ignore_patterns(".git", ".venv", "results", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, project, ignore=ignored)
    # dvc.yaml is about this file.
    (project / "config/config.yaml").write_text(json.dumps(config("causal_lm")))
    call(project, "git", "init", "-q")
    call(project, "git", "add", "-A")
    call(project, "git", "commit", "-qm", "A copy")
    call(project, "zerotrain", "dvc", "generate")
    call(project, "snakemake", "--cores", "all", "train")


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        project, one_rule = Path(name) / "project", Path(name) / "one_rule"
        train(project)
        one_rule.mkdir()
        (one_rule / "Snakefile").write_text(ONE_RULE)
        (one_rule / "program.py").write_text(PROGRAM)
        call(one_rule, "snakemake", "--cores", "1")
        arms: dict[str, tuple[Path, tuple[object, ...]]] = {
            "help": (project, ("zerotrain", "--help")),
            "program": (one_rule, (sys.executable, "program.py", "--help")),
            "dry_run": (project, ("snakemake", "--cores", "1", "-n", "train")),
            "one_rule": (one_rule, ("snakemake", "--cores", "1", "-n")),
            "repro": (project, ("dvc", "repro")),
        }
        took: dict[str, list[float]] = {arm: [] for arm in arms}
        for pair, times in (
            (("help", "program"), HELP_ROUNDS),
            (("dry_run", "one_rule", "repro"), 1),
        ):
            for number in range(times * rounds + 1):
                for arm in pair:
                    folder, words = arms[arm]
                    began = time.perf_counter()
                    call(folder, *words)
                    if number:  # the first round fills the page cache
                        took[arm].append(time.perf_counter() - began)
    result: dict[str, Any] = {}
    for ours, theirs in (("help", "program"), ("dry_run", "one_rule")):
        pairs = zip(took[ours], took[theirs], strict=True)
        ratio, result[f"{ours}_interval"] = middle([a / b for a, b in pairs])
        result[f"{ours}_ratio"] = round(ratio, 3)
    medians = {f"{arm}_seconds": round(statistics.median(all_), 3) for arm, all_ in took.items()}
    print(json.dumps({**result, **medians, "rounds": rounds}))


if __name__ == "__main__":
    main()
