"""The trackers that training reports to, by accelerate's names for them; without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError

TENSORBOARD = "tensorboard"
NAMES = (
    TENSORBOARD, "wandb", "mlflow", "swanlab", "comet_ml", "aim", "clearml", "dvclive", "trackio",
)  # fmt: skip
"""Each is also the name of the module, and of the package that pip installs."""
SMALLER = {"mlflow": "mlflow-skinny"}
"""A package of less weight that is enough."""
ALL, NONE = "all", "none"


def read_names(value: str | Sequence[str]) -> list[str]:
    """Parse the trackers of `report_to`: one, several, `all` that are installed, or `none`.

    Returns:
        Some of NAMES, or `all` alone.

    Raises:
        ValueError: a name that is not known, or `all` or `none` with others.
    """
    given = [value] if isinstance(value, str) else list(value)
    names = [name.strip().lower() for one in given for name in one.split(",") if name.strip()]
    names = list(dict.fromkeys("comet_ml" if name == "comet" else name for name in names))
    if unknown := [name for name in names if name not in (*NAMES, ALL, NONE)]:
        raise ValueError(
            f"{unknown[0]!r} is no tracker; "
            + known_names(unknown[0], [*NAMES, ALL, NONE], "known are")
        )
    if len(names) > 1 and (ALL in names or NONE in names):
        raise ValueError(f"{', '.join(names)}: all and none stand alone")
    return [] if names == [NONE] else names


def is_installed(name: str) -> bool:
    """Return whether a tracker's module can be imported here."""
    return importlib.util.find_spec(name) is not None


def chosen_trackers(report_to: Sequence[str]) -> list[str]:
    """Return the trackers to open: of `all` those that are installed."""
    if list(report_to) == [ALL]:
        return [name for name in NAMES if is_installed(name)]
    return list(report_to)


def check_installed(report_to: Sequence[str]) -> None:
    """Check that the trackers are installed.

    Raises:
        PipelineError: naming the packages.
    """
    missing = [name for name in chosen_trackers(report_to) if not is_installed(name)]
    if missing:
        packages = " ".join(SMALLER.get(name, name) for name in missing)
        raise PipelineError(
            f"report_to: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            hint=f"`pip install {packages}` into this environment, or take it out of "
            "train.report_to; metrics.jsonl is written in any case",
        )
