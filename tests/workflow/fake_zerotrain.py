"""Stands in for the zerotrain command: its command line, settings, recipes and launch files are the
real ones, and in place of each other stage a fake publishes small folders.

Equal settings and inputs give equal bytes, different ones different bytes. Each stage that makes
something is noted in calls.txt; one whose folders are current makes nothing. The environment says
what happens besides: FAIL names a stage that ends with an error before it has written anything,
HANG one that then waits to be killed, STOP one that is stopped on request, with a checkpoint in its
progress. EDIT is `stage|file|old|new`, an edit while the stage runs, and DIGESTS the size of each
payload.bin in units of 32 bytes.
"""

import hashlib
import json
import os
import sys
import time
import types
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact.leftovers import remove_manifest
from zerotrain.artifact.recipe import Recipe
from zerotrain.artifact.stage_versions import VERSIONS

KEPT = ("train_phase", "export_weights", "cache_latents")
"""Stages of which another version makes the same here."""


def begin(stage, output):
    """Note the call; then fail, hang or edit, as the environment says."""
    with Path("calls.txt").open("a", encoding="utf-8") as calls:
        calls.write(f"{stage} {output / 'manifest.json'}\n")
    if os.environ.get("FAIL") == stage:
        sys.exit(f"{stage}: failed on request")
    if os.environ.get("HANG") == stage:
        time.sleep(120)
    editing, *edit = os.environ.get("EDIT", "").split("|")
    if editing == stage:
        path, old, new = Path(edit[0]), *edit[1:]
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(old, new) if old else text + new, encoding="utf-8")


def made_of(recipe, name=""):
    """A digest of all that a folder is made of."""
    version = 0 if recipe.stage in KEPT else recipe.version
    return artifact.digest([name, recipe.stage, version, recipe.settings, recipe.inputs])


def publish(folder, kind, recipe, files=None, parents=None, **content):
    """Publish a folder with a payload and further files."""
    with artifact.publish(folder, kind, recipe=recipe, parents=parents) as draft:
        payload = bytes.fromhex(made_of(recipe, kind)) * int(os.environ.get("DIGESTS", "1"))
        for name, data in {"payload.bin": payload, **(files or {})}.items():
            path = draft.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        draft.content = {"made_of": made_of(recipe, kind), **content}


def prepare_dataset(data, output, resolution, recipe):
    """List the images of the folder with their captions."""
    from zerotrain.data.buckets import centre_crop
    from zerotrain.data.dataset import IMAGES, Sample, caption_sha256
    from zerotrain.data.dataset_folder import publish_dataset
    from zerotrain.data.files import DatasetFiles, walk

    begin("prepare_dataset", output)
    files = DatasetFiles(data, output, walk(data))
    samples = []
    for image in sorted(Path("photos").glob("*.png")):
        text = image.with_suffix(".txt")
        caption = text.read_text(encoding="utf-8").strip() if text.exists() else ""
        sha256 = hashlib.sha256(image.read_bytes()).hexdigest()
        samples.append(Sample(
            file=image.name, image_sha256=sha256, caption=caption,
            caption_sha256=caption_sha256(caption), original_size=(8, 8), size=(8, 8),
            crop=centre_crop((8, 8)), split="train",
        ))  # fmt: skip
    recipe = recipe.with_inputs({"files": files.record({})})
    made_by = {"data": data.model_dump(exclude={"name", "num_workers"})}
    repeats = data.repeats
    publish_dataset(output, IMAGES, samples, repeats=repeats, made_by=made_by, recipe=recipe)


def build_base(settings, dataset, output, recipe):
    """Publish a base whose parts are a digest."""
    begin("build_base", output)
    parents = {"dataset": artifact.read_manifest(dataset, "dataset")} if dataset else {}
    parts = {"transformer": made_of(recipe)}
    publish(output, "base", recipe, parents=parents, parts=parts, base=settings.base)


def cache_latents(settings, size, dataset, base, output, *, recipe, **_):
    """Publish a cache of a dataset."""
    begin("cache_latents", output)
    parents = {name: artifact.read_manifest(folder, None)
               for name, folder in (("dataset", dataset), ("base", base))}  # fmt: skip
    publish(output, "cache", recipe, parents=parents)


