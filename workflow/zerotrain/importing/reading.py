"""From a file to our form, with a note for every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.accelerate import (
    load_yaml,
    read_accelerate,
)
from zerotrain.importing.batch import Part
from zerotrain.importing.deepspeed import Beside, load_json, read_deepspeed
from zerotrain.importing.draft import Draft, Note
from zerotrain.importing.keys import unknown_key
from zerotrain.importing.keys_accelerate import ACCELERATE
from zerotrain.importing.keys_deepspeed import DEEPSPEED
from zerotrain.importing.keys_programs import SIMPLETUNER
from zerotrain.importing.precision import Ask
from zerotrain.importing.program import ACCELERATE as ACCELERATE_PROGRAM
from zerotrain.importing.program import RUN, Program, trainer
from zerotrain.importing.simpletuner import BLOCK, read_simpletuner
from zerotrain.importing.zero import PRESETS


@dataclass(frozen=True)
class Asked:
    """What the user says beside a file or a command."""

    precision: str | None = None
    num_processes: int | None = None
    micro_batch_size: int | None = None
    ask: Ask | None = None
    presets: Path = PRESETS

    def beside(self, program: Program) -> Beside:
        """The same, for a reader."""
        world = Part(None)
        if self.num_processes is not None:
            world = Part(self.num_processes, "--num-processes")
        return Beside(
            program=program,
            processes=world,
            precision=self.precision,
            micro_batch=self.micro_batch_size,
            ask=self.ask,
            presets=self.presets,
        )


@dataclass(frozen=True)
class Imported:
    """What an import found."""

    source: str
    """What was read, for a heading."""
    values: dict[str, Any]
    """Our keys, sections joined by dots."""
    notes: list[Note]

    def nested(self) -> dict[str, Any]:
        """The values as a configuration has them."""
        return nest(self.values)


@dataclass(frozen=True)
class LaunchFile:
    """A file that a run points at: keys of launch and train, and a note for each of its own."""

    launch: dict[str, Any]
    train: dict[str, Any]
    notes: list[Note]


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections out of dotted keys; those of the one phase become the list of phases."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        into = found
        for section in sections:
            into = into.setdefault(section, {})
        into[name] = value
    if "phases" in found:
        found["phases"] = [{"name": "train", **found["phases"]}]
    return found


def import_file(path: Path, asked: Asked | None = None) -> Imported:
    """Read an accelerate YAML, a DeepSpeed JSON or SimpleTuner's config.json.

    Args:
        path: The file; what it names is read too.
        asked: What is said beside it.

    Raises:
        PipelineError: it is none of them, or holds what cannot be taken.
    """
    asked, draft = asked or Asked(), Draft()
    kind = read(path, draft, asked.beside(ACCELERATE_PROGRAM))
    check(draft, str(path))
    return Imported(f"{path}, {kind}", draft.values, draft.notes)


def launch_from_file(
    path: Path,
    launch: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    presets: Path = PRESETS,
) -> LaunchFile:
    """Read the file that a phase's `launch:` points at. What the file leaves open, the run says.

    Args:
        path: An accelerate YAML or a DeepSpeed JSON.
        launch: What the run says beside it, by our keys; may have mixed_precision, num_processes.
        train: What the run says about training, by our keys, defaults left out.
        presets: Folder of the preset files.

    Raises:
        PipelineError: it is none of them, holds what cannot be taken, or says other than the run.
    """
    launch, train = launch or {}, train or {}
    draft = Draft()
    asked = Asked(
        precision=launch.get("mixed_precision"),
        num_processes=launch.get("num_processes"),
        presets=presets,
    )
    beside = replace(asked.beside(RUN), precision_source="launch.mixed_precision")
    read(path, draft, replace(beside, offload_path=launch.get("offload_path")))
    found = nest(draft.values)
    for section, own in (("launch", launch), ("train", train)):
        for key, value in own.items():
            stands = found.get(section, {}).get(key, value)
            if stands != value and key != "preset":
                raise PipelineError(
                    f"{path} makes {section}.{key} {stands!r}, but the run says {value!r}",
                    hint="let both say the same, or take one of them out",
                )
    return LaunchFile(found.get("launch", {}), found.get("train", {}), draft.notes)


def read(path: Path, draft: Draft, beside: Beside) -> str:
    """Read a file of any form into a draft; what form it has."""
    if path.suffix.casefold() not in (".json", ".yaml", ".yml"):
        raise PipelineError(
            f"{path}: neither YAML nor JSON",
            hint="name accelerate's .yaml, a DeepSpeed .json or SimpleTuner's config.json",
        )
    found = load_json(path) if path.suffix.casefold() == ".json" else load_yaml(path)
    names = {str(name).lstrip("-") for name in found}
    if names & {"distributed_type", "compute_environment", "num_machines"}:
        read_accelerate(found, path, draft, beside)
        return "accelerate"
    scores = {
        "SimpleTuner": len(names & set(SIMPLETUNER)) + 2 * (BLOCK in names),
        "DeepSpeed": len(names & {name for name in DEEPSPEED if "." not in name}),
    }
    if beside.program is not RUN and scores["SimpleTuner"] > scores["DeepSpeed"]:
        read_simpletuner(found, path, draft, beside)
        return "SimpleTuner"
    if scores["DeepSpeed"] == 0 and found:
        raise unknown_key(str(path), next(iter(map(str, found))), [*DEEPSPEED, *ACCELERATE])
    program = beside.program if beside.program is RUN else trainer()
    read_deepspeed(found, str(path), draft, replace(beside, program=program))
    return f"DeepSpeed, its autos as the {program.name} fills them"


def check(draft: Draft, where: str) -> None:
    """Hold all that was found to our own models before it is written; the rest is the example's."""
    from zerotrain.config import parse_config
    from zerotrain.families import LANGUAGE_MODELS

    found = nest(draft.values)
    run = {"run": "imported", "base": "nano", "phases": [{"name": "train", "until": 1}]}
    data = found.pop("data", {})
    if not {"images", "path"} & set(data):
        text = found.get("family") in LANGUAGE_MODELS
        data = {"source": "text", "path": "-"} if text else {**data, "images": "-"}
    parse_config({**run, **found, "data": data}, f"{where}, in our form")
