"""Stands in for the zerotrain command: it makes a stage's outputs from its arguments and inputs.

Equal arguments and inputs give equal bytes, different ones different bytes. Each call is noted in
calls.txt. FAIL names a stage that ends with an error before it has written anything, STOP one that
is stopped on request, with a checkpoint in its progress.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

OUTPUTS = {
    "export_weights": ("weights", "state"),
    "import_checkpoint": ("state",),
    "evaluate": ("output", "metrics"),
}


def split(words):
    """Options by name, and the other words."""
    options, others, left = {}, [], iter(words)
    for word in left:
        if word.startswith("--"):
            options[word[2:]] = next(left)
        else:
            others.append(word)
    return options, others


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main():
    options, others = split(sys.argv[1:])
    stage, *folders = others
    with Path("calls.txt").open("a") as calls:
        calls.write(f"{stage}\n")
    with Path(options.pop("log")).open("a") as log:
        log.write(f"{stage} {sys.argv}\n")
    if os.environ.get("FAIL") == stage:
        sys.exit(f"{stage}: failed on request")
    if os.environ.get("STOP") == stage:
        saved = Path(options["progress"]) / "step-00000100"
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
        print("plain: unfinished: stopped on request at step 100 of 300", file=sys.stderr)
        sys.exit(85)
    written = {name: Path(options[name]) for name in OUTPUTS.get(stage, ("output",))}
    read = [Path(value) for name, value in options.items() if name not in written]
    read += [Path(folder) / "metrics.json" for folder in folders]
    if stage == "prepare_dataset":
        read += sorted(Path("photos").glob("*"))
    content = {
        "arguments": sys.argv[1:],
        "inputs": {str(path): sha256(path) for path in read if path.is_file()},
    }
    for name, path in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        manifest = {
            "format": 1, "kind": path.parent.name, "content": {"output": name, **content},
            "files": {}, "parents": {}, "made_by": {},
        }  # fmt: skip
        path.write_text(json.dumps(manifest, indent=1))
        if stage != "prepare_dataset" and name != "metrics":
            (path.parent / "payload.bin").write_bytes(bytes.fromhex(sha256(path)))


main()
