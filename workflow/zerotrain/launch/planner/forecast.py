"""Forecast of a phase's jobs' memory on one machine, for clusters that need it in advance.

`python -m zerotrain.launch.planner.forecast` reads the requests and writes the results to the store
(zerotrain.launch.planner.forecasts), so that Snakemake itself does not import torch.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from functools import cache

from zerotrain.config.families import FAMILIES
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.forecasts import made_base, write
from zerotrain.launch.planner.inputs import FP32
from zerotrain.launch.planner.model import parameters_of
from zerotrain.launch.planner.planner import PlannedMachine, choose_preset, plan
from zerotrain.launch.planner.prediction import Prediction

GIB = 2**30
LIBRARIES = GIB
"""Bytes of a process that has imported a stage's modules: 460 MiB on a CPU (psutil's rss of
zerotrain.training.rank with deepspeed, diffusers and transformers; torch 2.13). CUDA's context and
kernels, which have no formula, are additional on a GPU."""
WORK = 2 * GIB
"""Bytes of a stage that handles one shard or batch at a time, without the model that it has loaded:
a shard of weights has 1 GiB, and exists twice while it is converted."""
SNAKEMAKE = GIB // 2
"""Bytes of a job's other processes, all of it in the memory that Slurm grants: 430 MiB, of which
the jobstep's Snakemake and the one that it starts take 174 each, train_phase 72, srun 7 and shells
the rest (rss on the first of two nodes, snakemake 9.27, executor slurm 2.8)."""
STATE = 4
"""Values per parameter in an external checkpoint: weight, master weight, two moments."""


def machine_memory(config: RunConfig, name: str, *, cpu: bool = False) -> dict[str, int]:
    """Return the bytes on one machine, by rule, of a phase's jobs and of those that it depends on.

    Args:
        config: The run's configuration.
        name: The phase.
        cpu: Whether it trains on the CPU, where weights, gradients and moments are in this memory.

    Raises:
        PipelineError: the model is unknown, or the preset is impossible.
    """
    launch = config.phase(name).launch
    predicted = _prediction(config, name, cpu=cpu)
    of_all = predicted.device if cpu else predicted.host
    processes = launch.num_processes // launch.machines
    sizes = _parameters(config.family, str(made_base(config) or config.base))
    trained = sizes[FAMILIES[config.family].trained_name]
    stages = {
        # The launcher is a separate process.
        "train_phase": of_all // launch.machines + (processes + 1) * LIBRARIES,
        "cache_latents": FP32 * (sum(sizes.values()) - trained) + LIBRARIES + WORK,
        "evaluate": FP32 * sum(sizes.values()) + LIBRARIES + WORK,
        "export_weights": LIBRARIES + WORK,
        "import_checkpoint": STATE * FP32 * trained + LIBRARIES + WORK,
    }
    return {stage: taken + SNAKEMAKE for stage, taken in stages.items()}


def _prediction(config: RunConfig, name: str, *, cpu: bool) -> Prediction:
    """Return the prediction for the phase's preset; for `auto` the chosen one, or the maximum."""
    launch = config.phase(name).launch
    memory = None if cpu else launch.device_memory
    machine = PlannedMachine(memory, launch.host_memory, cpu=cpu)
    base = made_base(config)
    only = () if launch.preset == "auto" else (launch.preset,)
    made = plan(config, name, machine, base=base, only=only)
    if launch.preset != "auto":
        return made.column(made.mode)[0]
    if made.choice is not None:
        return made.rows[choose_preset(made)[0]][made.mode]
    return max(made.column(made.mode), key=lambda one: one.device if cpu else one.host)


@cache
def _parameters(family: str, base: str) -> Mapping[str, int]:
    """Return the number of parameters of each part of the model."""
    architecture = find_architecture(family, base)
    return {
        name: parameters_of(part, architecture.source) for name, part in architecture.parts.items()
    }


def main() -> None:
    """Make the forecasts that stdin requests: a list of {"run", "phase", "cpu", "key"}."""
    gc.disable()  # libraries and traces create millions of objects that live to the end
    for asked in json.load(sys.stdin):
        config = RunConfig.model_validate(asked["run"])
        try:
            memory = machine_memory(config, asked["phase"], cpu=asked["cpu"])
        except PipelineError as error:
            why = str(error).partition("\n")[0].removeprefix("ERROR: ")
            write(asked["key"], {"unknown": why})
        else:
            write(asked["key"], {"bytes": memory})


if __name__ == "__main__":
    main()
