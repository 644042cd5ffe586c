"""Stands in for the zerotrain command: it makes a stage's outputs from its arguments and inputs.

Equal arguments, inputs, sources and values of the configuration give equal bytes, different ones
different bytes. Each call is noted in calls.txt. FAIL names a stage that ends with an error before
it has written anything, HANG one that then waits to be killed, STOP one that is stopped on request,
with a checkpoint in its progress.
"""

import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path

version = "python{}.{}".format(*sys.version_info)
sys.path.append(str(Path(sys.executable).parents[1] / "lib" / version / "site-packages"))

import yaml  # noqa: E402  the path is there only now: the interpreter starts without its own

OUTPUTS = {
    "export_weights": ("weights", "state"),
    "import_checkpoint": ("state",),
    "evaluate": ("output", "metrics"),
}
KEYS = {
    "prepare_dataset": ("data",),
    "build_base": ("base", "seed"),
    "cache_latents": ("cache",),
    "render_launch": ("seed", "train", "launch", "phases"),
    "export_weights": ("export",),
    "evaluate": ("evaluate", "seed"),
}
"""Sections of the configuration that each stage reads."""


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


def sections(text, phase):
    """The configuration's sections; of the phases those up to one."""
    found = yaml.load(text, yaml.CSafeLoader)
    names = [one["name"] for one in found["phases"]]
    count = names.index(phase) + 1 if phase in names else 1
    return found | {"phases": found["phases"][:count]}


def version(stage):
    """The version of a stage in this copy of the project."""
    text = Path("workflow/zerotrain/artifact/stage_versions.py").read_text(encoding="utf-8")
    return int(re.search(rf'"{stage}": (\d+)', text)[1])


def record_files(data, output):
    """Write the listing of the dataset's files, as the stage does."""
    sys.path.append("workflow")
    from zerotrain.config.data import DataConfig
    from zerotrain.data.files import DatasetFiles

    DatasetFiles(DataConfig(**data), output.parent).record({})


def parent(folder):
    """How a manifest names the dataset of a base."""
    found = json.loads((folder / "manifest.json").read_text())
    known = {name: found[name] for name in ("kind", "content", "files")}
    text = json.dumps(known, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {"path": str(folder), "identity": hashlib.sha256(text.encode()).hexdigest()}


def listed(path, content):
    """A file of the folder, written, and how its manifest lists it."""
    path.write_text(json.dumps(content))
    return {path.name: {"sha256": sha256(path), "bytes": path.stat().st_size}}


def samples():
    """The images of the folder with their captions, as a dataset lists them."""
    found = []
    for image in sorted(Path("photos").glob("*.png")):
        text = image.with_suffix(".txt")
        caption = text.read_text().strip() if text.exists() else ""
        of_caption = hashlib.sha256(caption.encode()).hexdigest()
        found.append({
            "file": image.name, "image_sha256": sha256(image), "caption": caption,
            "caption_sha256": of_caption, "original_size": [8, 8], "size": [8, 8],
            "crop": [0, 0, 8], "split": "train",
        })  # fmt: skip
    return found


def main():
    options, others = split(sys.argv[1:])
    stage, *folders = others
    written = {name: Path(options[name]) for name in OUTPUTS.get(stage, ("output",))}
    with Path("calls.txt").open("a", encoding="utf-8") as calls:
        calls.write(f"{stage} {next(iter(written.values()))}\n")
    with Path(options.pop("log")).open("a", encoding="utf-8") as log:
        log.write(f"{stage} {sys.argv}\n")
    if os.environ.get("FAIL") == stage:
        sys.exit(f"{stage}: failed on request")
    if os.environ.get("STOP") == stage:
        saved = Path(options["progress"]) / "step-00000100"
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
        print("plain: unfinished: stopped on request at step 100 of 300", file=sys.stderr)
        sys.exit(85)
    read = [Path(value) for name, value in options.items() if name not in {*written, "config"}]
    read += [Path(folder) / "metrics.json" for folder in folders]
    if stage == "prepare_dataset":
        read += sorted(Path("photos").glob("*"))
        record_files(
            sections(Path(options["config"]).read_text(encoding="utf-8"), None)["data"],
            written["output"],
        )
    if os.environ.get("HANG") == stage:
        time.sleep(120)
    if "progress" in options:
        saved = Path(options["progress"]) / "step-00000300" / "tensors.bin"
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_bytes(Path(options["launch"]).read_bytes())
    chosen = {}
    if stage in KEYS and "config" in options:
        found = sections(Path(options["config"]).read_text(encoding="utf-8"), options.get("phase"))
        chosen = {key: found.get(key) for key in KEYS[stage]}
    # A raised version of these has nothing made again.
    kept = stage in ("train_phase", "export_weights", "cache_latents")
    content = {
        "arguments": sys.argv[1:],
        "config": chosen,
        "version": 0 if kept else version(stage),
        "inputs": {str(path): sha256(path) for path in read if path.is_file()},
    }
    if stage == "prepare_dataset":
        content |= {"samples": samples(), "repeats": 1}
    editing, *edit = os.environ.get("EDIT", "").split("|")
    if editing == stage:
        path, old, new = Path(edit[0]), *edit[1:]
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(old, new) if old else text + new, encoding="utf-8")
    for name, path in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        files = {}
        if stage == "train_phase":
            launched = json.loads(Path(options["launch"]).read_text(encoding="utf-8"))["content"][
                "config"
            ]
            end = {"step": launched["phases"][-1]["until"]}
            files = listed(path.with_name("checkpoint.json"), end)
            (path.parent / "records").mkdir(exist_ok=True)
            made_by = path.parent / "records/made_by.json"
            made_by.write_text(json.dumps({"version": version(stage)}))
        if stage == "export_weights":
            end = json.loads(Path(options["checkpoint"]).with_name("checkpoint.json").read_text())
            files = listed(path.with_name("state.json"), end)
            content |= end
        if stage != "prepare_dataset" and name != "metrics":
            payload = hashlib.sha256(json.dumps([name, content]).encode())
            (path.parent / "payload.bin").write_bytes(payload.digest())
            of_payload = sha256(path.parent / "payload.bin")
            files["payload.bin"] = {"sha256": of_payload, "bytes": payload.digest_size}
        if stage == "prepare_dataset":  # DVC stores it
            (path.parent / "samples").mkdir(exist_ok=True)
        kind = "dataset" if stage == "prepare_dataset" else path.parent.name
        parents = {}
        if stage == "build_base" and "dataset" in options:
            parents["dataset"] = parent(Path(options["dataset"]).parent)
        manifest = {
            "format": 1, "kind": kind, "content": {"output": name, **content},
            "files": files, "parents": parents, "made_by": {},
        }  # fmt: skip
        path.write_text(json.dumps(manifest, indent=1))


main()
