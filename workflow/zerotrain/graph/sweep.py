"""`zerotrain sweep`: a configuration file for each point of a grid, and one that names them all."""

from __future__ import annotations

import copy
import itertools
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerotrain.artifact import create
from zerotrain.artifact.documents import DocumentError, parse_yaml
from zerotrain.config.read import parse_config, read_config
from zerotrain.config.runs import KEY, read_runs, shared_values
from zerotrain.config.scalar import scalar
from zerotrain.config.text import ConfigText
from zerotrain.errors import PipelineError
from zerotrain.machine.disk_errors import writing

Point = Mapping[str, Any]


def sweep(config: Path, settings: Sequence[str], output: Path) -> list[Path]:
    """Write the configurations of a grid, `OUTPUT/NAME-KEY-VALUE-....yaml`, and `OUTPUT.yaml`.

    Runs get the same data.name if they can share the dataset and its cache; otherwise one for each
    combination of the values that these depend on.

    Args:
        config: The base configuration.
        settings: `KEY=VALUE,VALUE`; keys of sections and of phases (by number) have dots.
        output: A new folder; the runs' names begin with its name.

    Returns:
        The file that names all runs, and each run's file.

    Raises:
        PipelineError: a setting is invalid, a configuration would be invalid, or files exist.
    """
    read_config(config)
    together = output.with_name(f"{output.name}.yaml")
    for path in (output, together):
        if path.exists():
            raise PipelineError(
                f"{path}: is there already", hint="remove it, or name another --output"
            )
    axes = dict(_axis(setting) for setting in settings)
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    base = ConfigText.read(config, follow_links=True)
    texts = {point_name(output.name, point): _text_at(base, point) for point in points}
    if len(texts) < len(points):
        raise PipelineError(
            "--set: two points of the grid have one name", hint="give each value once"
        )
    runs = [
        parse_config(copy.deepcopy(text.values), f"{output / name}.yaml")
        for name, text in texts.items()
    ]
    shared = [shared_values(run) for run in runs]
    splitting = [key for key in axes if _splits(key, points, shared)]
    written = [together]
    with writing(output):
        output.mkdir(parents=True)
        try:
            for point, (name, text) in zip(points, texts.items(), strict=True):
                data = point_name(output.name, {key: point[key] for key in splitting})
                written.append(output / f"{name}.yaml")
                text = text.set(("run",), name).set(("data", "name"), data)
                create(written[-1], text.text)
            create(together, runs_text(output))
            read_runs(together)
        except BaseException:
            shutil.rmtree(output, ignore_errors=True)
            raise
    return written


def runs_text(folder: Path) -> str:
    """Return the configuration that names every run in a folder."""
    return f"{KEY}:\n- {scalar(f'{folder}/*.yaml')}\n"


def point_name(name: str, point: Point) -> str:
    """Name the run at a point: each key's last part and its value."""
    parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in point.items()]
    return re.sub(r"[^A-Za-z0-9_-]+", "_", "-".join([name, *parts])).strip("_")


def _axis(setting: str) -> tuple[str, list[Any]]:
    """Parse a key and its values; brackets keep a list together."""
    key, equals, values = setting.partition("=")
    try:
        found = parse_yaml(f"[{values}]", "--set")
    except DocumentError:
        found = None
    if not (key and equals and found):
        raise PipelineError(
            f"--set {setting}: is no KEY=VALUE,VALUE", hint="as train.learning_rate=1e-4,3e-4"
        )
    return key, [_number(value) for value in found]


def _number(value: Any) -> Any:
    """Convert numbers such as 1e-4, which some YAML readers parse as text."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def _text_at(text: ConfigText, point: Point) -> ConfigText:
    """Return a configuration with the values of a point of the grid.

    Raises:
        PipelineError: a key leads through a value that is not a section.
    """
    for key, value in point.items():
        try:
            text = text.set(
                [int(part) if part.isdigit() else part for part in key.split(".")], value
            )
        except PipelineError as error:
            raise PipelineError(f"--set {error.what}", hint=error.hint) from error
    return text


def _splits(key: str, points: Sequence[Point], shared: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether points that differ only in this key need different datasets or caches."""
    seen: dict[str, Mapping[str, Any]] = {}
    for point, values in zip(points, shared, strict=True):
        others = repr({name: value for name, value in point.items() if name != key})
        if seen.setdefault(others, values) != values:
            return True
    return False
