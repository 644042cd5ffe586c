"""This part of the workflow says which sources a stage's numbers depend on.

OUTPUTS: none; functions for the other parts.
"""

import importlib.util
from functools import cache

from zerotrain.sources import source_files


def code(stage, *chosen):
    """The sources that a stage's numbers depend on: those of its run's family among them."""
    return of_each_run(lambda run: sources(stage, *chosen, family_of(run)))


def base_code():
    """The sources of the base, and of the small model, where a preset is the base."""
    return of_each_run(
        lambda run: sources("build_base", family_of(run), *preset_code(run))
    )


def of_each_run(found):
    """What is found for each run: a list, where it is that of all, which Snakemake takes in three
    times as fast as a function; so a sweep's 200 runs are planned in seconds.
    """
    lists = [found(run) for run in RUNS.values()]
    same = all(one is lists[0] for one in lists)
    return lists[0] if same else lambda wildcards: found(run_of(wildcards))


def family_of(run):
    """The module of the run's family."""
    return f"zerotrain.families.{run.family}"


@cache
def sources(stage, *chosen):
    """The sources of a stage and of modules that are chosen beside it, and its rule."""
    return [*source_files(f"zerotrain.stages.{stage}", *chosen), f"rules/{stage}.smk"]


def preset_code(run):
    """The module that builds a small model, where the family has one."""
    builder = f"{family_of(run)}_nano"
    return [builder] if run.is_preset and importlib.util.find_spec(builder) else []


def launch_code():
    """The sources of rendering, and the planner's for `auto`."""
    launches = [phase.launch for run in RUNS.values() for phase in run.phases]
    if all(launch.preset != "auto" for launch in launches):
        return sources("render_launch")
    return lambda wildcards: sources(
        "render_launch",
        *(
            ["zerotrain.plan.planner"]
            if phase_of(wildcards).launch.preset == "auto"
            else []
        ),
    )
