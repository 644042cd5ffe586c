"""Trackers are accelerate's own, and their libraries are called with arguments that they have."""

from __future__ import annotations

import inspect
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from accelerate import tracking
from tests.builders.phases import make_tiny_phase

from zerotrain.config.trackers import NAMES, TENSORBOARD
from zerotrain.training.reporting.trackers import RUN, hyperparameters, open_run

CALLS = {
    "wandb.init": "entity project dir id name notes tags config config_exclude_keys "
    "config_include_keys allow_val_change group job_type mode force reinit resume resume_from "
    "fork_from save_code tensorboard sync_tensorboard monitor_gym settings",
    "mlflow.search_experiments": "view_type max_results filter_string order_by",
    "mlflow.create_experiment": "name artifact_location tags",
    "mlflow.start_run": "run_id experiment_id run_name nested parent_run_id tags description "
    "log_system_metrics",
    "mlflow.log_params": "params synchronous run_id",
    "swanlab.init": "project workspace experiment_name description job_type group tags config "
    "logdir mode load public callbacks settings id resume reinit",
    "comet_ml.start": "api_key workspace project experiment_key mode online experiment_config "
    "project_name",
    "aim.Run": "run_hash repo read_only experiment force_resume system_tracking_interval "
    "log_system_params capture_terminal_logs",
    "clearml.Task.init": "project_name task_name task_type tags reuse_last_task_id "
    "continue_last_task output_uri auto_connect_arg_parser auto_connect_frameworks "
    "auto_resource_monitoring auto_connect_streams deferred_init",
    "dvclive.Live": "dir resume report save_dvc_exp dvcyaml cache_images exp_name exp_message "
    "monitor_system",
    "trackio.init": "project name group space_id space_storage dataset_id config resume settings",
}
"""The arguments of each library's calls, by their documentation."""
TITLES = {
    "wandb": ("init", "project", "name"),
    "mlflow": ("start_run", None, "run_name"),
    "swanlab": ("init", "project", "experiment_name"),
    "comet_ml": ("start", "project_name", None),
    "aim": ("Run", "experiment", None),
    "clearml": ("Task.init", "project_name", "task_name"),
    "dvclive": ("Live", None, None),
    "trackio": ("init", "project", "name"),
}
"""Where the project and the name of a run go."""
IDENTITIES = {
    "wandb": ("init", "id"),
    "mlflow": ("start_run", "run_id"),
    "swanlab": ("init", "id"),
    "comet_ml": ("start", "experiment_key"),
    "aim": ("Run", "run_hash"),
    "clearml": ("Task.init", "continue_last_task"),
    "trackio": ("init", "name"),
}
"""What a run that continues is called by."""


class Library(ModuleType):
    """A library that notes its calls, and refuses an argument that it has not."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__version__ = "99.0"
        self.calls: dict[str, dict[str, Any]] = {}
        self.config: dict[str, Any] = {}
        self.Task = SimpleNamespace(current_task=lambda: None)
        limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
        self.utils = SimpleNamespace(validation=limits)
        for path, names in CALLS.items():
            library, _, call = path.partition(".")
            if library == name:
                holder = self.Task if call.startswith("Task.") else self
                setattr(holder, call.rpartition(".")[2], self._call(call, names.split()))

    def _call(self, call: str, names: list[str]) -> Any:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(n, kind, default=None) for n in names])

        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls[call] = dict(signature.bind(*args, **kwargs).arguments)
            if call == "search_experiments":
                return []
            return SimpleNamespace(info=SimpleNamespace(run_id="new"), hash="new", id="new")

        return called


def phase(name: str, **changes: Any) -> Any:
    own = {"tracker_project_name": "cats", "tracker_run_name": "first"}
    return make_tiny_phase("a", "torch", 20).with_values(report_to=[name], **own, **changes)


def start(name: str, library: Library, folder: Any, run: str | None) -> tuple[Any, str]:
    """A tracker that has started, and what its run is known by afterwards."""
    opened, known = open_run(name, phase(name), folder, run)
    assert isinstance(opened, tracking.LOGGER_TYPE_TO_CLASS[name])
    opened.main_process_only = False
    opened.start()
    return opened, known or RUN[name](opened.tracker)


def test_every_tracker_is_tried() -> None:
    """None of them is left out below."""
    assert TITLES.keys() == {*NAMES} - {TENSORBOARD}


@pytest.mark.parametrize("name", sorted(TITLES))
def test_a_run_begins_and_continues_by_its_librarys_arguments(tmp_path, monkeypatch, name) -> None:
    """With the user's names where the library takes one, and what the first start is known by is
    what the second one asks for."""
    library = Library(name)
    monkeypatch.setitem(sys.modules, name, library)
    opened, run = start(name, library, tmp_path, None)
    call, project, title = TITLES[name]
    made = library.calls[call]
    if project:
        assert made[project] == "cats"
    if title:
        assert made[title].startswith("first")
    if name == "aim":
        assert opened.tracker.name == "first"
    if name == "mlflow":
        assert library.calls["create_experiment"]["name"] == "cats"
    assert start(name, library, tmp_path, run)[1] == run
    if name == "dvclive":
        assert (made["resume"], library.calls["Live"]["resume"]) == (False, True)
        assert library.calls["Live"]["dir"] == run
    else:
        call, identity = IDENTITIES[name]
        assert library.calls[call][identity] == run


def test_files_of_a_run_lie_with_the_phase(tmp_path, monkeypatch) -> None:
    """Not in the folder that the command was given in."""
    for name, argument in (("wandb", "dir"), ("swanlab", "logdir")):
        library = Library(name)
        monkeypatch.setitem(sys.modules, name, library)
        start(name, library, tmp_path, None)
        assert library.calls["init"][argument].startswith(str(tmp_path))


def test_a_value_too_long_for_mlflow_is_left_out(tmp_path, monkeypatch, caplog) -> None:
    """accelerate warns of it, once, through the logger that stands in its own's place."""
    library = Library("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", library)
    opened, _ = start("mlflow", library, tmp_path, None)
    values = dict(hyperparameters(phase("mlflow", objective={"words": "x" * 600})))
    with caplog.at_level(logging.WARNING):
        opened.store_init_configuration(values)
        opened.store_init_configuration(values)
    sent = library.calls["log_params"]["params"]
    assert "objective" not in sent
    assert sent["learning_rate"] == 1e-3
    assert len([record for record in caplog.records if "objective" in record.message]) == 1
