"""Trackers by name: what a user may write, and what is refused before a training starts."""

from __future__ import annotations

import pytest
from accelerate.utils import LoggerType

from zerotrain.config import trackers
from zerotrain.config.trackers import NAMES, check_installed, chosen_trackers, read_names
from zerotrain.errors import PipelineError


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("tensorboard", ["tensorboard"]),
        ("wandb,TensorBoard", ["wandb", "tensorboard"]),
        (["wandb", "wandb", "mlflow"], ["wandb", "mlflow"]),
        ("comet", ["comet_ml"]),
        ("none", []),
        ([], []),
        ("all", ["all"]),
    ],
    ids=str,
)
def test_names_as_users_of_other_trainers_write_them(given, names) -> None:
    """One name, several, a list, `none` and `all`; each once and in lower case."""
    assert read_names(given) == names


@pytest.mark.parametrize("given", ["visdom", ["all", "wandb"], "none, wandb"], ids=str)
def test_other_names_are_refused(given) -> None:
    """A name that no tracker has, and `all` or `none` among others."""
    with pytest.raises(ValueError, match=r"visdom' is no tracker|stand alone"):
        read_names(given)


def test_every_tracker_of_accelerate_can_be_named() -> None:
    """The names are accelerate's own."""
    assert set(NAMES) == {str(kind.value) for kind in LoggerType} - {"all"}


def test_a_tracker_that_is_not_installed_is_refused_with_the_command(monkeypatch) -> None:
    """Before the start, all at once, with packages that pip knows."""
    monkeypatch.setattr(trackers, "is_installed", lambda name: name == "tensorboard")
    check_installed(["tensorboard"])
    check_installed(["all"])
    assert chosen_trackers(["all"]) == ["tensorboard"]
    with pytest.raises(PipelineError, match="wandb, mlflow are not installed") as caught:
        check_installed(["tensorboard", "wandb", "mlflow"])
    assert "`pip install wandb mlflow-skinny`" in caught.value.hint
