"""Checks of the base: it must be a preset, a folder with a model of the family, or a hub id.

And of its transformer: patch size, positions, and the layers of token routes, as far as presets,
local config.json files and known models of the hub tell them; the stages check again once the model
is loaded. Whether the hub has a model of an id is checked at download.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact.documents import read_header
from zerotrain.artifact.layout import RunFolder
from zerotrain.config.adapters import is_excluded, is_target
from zerotrain.config.families import FAMILIES, LANGUAGE_MODELS, PRESETS
from zerotrain.config.problems import collect_errors
from zerotrain.config.run import RunConfig
from zerotrain.config.suggestions import nearest
from zerotrain.config.token_routes import TreadConfig, route_layers
from zerotrain.config.trained_part import check_pattern_matches
from zerotrain.data.buckets import bucket_sizes
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import find_architecture, read_shipped
from zerotrain.launch.planner.shape import pixels_per_latent
from zerotrain.models.base import (
    MODEL_INDEX,
    check_model_index,
    choose_files,
    in_part,
    read_model_type,
)
from zerotrain.models.base_places import (
    Selection,
    check_single_file,
    find_single_file,
    read_selections,
)
from zerotrain.models.hub import HUB_ID, check_no_revision, open_location


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


TARGETS, EXCLUDED = "lora.target_modules", "base_model_exclude_modules"
"""Keys that name layers by the ends of their names."""


def check_base(run: RunConfig) -> list[PipelineError]:
    """List what is wrong with a base that is not built yet, and with the names of its layers."""
    if run.is_preset:
        problems = collect_errors(
            lambda: check_no_revision(run.base, run.revision), *_checks_of_preset_targets(run)
        )
        # To look at small models imports torch, for which a plan of other runs must not wait.
        if FAMILIES[run.family].sized_presets and (run.evaluate.sizes or _resolutions(run) > 1):
            problems += check_resolutions(run, run.base)
        return [*problems, *check_token_routes(run, run.base)]
    if _is_made(run):
        return [] if run.is_text else _check_architecture(run, str(_folder(run)))
    problems = check_named_base(run.family, run.base, run.revision)
    if not problems and not run.is_text and _is_described(run.base):
        problems = _check_architecture(run, run.base)
    return problems or [*_problems_of_names(run)]


def _resolutions(run: RunConfig) -> int:
    return len({phase.train.resolution for phase in run.phases})


def _check_architecture(run: RunConfig, base: str) -> list[PipelineError]:
    return [*check_resolutions(run, base), *check_token_routes(run, base)]


def check_named_base(family: object, base: object, revision: object) -> list[PipelineError]:
    """List what is wrong with a base by its name; config.read refuses values of another type."""
    if family not in FAMILIES or not isinstance(base, str) or base in PRESETS:
        return []
    return list(_problems_of_base(str(family), base, None if revision is None else str(revision)))


def describe_dependency(run: RunConfig) -> str | None:
    """Describe the external files that a run's results depend on; None without any."""
    if run.is_preset or run.base_copy != "link":
        return None
    return (
        f"base: {_folder(run)} links to files of {run.base}, which has to stay; weights/ hold "
        "copies. `base_copy: copy` makes the base independent"
    )


def forget_bases() -> None:
    """Look again at bases that were checked."""
    _problems_of_base.cache_clear()
    _parameter_names.cache_clear()


def find_base_folder(run: RunConfig) -> Path | None:
    """Return the folder of a run's base, built or named, if it is on this disk."""
    if _is_made(run):
        return _folder(run)
    named = Path(run.base).expanduser()
    return named if not run.is_preset and named.is_dir() else None


def _is_made(run: RunConfig) -> bool:
    """Return whether the run's base is built: its source may no longer exist."""
    if not artifact.is_published(_folder(run)):
        return False  # to find the hint of an error takes longer than all checks of a run
    try:
        content = artifact.read(_folder(run), "base", verify=False).content
    except PipelineError:
        return False
    return (content.get("base"), content.get("revision")) == (run.base, run.revision)


def _folder(run: RunConfig) -> Path:
    return RunFolder(run.run).base


def _is_described(base: str) -> bool:
    """Return whether all config.json files are known: those of a folder or of a known hub id."""
    if Path(base).expanduser().is_dir():
        return find_single_file(base) is None
    return any(base in known.source.split(", ") for known in read_shipped())


@cache  # the runs of a sweep share a base
def _problems_of_base(family: str, base: str, revision: str | None) -> tuple[PipelineError, ...]:
    try:
        selections = read_selections(base)
    except PipelineError as error:
        return (error,)
    if selections:
        checks = [partial(_check_selection, one) for one in selections]
        return tuple(collect_errors(*checks))
    return tuple(collect_errors(lambda: _check_place(family, base, revision)))


def _check_place(family: str, base: str, revision: str | None) -> None:
    if (file := find_single_file(base)) is not None:
        check_single_file(base, file, family)
    elif Path(base).expanduser().is_dir():
        open_location(base, revision)
        try:
            _check_folder(family, base)
        except PipelineError as error:
            what = error.what if error.what.startswith("base: ") else f"base: {error.what}"
            raise PipelineError(what, hint=error.hint) from error
    elif not HUB_ID.fullmatch(base):
        open_location(base, revision)
    else:
        _check_hub_id(family, base)


