"""Readers of settings: configurations, launch files and commands of other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from tests.accounting.reader import REFUSED, Reader, Tell, more, refusal
from tests.builders.runs import make_run
from tests.hostile.foreign_readers import BACKENDS, KOHYA, SIMPLETUNER

from zerotrain.config.read import parse_config
from zerotrain.config.runs import read_runs
from zerotrain.errors import PipelineError
from zerotrain.importers.command_line import import_command
from zerotrain.importers.imported_config import report
from zerotrain.importers.reading import ImportOptions, import_file
from zerotrain.launch.preset import read_preset


def _configuration(_: Path, name: str | None) -> str:
    return refusal(parse_config, more(make_run(), name), "run.yaml")


def _runs(folder: Path, name: str | None) -> str:
    (folder / "run.yaml").write_text(yaml.safe_dump(make_run()))
    together = more({"runs": [str(folder / "run.yaml")]}, name)
    (folder / "all.yaml").write_text(yaml.safe_dump(together))
    return refusal(read_runs, folder / "all.yaml")


def _preset(folder: Path, name: str | None) -> str:
    (folder / "mine.yaml").write_text(yaml.safe_dump(more({"engine": "torch"}, name)))
    return refusal(read_preset, folder / "mine.yaml")


def _imported(write: Callable[[Path, str | None], Path]) -> Tell:
    def tell(folder: Path, name: str | None) -> str:
        file = write(folder, name)
        try:
            found = import_file(file, ImportOptions(precision="bf16"))
        except PipelineError as error:
            return str(error)
        return report([note for note in found.notes if note.key == name])

    return tell


def _written(file: str, values: dict[str, Any]) -> Tell:
    def write(folder: Path, name: str | None) -> Path:
        changed = more(values, name)
        text = yaml.safe_dump(changed) if file.endswith(".yaml") else json.dumps(changed)
        (folder / file).write_text(text)
        (folder / "sets.json").write_text(json.dumps(BACKENDS))
        return folder / file

    return _imported(write)


def _kohya(folder: Path, name: str | None) -> Path:
    subset = more(dict(KOHYA["datasets"][0]["subsets"][0]), name)
    values = {"datasets": [{**KOHYA["datasets"][0], "subsets": [subset]}], **{"general": {
        **KOHYA["general"]}}}  # fmt: skip
    (folder / "a.json").write_text(json.dumps(values))
    return folder / "a.json"


def _backends(folder: Path, name: str | None) -> Path:
    (folder / "sets.json").write_text(json.dumps([more(dict(BACKENDS[0]), name), BACKENDS[1]]))
    return folder / "sets.json"


def _command(text: str) -> Tell:
    def tell(_: Path, name: str | None) -> str:
        command = text.replace(" EXTRA", f" --{name} 1" if name else "")
        return refusal(import_command, command, ImportOptions(precision="bf16"))

    return tell


COMMAND = "`zerotrain import`"
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 1,
    "num_processes": 2, "mixed_precision": "bf16",
}  # fmt: skip
DEEPSPEED = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
DIFFUSERS = (
    "accelerate launch train_dreambooth_lora_flux.py --pretrained_model_name_or_path=a/b "
    "--instance_data_dir=dog --output_dir=o --instance_prompt='a dog' --max_train_steps=9 "
    "--resolution=512 --train_batch_size=1 --rank=4 EXTRA"
)
TRAINER = (
    "torchrun --nproc_per_node 2 finetune.py --model_name_or_path a/b --data_path d.json "
    "--output_dir o --max_steps 9 --bf16 True EXTRA"
)
SETTINGS_READERS: dict[str, Reader] = {
    "configuration of a run": Reader("keys", REFUSED, "every command", _configuration),
    "configuration of several runs": Reader("keys", REFUSED, "every command", _runs),
    "launch preset": Reader("keys", REFUSED, "every command", _preset),
    "DeepSpeed's JSON": Reader("keys", REFUSED, COMMAND, _written("ds.json", DEEPSPEED)),
    "accelerate's YAML": Reader("keys", REFUSED, COMMAND, _written("a.yaml", ACCELERATE)),
    "SimpleTuner's config.json": Reader(
        "keys", REFUSED, COMMAND, _written("config.json", SIMPLETUNER)
    ),
    "SimpleTuner's datasets": Reader("keys", REFUSED, COMMAND, _imported(_backends)),
    "kohya's datasets": Reader("keys", REFUSED, COMMAND, _imported(_kohya)),
    "command of diffusers' examples": Reader("flags", REFUSED, COMMAND, _command(DIFFUSERS)),
    "command of HF's Trainer": Reader("flags", REFUSED, COMMAND, _command(TRAINER)),
    "flags of `accelerate launch`": Reader(
        "flags", REFUSED, COMMAND,
        _command(DIFFUSERS.replace(" EXTRA", "").replace("launch ", "launch EXTRA ", 1)),
    ),
    "flags of torchrun": Reader(
        "flags", REFUSED, COMMAND,
        _command(TRAINER.replace(" EXTRA", "").replace("torchrun ", "torchrun EXTRA ", 1)),
    ),
    "flags of deepspeed": Reader(
        "flags", REFUSED, COMMAND,
        _command(
            TRAINER.replace(" EXTRA", "").replace(
                "torchrun --nproc_per_node 2", "deepspeed EXTRA --num_gpus 2"
            )
        ),
    ),
}  # fmt: skip
