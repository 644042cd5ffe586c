"""This part of the workflow says which sources a stage's numbers depend on.

OUTPUTS: none; functions for the other parts.
"""

import importlib.util
from functools import cache

from zerotrain.sources import source_files


def code(stage, *chosen):
    """The sources that a stage's numbers depend on: those of its run's family among them."""
    return lambda wildcards: sources(stage, *chosen, family_of(run_of(wildcards)))


def base_code(wildcards):
    """The sources of the base, and of the small model, where a preset is the base."""
    run = run_of(wildcards)
    return sources("build_base", family_of(run), *preset_code(run))


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


def launch_code(wildcards):
    """The sources of rendering, and the planner's for `auto`."""
    auto = phase_of(wildcards).launch.preset == "auto"
    return sources("render_launch", *(["zerotrain.plan.planner"] if auto else []))
