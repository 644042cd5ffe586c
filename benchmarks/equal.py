"""Whether two commits make the same bits: sha256 of what the example makes, and of launch folders.

    python benchmarks/equal.py 577d1aa2 HEAD    # from the project's root, in its environment

For each commit the example is trained in a clone, by this environment's Python. One line for each
tensor file, sample and metrics file: its digest, its name. Metrics count without times and memory,
which no two runs share. Then ten golden launch folders of tests/golden, whose run.yaml counts
without values at their defaults: a new key changes nothing. The lines that differ between the first
commit and each other one are printed, and the exit code is 1 if there are any. A single commit
prints all its lines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCHES = (
    "causal_lm/torch", "causal_lm/zero3", "flux/zero3_offload", "qwen_image/zero3", "sd3/torch",
    "sd3/zero2_offload", "sdxl/torch", "sdxl/zero2_offload", "sdxl/zero3_nvme",
    "seq2seq_lm/zero2_offload",
)  # fmt: skip
MADE = (
    "*/base/**/*.safetensors", "*/*/weights/**/*.safetensors", "*/*/state/**/*.safetensors",
    "*/*/checkpoint/*.safetensors", "*/*/evaluation/samples/*.png", "*/*/evaluation/grid.png",
)  # fmt: skip
MEASURED = ("seconds", "bytes")
"""Endings of the metrics that no two runs share."""


def train(commit: str, folder: Path) -> None:
    """Train the example of a commit in a new clone."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "checkout", "--quiet", commit], cwd=folder, check=True)
    words = [sys.executable, "-m", "snakemake", "--cores", "all", "train"]
    variables = {**os.environ, "PYTHONPATH": str(folder / "workflow")}
    log = folder / "train.log"
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(words, cwd=folder, env=variables, stdout=stream, stderr=stream)
    if done.returncode:
        sys.exit(f"{commit}: the training failed\n{log.read_text(encoding='utf-8')[-4000:]}")


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each result by its name."""
    results = folder / "results"
    files = [path for pattern in MADE for path in results.glob(pattern)]
    files += [
        path
        for name in LAUNCHES
        for path in (folder / "tests/golden/launch" / name).rglob("*")
        if path.is_file()
    ]
    found = {
        str(path.relative_to(folder)): hashlib.sha256(content(path)).hexdigest() for path in files
    }
    for path in results.glob("*/*/metrics.json"):
        metrics = json.loads(path.read_text(encoding="utf-8"))
        kept = {name: value for name, value in metrics.items() if not name.endswith(MEASURED)}
        text = json.dumps(kept, sort_keys=True)
        found[str(path.relative_to(folder))] = hashlib.sha256(text.encode()).hexdigest()
    return dict(sorted(found.items()))


def content(path: Path) -> bytes:
    """Return the bytes of a file; of a run.yaml only the values that are not defaults."""
    if path.name != "run.yaml":
        return path.read_bytes()
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if "source: default}" not in line).encode()


def main() -> None:
    """Train, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="+", metavar="COMMIT")
    commits = parser.parse_args().commits
    made = {}
    with tempfile.TemporaryDirectory() as name:
        for commit in commits:
            train(commit, folder := Path(name, commit.replace("/", "-")))
            made[commit] = digests(folder)
    first, *others = commits
    if not others:
        print("\n".join(f"{digest}  {name}" for name, digest in made[first].items()))
    differ = 0
    for other in others:
        names = sorted(made[first].keys() | made[other].keys())
        moved = [name for name in names if made[first].get(name) != made[other].get(name)]
        differ += len(moved)
        for name in moved:
            print(f"{name}: {made[first].get(name)} -> {made[other].get(name)}")
        print(f"{first} and {other}: {len(names) - len(moved)} of {len(names)} files are equal")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
