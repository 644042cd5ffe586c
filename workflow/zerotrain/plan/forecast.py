"""What the jobs of a phase take of one machine's memory, for a cluster that wants to know before.

`python -m zerotrain.plan.forecast` reads what is asked for and writes it to the store
(zerotrain.forecasts), so that Snakemake itself never waits for torch.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from zerotrain.config import RunConfig, read_config
from zerotrain.errors import PipelineError
from zerotrain.families import FAMILIES
from zerotrain.forecasts import made_base, write
from zerotrain.plan.architecture import find_architecture
from zerotrain.plan.inputs import FP32
from zerotrain.plan.model import parameters_of
from zerotrain.plan.planner import Place, choose_preset, plan
from zerotrain.plan.prediction import Prediction

GIB = 2**30
LIBRARIES = GIB
"""Bytes of a process that has imported what a stage does: 460 MiB on a CPU (psutil's rss of
zerotrain.training.rank with deepspeed, diffusers and transformers; torch 2.13). CUDA's context and
kernels, which no formula has, come on top of it on a GPU."""
WORK = 2 * GIB
"""Bytes of a stage that handles one shard or batch at a time, beside the model it has loaded: a
shard of weights holds 1 GiB, and is there twice while it is converted."""
SNAKEMAKE = GIB // 2
"""Bytes of what a job runs beside its stage, all of it in the memory that Slurm grants: 430 MiB, of
which the jobstep's Snakemake and the one that it starts take 174 each, train_phase 72, srun 7 and
shells the rest (rss on the first of two nodes, snakemake 9.27, executor slurm 2.8)."""
STATE = 4
"""Values of a parameter in a checkpoint of elsewhere: weight, master weight, two moments."""


def machine_memory(config: RunConfig, name: str, *, cpu: bool = False) -> dict[str, int]:
    """Bytes of one machine's memory, by rule, of jobs of a phase and of those that feed it.

    Args:
        config: The run's configuration.
        name: The phase.
        cpu: Whether it trains on the CPU, where weights, gradients and moments are in this memory.

    Raises:
        PipelineError: the model is not known, or the preset is impossible.
    """
    launch = config.phase(name).launch
    predicted = _prediction(config, name, cpu=cpu)
    of_all = predicted.device if cpu else predicted.host
    processes = launch.num_processes // launch.machines
    sizes = _parameters(config.family, str(made_base(config) or config.base))
    trained = sizes[FAMILIES[config.family].trained_part]
    stages = {
        # The launcher is a process of its own.
        "train_phase": of_all // launch.machines + (processes + 1) * LIBRARIES,
        "cache_latents": FP32 * (sum(sizes.values()) - trained) + LIBRARIES + WORK,
        "evaluate": FP32 * sum(sizes.values()) + LIBRARIES + WORK,
        "export_weights": LIBRARIES + WORK,
        "import_checkpoint": STATE * FP32 * trained + LIBRARIES + WORK,
    }
    return {stage: taken + SNAKEMAKE for stage, taken in stages.items()}


def _prediction(config: RunConfig, name: str, *, cpu: bool) -> Prediction:
    """What the planner says of the phase's preset; of `auto` what it would choose, or the most."""
    launch = config.phase(name).launch
    memory = None if cpu else launch.device_memory
    place = Place(memory, None, cpu=cpu)
    base = made_base(config)
    only = () if launch.preset == "auto" else (launch.preset,)
    made = plan(config, name, place, base=base, only=only)
    if launch.preset != "auto":
        return made.column(made.mode)[0]
    if made.choice is not None:
        return made.rows[choose_preset(made)[0]][made.mode]
    return max(made.column(made.mode), key=lambda one: one.device if cpu else one.host)


@cache
def _parameters(family: str, base: str) -> Mapping[str, int]:
    """Parameters of each part of the model."""
    architecture = find_architecture(family, base)
    return {
        name: parameters_of(part, architecture.source) for name, part in architecture.parts.items()
    }


def main() -> None:
    """Forecast what stdin asks for: a list of {"config", "phase", "cpu", "key"}."""
    gc.disable()  # libraries and traces make millions of objects that live to the end
    for asked in json.load(sys.stdin):
        config = read_config(Path(asked["config"]))
        try:
            found = machine_memory(config, asked["phase"], cpu=asked["cpu"])
        except PipelineError as error:
            why = str(error).partition("\n")[0].removeprefix("ERROR: ")
            write(asked["key"], {"unknown": why})
        else:
            write(asked["key"], {"bytes": found})


if __name__ == "__main__":
    main()
