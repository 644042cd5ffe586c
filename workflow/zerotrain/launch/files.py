"""The two files that launchers read: accelerate.yaml and deepspeed.json, without one "auto".

All of ZeRO stands in the DeepSpeed file; the accelerate file names it. Values in both places make
accelerate refuse the pair or ignore one of them. Nothing here names a device, so the same files run
on a GPU and, where there is none, on the CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from zerotrain.launch.resolved import ResolvedPhase


def accelerate_config(phase: ResolvedPhase, deepspeed_file: Path) -> dict[str, Any]:
    """What `accelerate launch --config_file` reads, in the form `accelerate config` writes."""
    config = dict(phase.accelerate)
    if phase.engine == "deepspeed":
        inside = config.get("deepspeed_config", {})
        config["deepspeed_config"] = {"deepspeed_config_file": str(deepspeed_file), **inside}
    return config


def write_launch_files(phase: ResolvedPhase, into: Path, named: Path) -> None:
    """Write both files into the folder `into`; `named` is the folder they will be read from."""
    accelerate = accelerate_config(phase, named / "deepspeed.json")
    text = yaml.dump(accelerate, Dumper=yaml.CSafeDumper, sort_keys=False)
    (into / "accelerate.yaml").write_text(text)
    if phase.engine == "deepspeed":
        (into / "deepspeed.json").write_text(json.dumps(phase.deepspeed, indent=2) + "\n")