def train_phase(launch, base, cache, start, progress, output):
    """Publish a checkpoint of the phase's end."""
    from zerotrain.training.checkpointing import conditions
    from zerotrain.training.checkpointing.preflight import read_inputs

    begin("train_phase", output)
    if os.environ.get("STOP") == "train_phase":
        saved = progress / "step-00000100"
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
        remove_manifest(output)
        print("plain: unfinished: stopped on request at step 100 of 300", file=sys.stderr)
        return 85
    inputs = read_inputs(launch, base, cache, start)
    until = inputs.phase.derived.until_step
    saved = progress / f"step-{until:08}" / "tensors.bin"
    saved.parent.mkdir(parents=True, exist_ok=True)
    saved.write_bytes(bytes.fromhex(artifact.digest(inputs.trains)))
    recipe = Recipe("train_phase", VERSIONS["train_phase"], {}, {})
    parents = {name: one for name, one in inputs.parents.items() if name != "launch"}
    with artifact.publish(output, "checkpoint", parents=parents, recipe=recipe) as draft:
        (draft.folder / "tensors.bin").write_bytes(saved.read_bytes())
        position = {
            "run": inputs.phase.run, "phase": inputs.phase.phase, "step": until, "samples": until,
            "optimizer": "adamw", "optimizer_step": until, "param_groups": [],
            "lr_scheduler": "constant", "lr_scheduler_steps": until, "rng": {},
            "engine": {}, "ran_on": {}, "history": [],
        }  # fmt: skip
        (draft.folder / "checkpoint.json").write_text(json.dumps(position))
        draft.content = conditions.manifest_content(inputs.trains)
    return 0


def export_weights(settings, checkpoint, base, weights, state, recipe):
    """Publish weights and state."""
    begin("export_weights", weights)
    end = (checkpoint / "checkpoint.json").read_bytes()
    step = json.loads(end)["step"]
    publish(state, "state", recipe, {"state.json": end}, step=step)
    publish(weights, "weights", recipe, step=step)


def import_checkpoint(settings, checkpoint, base, state, *, trust_pickle=False, recipe):
    """Publish a state at its start."""
    begin("import_checkpoint", state)
    position = {
        "run": "", "phase": "", "step": 0, "samples": 0, "optimizer": "adamw", "optimizer_step": 0,
        "param_groups": [], "lr_scheduler": "constant", "lr_scheduler_steps": 0, "rng": {},
        "engine": {}, "ran_on": {}, "history": [],
    }  # fmt: skip
    publish(state, "state", recipe, {"state.json": json.dumps(position).encode()})


def evaluate(settings, dataset, cache, weights, state, output, metrics, recipe):
    """Publish an evaluation, and metrics."""
    begin("evaluate", output)
    found = json.dumps({"made_of": made_of(recipe)}).encode()
    publish(output, "evaluation", recipe, {"records/metrics.json": found})
    with artifact.replacing(metrics) as new:
        new.write_bytes(found)


def report(settings, folders, output, config, planned, recipe):
    """Publish a page."""
    begin("report", output)
    publish(output, "report", recipe, {"index.html": b"<html></html>"})


def main():
    """Put the fakes in the places of the stages, and run the command line, without a process below
    it that writes the log."""
    if "--log" in sys.argv:
        place = sys.argv.index("--log")
        with Path(sys.argv[place + 1]).open("a", encoding="utf-8") as log:
            log.write(f"{sys.argv}\n")
        del sys.argv[place : place + 2]
    for stage in VERSIONS:
        module = types.ModuleType(f"zerotrain.stages.{stage}")
        if stage == "render_launch":
            continue
        setattr(module, stage, globals()[stage])
        module.planned_phases = module.report_run = lambda *_: {}
        sys.modules[module.__name__] = module
    if "render_launch" in sys.argv:
        from zerotrain.models.sizes import ModelSizes
        from zerotrain.stages import render_launch as real

        make = real.render_launch

        def noted(settings, dataset, preset, base, start, output, cache, recipe):
            begin("render_launch", output)
            make(settings, dataset, preset, base, start, output, cache, recipe)

        real.read_sizes = lambda *_: ModelSizes(1000, 1000, 100, "a", 100, 10)
        preset = real.read_preset(Path("config/launch/torch.yaml"))
        real._choose = lambda *_: (preset, "it fits")
        real.render_launch = noted
    from zerotrain.cli import main as command

    command()


main()
