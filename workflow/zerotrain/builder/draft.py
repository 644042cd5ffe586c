"""A draft: the configuration that a form describes, and what is wrong with it.

The server keeps none: a form's values come with each request. They are the configuration that the
user began with, and what differs from it, so that an address holds a draft.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from zerotrain.artifact.documents import DocumentError, parse_yaml
from zerotrain.builder.controls import MOST, Control, all_controls, written
from zerotrain.builder.writing import check_launch_files, configuration_file
from zerotrain.config.families import DEFAULT, FAMILIES, LANGUAGE_MODELS
from zerotrain.config.problems import InvalidConfigError, Problem
from zerotrain.config.read import expand_phases, load_config, parse_config
from zerotrain.config.run import RunConfig
from zerotrain.config.section import Memory
from zerotrain.config.text import ConfigText, Key, dump, with_value, without_key
from zerotrain.errors import PipelineError
from zerotrain.graph.checks import check_paths, find_problems
from zerotrain.launch.planner.gpus import find_gpu
from zerotrain.launch.resolved import leaves

NEW: dict[str, Any] = {
    "run": "new",
    "family": DEFAULT,
    "base": "stabilityai/stable-diffusion-xl-base-1.0",
    "data": {"images": "images"},
    "train": {"resolution": 1024, "gradient_checkpointing": True},
    "launch": {"mixed_precision": "bf16"},
    "phases": [{"name": "train", "until": 1000, "launch": "auto"}],
}
"""What a user begins with who begins with nothing."""
NEW_TEXT: dict[str, Any] = {
    "data": {"source": "text", "path": "data/text.jsonl"}, "train": {"max_length": 512},
}  # fmt: skip
OTHER = "other/"
"""Before the name of a phase that is not shown, and of its control, in a form."""
VALUES = ("train.optimizer_args", "train.lr_scheduler_args")
"""Controls that hold several values."""
OF_PHASE = ("phase.", "train.", "launch.")
"""Beginnings of the controls whose values a phase has."""


@dataclass(frozen=True)
class Draft:
    """A configuration as a form has it.

    Attributes:
        start: The file that it began with; None for nothing.
        raw: The configuration with the form's values.
        index: The phase that the form shows.
        given: The form's values that differ from the start's, by their controls.
        machine: The machine that is planned for: gpu, device_memory, host_memory.
        others: Values of the other phases, by OTHER, the phase's name and the control.
    """

    start: Path | None
    raw: dict[str, Any]
    index: int
    given: Mapping[str, str]
    machine: Mapping[str, str]
    others: Mapping[str, str]

    @property
    def source(self) -> str:
        """What messages call it."""
        return str(self.start or "new configuration")

    @property
    def family(self) -> str:
        """The family, a known one."""
        family = self.raw.get("family", DEFAULT)
        return family if isinstance(family, str) and family in FAMILIES else DEFAULT

    @property
    def phases(self) -> list[str]:
        """The phases' names, as far as they have some."""
        return [str(phase.get("name", "")) for phase in _phases(self.raw)]

    @property
    def phase(self) -> str:
        """Name of the phase that the form shows."""
        return self.phases[self.index]

    @cached_property
    def query(self) -> dict[str, str]:
        """What an address needs to hold this draft."""
        start = {"from": str(self.start)} if self.start else {}
        shown = {"phase": self.phase} if self.index else {}
        machine = {f"machine.{key}": value for key, value in self.machine.items() if value}
        return {**start, **shown, **self.given, **self.others, **machine}

    def at_phase(self, name: str) -> dict[str, str]:
        """Return what an address needs to hold this draft with another of its phases shown."""
        moved = {key for key in self.given if key.startswith(OF_PHASE)}
        own = {f"{OTHER}{self.phase}/{key}": self.given[key] for key in moved}
        shown = f"{OTHER}{name}/"
        kept = {key: value for key, value in self.query.items() if key not in moved}
        return {
            key.removeprefix(shown): value for key, value in {**kept, **own, "phase": name}.items()
        }

    @cached_property
    def text(self) -> str:
        """The configuration as YAML, with the comments of the file that it began with."""
        with contextlib.suppress(PipelineError, OSError):
            if self.start is not None:
                return ConfigText.read(self.start).update(self.raw).text
        return dump(self.raw)

    @cached_property
    def run(self) -> RunConfig | None:
        """The configuration, if its values are valid."""
        return self._read[0]

    @cached_property
    def problems(self) -> list[Problem]:
        """What is wrong with its values, and with what they name."""
        run, problems = self._read
        if run is None:
            return problems
        return [Problem(error.what, error.hint) for error in find_problems(run)]

    @cached_property
    def _read(self) -> tuple[RunConfig | None, list[Problem]]:
        try:
            run = parse_config(copy.deepcopy(self.raw), self.source)
        except InvalidConfigError as error:
            return None, list(error.problems)
        except PipelineError as error:
            return None, [Problem(error.what, error.hint)]
        wrong = [Problem(error.what, error.hint) for error in check_paths(self.raw)]
        return (None if wrong else run), wrong

    def values(self) -> dict[str, str]:
        """Return what each control of the form shows."""
        shown = _shown(self.raw, self.index)
        found = {
            name: shown.get(name) or (control.default if control.kind == "choice" else "")
            for name, control in all_controls(self.family).items()
        }
        machine = {f"machine.{key}": value for key, value in self.machine.items()}
        return {**found, **self.given, **machine}


