"""The files that launchers read: accelerate.yaml and deepspeed.json, without an "auto".

The DeepSpeed file has all ZeRO settings; the accelerate file names it. With values in both files
accelerate refuses them or ignores one. No value names a device, so the same files run on a GPU and,
without one, on the CPU. A phase on several machines also has a script that starts a launcher on
each of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from zerotrain.launch.resolved import ResolvedPhase


def accelerate_config(phase: ResolvedPhase, deepspeed_file: Path) -> dict[str, Any]:
    """Return the config for `accelerate launch --config_file`, in `accelerate config`'s form."""
    config = dict(phase.derived.accelerate)
    if phase.derived.engine == "deepspeed":
        inside = config.get("deepspeed_config", {})
        config["deepspeed_config"] = {"deepspeed_config_file": str(deepspeed_file), **inside}
    return config


SRUN = "srun.sh"


def srun_script(phase: ResolvedPhase) -> str:
    """Return a script that runs its command once on each machine of a Slurm job.

    --cpu-bind=none: a launcher's processes share all CPUs of the job on its machine, while Slurm
    would bind a task to one. --kill-on-bad-exit: a launcher that fails ends the others, which would
    wait for it.
    """
    machines = phase.launch.machines
    several = f"--nodes={machines} --ntasks={machines} --ntasks-per-node=1"
    return (
        "#!/bin/sh\n"
        "# Starts a launcher on each machine of the job; `zerotrain train_phase` calls it.\n"
        f"exec srun {several} \\\n"
        '    --export=ALL --cpu-bind=none --kill-on-bad-exit=1 --unbuffered "$@"\n'
    )


def write_launch_files(phase: ResolvedPhase, into: Path, named: Path) -> None:
    """Write the files into the folder `into`; they will be read from the folder `named`."""
    accelerate = accelerate_config(phase, named / "deepspeed.json")
    text = yaml.dump(accelerate, Dumper=yaml.CSafeDumper, sort_keys=False)
    (into / "accelerate.yaml").write_text(text, encoding="utf-8")
    if phase.derived.engine == "deepspeed":
        (into / "deepspeed.json").write_text(
            json.dumps(phase.derived.deepspeed, indent=2) + "\n", encoding="utf-8"
        )
    if phase.launch.machines > 1:
        (into / SRUN).write_text(srun_script(phase), encoding="utf-8")