def _check_folder(family: str, base: str) -> None:
    """Check files by their names and descriptions, as build_base does before it links them."""
    folder = Path(base).expanduser()
    _choose_files(family, base)
    if family in LANGUAGE_MODELS:
        read_model_type(folder / "config.json", base)
    else:
        check_model_index(folder / MODEL_INDEX, FAMILIES[family], base)


def _choose_files(family: str, base: str) -> dict[str, str]:
    return choose_files(open_location(base, None).names, FAMILIES[family], base)


def _check_hub_id(family: str, base: str) -> None:
    """Check the family of a known model, and ids that nearly match a known one."""
    known = {name: a.family for a in read_shipped() for name in a.source.split(", ")}
    if base in known and known[base] != family:
        find_architecture(family, base)
    owner, _, model = base.partition("/")
    near = nearest(owner, {name.partition("/")[0] for name in known}, cutoff=0.9)
    # The owner may have another model of that name; only the hub knows.
    if base not in known and near and f"{near[0]}/{model}" in known:
        raise PipelineError(
            f"base: {base}: there is no such folder, and {owner} is nearly {near[0]}, the owner of "
            f"{model} on the hub",
            hint=f"did you mean {near[0]}/{model}?",
        )


def _check_selection(selection: Selection) -> None:
    """Check that files of a folder exist; those of a hub repository are listed later."""
    folder = Path(selection.place).expanduser()
    if not folder.is_dir():
        if not HUB_ID.fullmatch(selection.place):
            open_location(selection.place, None)
        return
    names = open_location(selection.place, None).names
    if not any(fnmatchcase(name, selection.pattern) for name in names):
        raise PipelineError(
            f"base: {selection} matches no file",
            hint="check the pattern: * stands for any characters",
        )


def _problems_of_names(run: RunConfig) -> Sequence[PipelineError]:
    """List patterns and adapter layers that match no parameter of a local base.

    Language models are skipped: their files may use other names than the model class.
    """
    names = () if run.is_text else _parameter_names(run.family, run.base)
    if not names:
        return ()
    checks = [
        partial(check_pattern_matches, key, pattern, names)
        for key in ("frozen_parameters", "trainable_parameters")
        for pattern in getattr(run, key)
    ]
    if run.adapter_values() is None:
        groups = [group for phase in run.phases for group in phase.train.param_groups]
        patterns = dict.fromkeys(pattern for group in groups for pattern in group.parameters)
        checks += [partial(check_pattern_matches, "param_groups", one, names) for one in patterns]
    layers = {name.rpartition(".")[0] for name in names}
    targets = run.lora.target_modules if run.lora else None
    if isinstance(targets, list):
        checks += [partial(_check_target, TARGETS, is_target, target, layers) for target in targets]
    checks += [
        partial(_check_target, EXCLUDED, is_excluded, one, layers)
        for one in run.base_model_exclude_modules
    ]
    return collect_errors(*checks)


@cache
def _parameter_names(family: str, base: str) -> tuple[str, ...]:
    """List the trained part's parameters, from the headers of a local base's files."""
    folder = Path(base).expanduser()
    if not folder.is_dir() or find_single_file(base) is not None:  # a single file uses other names
        return ()
    found: list[str] = []
    for name, file in _choose_files(family, base).items():
        if in_part(name, FAMILIES[family].trained_part) and name.endswith(".safetensors"):
            try:
                found += read_header(folder / file, follow_links=True).tensors
            except PipelineError:  # the stage that reads the file reports the damage
                return ()
    return tuple(found)


def _check_target(
    key: str, fits: Callable[[str, list[str]], bool], target: str, layers: set[str]
) -> None:
    if not any(fits(layer, [target]) for layer in layers):
        ends = {layer.rpartition(".")[2] for layer in layers}
        raise _no_target(key, "the base", target, ends)


def _checks_of_preset_targets(run: RunConfig) -> list[partial[None]]:
    """Check the words in target names on a preset; layer numbers are not known without torch."""
    targets = (run.adapter_values() or {}).get("target_modules")
    named = {
        TARGETS if run.lora else "peft.target_modules": targets
        if isinstance(targets, list)
        else [],
        EXCLUDED: [one.removeprefix("^") for one in run.base_model_exclude_modules],
    }
    return [
        partial(_check_words, key, run.family, run.base, one)
        for key, entries in named.items()
        for one in entries
    ]


@cache
def preset_layers() -> dict[str, list[str]]:
    """Read the words in the names of the small models' layers, by family."""
    import tomllib  # few runs name layers, and its import takes 5 ms of each plan

    table = Path(__file__).with_name("preset_layers.toml")
    return tomllib.loads(table.read_text(encoding="utf-8"))


def _check_words(key: str, family: str, preset: str, target: str) -> None:
    known = preset_layers().get(family)
    if known is None:
        return
    if any(word not in known and not word.isdigit() for word in str(target).split(".")):
        raise _no_target(key, preset, target, known)


def _no_target(key: str, base: str, target: str, names: Iterable[str]) -> PipelineError:
    near = nearest(target, names, most=4, cutoff=0.4) or sorted(names)[:8]
    return PipelineError(
        f"{key}: no layer of {base} has a name that ends in {target!r}",
        hint=f"near names: {', '.join(near)}",
    )