def read_draft(form: Mapping[str, str]) -> Draft:
    """Return the draft that a form's values, or an address, describe.

    Raises:
        PipelineError: a file is not one of the project, or is no configuration of one run.
    """
    start = configuration_file(form["from"]) if form.get("from") else None
    before = _read(start, start.stat().st_mtime_ns) if start else _new(form.get("family", DEFAULT))
    names = [phase.get("name") for phase in _phases(before)]
    index = names.index(form["phase"]) if form.get("phase") in names else 0
    shown = _shown(before, index)
    family = form.get("family") or str(before.get("family", DEFAULT))
    raw = dict(before)
    controls = all_controls(family)
    given: dict[str, str] = {}
    for name, control in controls.items():
        if name not in form or name.startswith("machine."):
            continue
        text, old = form[name].strip(), shown.get(name, "")
        if text == (old or control.default if control.kind == "choice" else old):
            continue
        given[name] = text
        raw = _change(raw, control, text, index)
    others = {}
    for key, text in form.items():
        phase, _, name = key.removeprefix(OTHER).partition("/")
        if not key.startswith(OTHER) or phase not in names or phase == names[index]:
            continue
        if name in controls and name.startswith(OF_PHASE):
            others[key] = text
            raw = _change(raw, controls[name], text, names.index(phase))
    if start is None and "family" in form:  # the model to begin with is the family's own
        given["family"] = form["family"]
    machine = {key: form.get(f"machine.{key}", "").strip() for key in MACHINE_KEYS}
    raw = _plan_auto_for(machine, raw)
    check_launch_files(raw)
    return Draft(start, raw, index, given, machine, others)


MACHINE_KEYS = ("gpu", "device_memory", "host_memory")


def _change(raw: dict[str, Any], control: Control, text: str, index: int) -> dict[str, Any]:
    """Return the configuration with a control's text in it; an empty one removes the key."""
    place, value = place_of(control.name, raw, index), read_value(control, text)
    changed = without_key(raw, place) if value is None else with_value(raw, place, value)
    return cast(dict[str, Any], changed)


def _plan_auto_for(machine: Mapping[str, str], raw: dict[str, Any]) -> dict[str, Any]:
    """Give each phase whose launch is `auto` the memory of the machine that the form names.

    So render_launch chooses by it, wherever it runs. What is no size or no GPU is left out: the
    forecast refuses it.
    """
    memory = {key: machine[key] for key in ("device_memory", "host_memory") if machine[key]}
    if machine["gpu"] and "device_memory" not in memory and (gpu := find_gpu(machine["gpu"])):
        memory["device_memory"] = f"{gpu.memory(machine['gpu']) // 2**20} MiB"
    for text in memory.values():
        try:
            TypeAdapter(Memory).validate_python(text)
        except ValidationError:
            return raw
    try:
        phases = expand_phases(dict(raw))["phases"] if memory else []
    except (PipelineError, TypeError, AttributeError):  # a launch file that cannot be read
        return raw
    for index, phase in enumerate(phases):
        if isinstance(launch := phase.get("launch"), dict) and launch.get("preset") == "auto":
            for key, text in memory.items():
                # Not into the run's own section, which refuses it without a preset.
                raw = with_value(raw, ("phases", index, "launch", key), text)
    return raw


