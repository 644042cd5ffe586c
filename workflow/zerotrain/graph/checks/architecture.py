"""Checks of the base's transformer: patch size, positions, and the layers of token routes.

They tell whether the base can divide images of a resolution into patches and embed their positions,
and whether it has the layers that train.tread_config names. They cover presets, bases with local
config.json files, and known models of the hub. The stages check again once the model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotrain.config.families import FAMILIES
from zerotrain.config.problems import collect_errors
from zerotrain.config.run import RunConfig
from zerotrain.config.token_routes import TreadConfig, route_layers
from zerotrain.data.buckets import bucket_sizes
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.shape import pixels_per_latent


def check_resolutions(run: RunConfig, base: str) -> list[PipelineError]:
    """List the phases with a resolution, and the sizes of grids, that the base cannot take.

    Args:
        run: The configuration.
        base: A preset, a folder with config.json files, or the hub id of a known model. Nothing is
            listed for other bases or if the needed values are missing.
    """
    try:
        architecture = find_architecture(run.family, base)
        pixels = pixels_per_latent(architecture)
    except (PipelineError, KeyError):
        return []
    if run.vae == "identity":
        pixels = 1
    config = dict(architecture.trained.config)
    patch = FAMILIES[run.family].patch or config.get("patch_size")
    unit = pixels * patch if isinstance(patch, int) else pixels  # a U-Net has no patches
    buckets = run.data.aspect_buckets
    if run.is_preset and "pos_embed_max_size" in config:  # built for the images of the first phase
        side = run.phases[0].train.resolution
        sizes = bucket_sizes(side, buckets) if buckets is not None else ((side, side),)
        config["pos_embed_max_size"] = max(max(size) for size in sizes) // unit
    found: dict[Any, PipelineError] = {}
    if buckets is not None and buckets.alignment % unit:
        found[0] = PipelineError(
            f"data.aspect_buckets.alignment: {buckets.alignment} is no multiple of {unit}, which "
            "the base divides images into",
            hint=f"set it to {max(1, buckets.alignment // unit) * unit}",
        )
    sides = [(phase, phase.train.resolution) for phase in run.phases]
    sides += [(phase, side) for phase in run.phases for side in run.data.resolutions.values()]
    for phase, side in sides if isinstance(patch, int) else ():
        sizes = bucket_sizes(side, buckets) if buckets is not None else ()
        longest = max([side, *(max(size) for size in sizes)])
        if side not in found and (problem := _find_problem(side, longest, unit, config)):
            what, hint = problem
            found[side] = PipelineError(f"phase {phase.name}: resolution {side} {what}", hint=hint)
    for size in run.evaluate.sizes or () if isinstance(patch, int) else ():
        for side in size:
            if size not in found and (problem := _find_problem(side, side, unit, config)):
                what, hint = problem
                found[size] = PipelineError(
                    f"evaluate.sizes: {size[0]}x{size[1]}: {side} {what}",
                    hint=hint.replace("train.resolution", "the side"),
                )
    return [*found.values()]


def _find_problem(
    side: int, longest: int, unit: int, config: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Describe what is wrong with images of this side, and give a hint.

    Args:
        side: The resolution in pixels.
        longest: The longest side of an image, that of a bucket.
        unit: Side of a patch in pixels.
        config: The transformer's config.json.
    """
    if side % unit:
        return (
            f"is no multiple of {unit}, which the base divides images into",
            f"set train.resolution to {side // unit * unit or unit} or another multiple of {unit}",
        )
    most = config.get("pos_embed_max_size")
    if isinstance(most, int) and longest // unit > most:
        longer = f"has buckets of up to {longest} pixels, which " if longest > side else ""
        return (
            f"{longer}is more than the {most * unit} pixels a side for which the base has "
            "positions",
            f"set train.resolution to {most * unit * side // longest} or less",
        )
    return None


def check_token_routes(run: RunConfig, base: str) -> list[PipelineError]:
    """List the phases that route tokens around layers that the base does not have.

    Args:
        run: The configuration.
        base: A preset, a folder with config.json files, or the hub id of a known model. Nothing is
            listed for other bases or if the number of layers is unknown.
    """
    asked = {p.name: p.train.tread_config for p in run.phases if p.train.tread_config}
    if not asked:
        return []
    try:
        config = find_architecture(run.family, base).trained.config
        layers = config["num_layers"] + config.get("num_single_layers", 0)
    except (PipelineError, KeyError):
        return []
    checks = (lambda n=name, r=routes: _check(n, r, layers) for name, routes in asked.items())
    return collect_errors(*checks)


def _check(phase: str, routes: TreadConfig, layers: int) -> None:
    try:
        route_layers(routes.model_dump()["routes"], layers)
    except PipelineError as error:
        raise PipelineError(f"phase {phase}: {error.what}", hint=error.hint) from error
