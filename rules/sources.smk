"""This part of the workflow says which sources a stage's numbers depend on.

OUTPUTS: none; functions for the other parts.
"""

import importlib.util
from functools import cache

from zerotrain.source_listing import LISTINGS, write_listing
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
    """What is found for each run; a text where it is that of all, which Snakemake takes in faster
    than a function."""
    ones = {found(run) for run in RUNS.values()}
    return ones.pop() if len(ones) == 1 else lambda wildcards: found(run_of(wildcards))


def family_of(run):
    """The module of the run's family."""
    return f"zerotrain.families.{run.family}"


@cache
def sources(stage, *chosen):
    """The listing of a stage's sources, of those of modules chosen beside it, and of its rule. A job
    on a node takes the listing with which it was submitted."""
    name = "-".join([stage, *(module.rpartition(".")[2] for module in chosen)])
    if not workflow.is_main_process:
        return str(LISTINGS / f"{name}.sha256")
    files = source_files(f"zerotrain.stages.{stage}", *chosen)
    return checked(write_listing, name, [*files, f"rules/{stage}.smk"])


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
