"""The files that launchers read: accelerate.yaml and deepspeed.json, without one "auto".

All of ZeRO stands in the DeepSpeed file; the accelerate file names it. Values in both places make
accelerate refuse the pair or ignore one of them. Nothing here names a device, so the same files run
on a GPU and, where there is none, on the CPU. A phase of several machines has the line besides that
starts a launcher on each of them.
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


SRUN = "srun.sh"


def srun_script(phase: ResolvedPhase) -> str:
    """A script that starts the command it is given once on each machine of a Slurm job.

    --cpu-bind=none: a launcher's processes share all CPUs of the job on its machine, where Slurm
    would bind a task to one. What ends with a code ends the others, which would wait for it.
    """
    several = f"--nodes={phase.machines} --ntasks={phase.machines} --ntasks-per-node=1"
    return (
        "#!/bin/sh\n"
        "# Starts a launcher on each machine of the job; `zerotrain train_phase` calls it.\n"
        f"exec srun {several} \\\n"
        '    --export=ALL --cpu-bind=none --kill-on-bad-exit=1 --unbuffered "$@"\n'
    )


def write_launch_files(phase: ResolvedPhase, into: Path, named: Path) -> None:
    """Write the files into the folder `into`; `named` is the folder they will be read from."""
    accelerate = accelerate_config(phase, named / "deepspeed.json")
    text = yaml.dump(accelerate, Dumper=yaml.CSafeDumper, sort_keys=False)
    (into / "accelerate.yaml").write_text(text)
    if phase.engine == "deepspeed":
        (into / "deepspeed.json").write_text(json.dumps(phase.deepspeed, indent=2) + "\n")
    if phase.machines > 1:
        (into / SRUN).write_text(srun_script(phase))