@lru_cache(maxsize=16)
def _read(path: Path, edited: int) -> dict[str, Any]:
    """Return what a file says that was edited last at this time; it is not to be changed."""
    raw = load_config(path)
    if not isinstance(raw, dict) or "runs" in raw or not _phases(raw):
        raise PipelineError(
            f"{path}: it is no configuration of one run with phases",
            hint="choose the file of one run, or begin with nothing",
        )
    return raw


def _new(family: str) -> dict[str, Any]:
    """Return what a new configuration of a family begins with."""
    new = copy.deepcopy(NEW)
    if family in FAMILIES:
        new["family"], new["base"] = family, FAMILIES[family].example
    if family in LANGUAGE_MODELS:
        new |= copy.deepcopy(NEW_TEXT)
        new["train"]["gradient_checkpointing"] = True
    return new


def _phases(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    phases = raw.get("phases")
    return [one for one in phases if isinstance(one, dict)] if isinstance(phases, list) else []


def _shown(raw: Mapping[str, Any], index: int) -> dict[str, str]:
    """Return the values that a phase has, as a form shows them, by the names of controls."""
    found: dict[str, str] = {}
    sections: dict[str, Any] = {"": raw, "data": raw.get("data"), "lora": raw.get("lora")}
    try:
        phase = expand_phases(dict(raw))["phases"][index]
    except (PipelineError, TypeError, AttributeError):  # a launch file that cannot be read
        phase = _phases(raw)[index]
    sections |= {"phase": phase, "train": phase.get("train"), "launch": phase.get("launch")}
    for section, values in sections.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            name = f"{section}.{key}" if section else str(key)
            if name == "launch.deepspeed":
                inner = leaves(value, f"{name}.") if isinstance(value, dict) else ()
                found |= {key: written(one) for key, one in inner if one != {}}
            elif not isinstance(value, dict | list) or name in VALUES:
                found[name] = written(value)
    return found


def place_of(name: str, raw: Mapping[str, Any], index: int) -> Key:
    """Return where a control's value goes in a file.

    It replaces the phase's own value if there is one. Otherwise, the sections of the run have it
    where the run has one phase, and the phase where others would change with it.
    """
    section, _, key = name.partition(".")
    if section == "phase":
        return ("phases", index, key)
    if section not in ("train", "launch"):
        return tuple(name.split("."))
    phase = _phases(raw)[index]
    launch = phase.get("launch")
    keys = tuple(key.split("."))
    if section == "launch" and key == "preset":
        return ("phases", index, "launch", *(("preset",) if isinstance(launch, dict) else ()))
    own = launch if section == "launch" else phase
    if (isinstance(own, dict) and keys[0] in own) or len(_phases(raw)) > 1:
        return ("phases", index, *(("launch",) if section == "launch" else ()), *keys)
    return (section, *keys)


def read_value(control: Control, text: str) -> Any:
    """Return what a control's text means; what is no number stays text, to be refused as such."""
    if text == "":
        return None
    if control.choices[-2:] == ("false", "true"):
        return {"true": True, "false": False}.get(text, text)
    if control.kind == "number" or control.name == "phase.until":
        try:
            number = float(text)
        except ValueError:
            return text
        # 5e8 is whole, and 1.0 is as it was typed.
        return int(number) if number.is_integer() and "." not in text else number
    return _read_values(text) if control.kind == "values" else text


def _read_values(text: str) -> Any:
    """Return what `{momentum: 0.9}` means, also without its braces; other text stays text."""
    if len(text) > MOST or "&" in text:
        return text
    try:
        found = parse_yaml(text if text.startswith("{") else f"{{{text}}}", "values")
    except DocumentError:
        return text
    return found if isinstance(found, dict) else text
