"""What was edited while a run was under way: then nobody may say what its outputs were made from.

Snakemake and DVC hash what a job took in once the job has ended. Whoever edits the code during a
training would have its outputs told to be of the edited code.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerotrain.source_listing import listed

MISSING = object()


class Meanwhile:
    """A run's configuration as it was read, and when.

    Args:
        config: The run's configuration.
    """

    def __init__(self, config: Path) -> None:
        self._config = config
        self.began = time.time()
        self._values = _read(config)
        self.given = digest_of(config)

    def config_edited(self) -> bool:
        """Whether any value of the configuration is another than when the run began."""
        return self.given != digest_of(self._config)

    def edited(self, workflow: Any, job: Any, stage: Mapping[str, Any]) -> dict[str, float]:
        """What was edited of that which a job takes in, since it began or the run.

        Args:
            workflow: Snakemake's workflow object.
            job: A job that has run, or that did not need to.
            stage: Its stage in dvc.yaml.

        Returns:
            Files, and keys of the configuration; when each was.
        """
        began = began_and_ended(workflow, job)[0] if workflow.dag.finished(job) else self.began
        edits = {path: changed_at(path) for path in listed(map(str, job.input))}
        edits = {path: when for path, when in edits.items() if when > began}
        now, then = _read(self._config), changed_at(str(self._config))
        for keys in (one.get(str(self._config), ()) for one in stage.get("params") or ()):
            edits |= {key: then for key in keys if _at(now, key) != _at(self._values, key)}
        return edits


def edited_during(workflow: Any, job: Any, times: Iterable[float] = ()) -> bool:
    """Whether any of these times, or of a change of its inputs, lies within a job that has run."""
    began, ended = began_and_ended(workflow, job)
    changes = list(times) or [changed_at(path) for path in listed(map(str, job.input))]
    return any(began < change <= ended for change in changes)


def began_and_ended(workflow: Any, job: Any) -> tuple[float, float]:
    """When a job that has run began and ended, by Snakemake's records."""
    records = [workflow.persistence.metadata(path) for path in job.output]
    return min(one.starttime for one in records), max(one.endtime for one in records)


def digest_of(config: Path) -> str:
    """Digest of a configuration's values, as the file gives them."""
    text = json.dumps(_read(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def changed_at(path: str) -> float:
    """When a file was changed on this disk, whatever its own time says; 0.0 where there is none."""
    try:
        return os.stat(path).st_ctime
    except OSError:
        return 0.0


def _read(config: Path) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe").load(config.read_text())
    except (OSError, YAMLError):
        return None  # in the middle of an edit


def _at(given: Any, key: str) -> Any:
    """A value by its name in dvc.yaml, such as `phases.0` or `train`."""
    for part in key.split("."):
        try:
            given = given[int(part)] if isinstance(given, list) else given[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return MISSING
    return given
