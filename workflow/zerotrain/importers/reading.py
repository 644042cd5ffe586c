"""Import of a file, with a note on every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.accelerate import note_repeated_keys, read_accelerate
from zerotrain.importers.deepspeed import read_deepspeed
from zerotrain.importers.files import load_deepspeed, load_toml, load_yaml
from zerotrain.importers.imported_config import ImportedConfig, nest
from zerotrain.importers.keys import SIMPLETUNER
from zerotrain.importers.kohya_dataset import read_kohya_dataset
from zerotrain.importers.program import ACCELERATE as ACCELERATE_PROGRAM
from zerotrain.importers.program import (
    PRESETS,
    RUN,
    Choose,
    Part,
    Program,
    SurroundingSettings,
    trainer,
)
from zerotrain.importers.simpletuner import BLOCK, is_wrapped, read_launch_alone, read_simpletuner
from zerotrain.importers.simpletuner_data import is_backends, put_datasets, read_backends
from zerotrain.launch.keys import ACCELERATE, DEEPSPEED, unknown_key


@dataclass(frozen=True)
class ImportOptions:
    """Options that the user gives in addition to a file or a command."""

    precision: str | None = None
    num_processes: int | None = None
    micro_batch_size: int | None = None
    choose: Choose | None = None
    """Chooses a precision if none is given."""
    presets: Path = PRESETS
    skip: frozenset[str] = frozenset()
    """Keys of the source to exclude, without leading dashes."""

    def new_config(self) -> ImportedConfig:
        """Return an empty result that excludes those keys."""
        return ImportedConfig(skip=self.skip)

    def surroundings(self, program: Program) -> SurroundingSettings:
        """Return the options in the form for a reader."""
        world = Part(None)
        if self.num_processes is not None:
            world = Part(self.num_processes, "--num-processes")
        return SurroundingSettings(
            program=program,
            processes=world,
            precision=self.precision,
            micro_batch=self.micro_batch_size,
            choose=self.choose,
            presets=self.presets,
        )


def import_file(path: Path, options: ImportOptions | None = None) -> ImportedConfig:
    """Read an accelerate YAML, a DeepSpeed JSON, SimpleTuner's config.json or kohya's datasets.

    Args:
        path: The file; files that it names are read too.
        options: Options given in addition.

    Raises:
        PipelineError: it is not one of them, or has unsupported contents.
    """
    options = options or ImportOptions()
    result, kind = options.new_config(), ""
    with result.collect():
        kind = read(path, result, options.surroundings(ACCELERATE_PROGRAM))
    result.raise_problems(str(path))
    check(result, str(path))
    result.source = f"{path}, {kind}"
    return result


def launch_from_file(
    path: Path,
    launch: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    presets: Path = PRESETS,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the file that a phase's `launch:` names. The run sets what the file does not give.

    Args:
        path: An accelerate YAML or a DeepSpeed JSON.
        launch: The run's launch values by our keys; may have mixed_precision, num_processes.
        train: The run's training values by our keys, without defaults.
        presets: Folder of the preset files.

    Returns:
        The file's values of launch and of train.

    Raises:
        PipelineError: it is not one of them, has unsupported contents, or contradicts the run.
    """
    launch, train = launch or {}, train or {}
    result = ImportedConfig()
    options = ImportOptions(
        precision=launch.get("mixed_precision"),
        num_processes=launch.get("num_processes"),
        presets=presets,
    )
    context = replace(options.surroundings(RUN), precision_source="launch.mixed_precision")
    result.attempt(read, path, result, replace(context, offload_path=launch.get("offload_path")))
    result.raise_problems(str(path))
    found = nest(result.values)
    for section, own in (("launch", launch), ("train", train)):
        for key, value in own.items():
            in_file = found.get(section, {}).get(key, value)
            if in_file != value and key != "preset":
                raise PipelineError(
                    f"{path} makes {section}.{key} {in_file!r}, but the run says {value!r}",
                    hint="let both say the same, or take one of them out",
                )
    return found.get("launch", {}), found.get("train", {})


def read(path: Path, result: ImportedConfig, context: SurroundingSettings) -> str:
    """Read a file of any supported form, and return the form."""
    if path.suffix.casefold() == ".toml" and context.program is not RUN:
        settings = load_toml(path)
        if settings.keys() & {"model_family", "data_backend_config"}:  # kohya has neither
            read_simpletuner(settings, path, result, context)
            return "SimpleTuner"
        read_kohya_dataset(path, result)
        return "kohya's datasets"
    if path.suffix.casefold() == ".json" and context.program is not RUN and is_backends(path):
        put_datasets(read_backends(path, result), result)
        return "SimpleTuner's datasets"
    if path.suffix.casefold() not in (".json", ".yaml", ".yml"):
        raise PipelineError(
            f"{path}: neither YAML nor JSON",
            hint="name accelerate's .yaml, a DeepSpeed .json or SimpleTuner's config.json",
        )
    if path.suffix.casefold() != ".json":
        found = load_yaml(path)
        note_repeated_keys(path, result)
    else:
        found = load_deepspeed(str(path), None)[1]
    names = {str(name).lstrip("-") for name in found}
    is_kohya = "datasets" in names <= {"general", "datasets"}
    if is_kohya and path.suffix.casefold() == ".json" and context.program is not RUN:
        read_kohya_dataset(path, result)
        return "kohya's datasets"
    if names & {"distributed_type", "compute_environment", "num_machines"}:
        read_accelerate(found, path, result, context)
        return "accelerate"
    scores = {
        "SimpleTuner": len(names & set(SIMPLETUNER)) + 2 * (BLOCK in names) + 9 * is_wrapped(found),
        "DeepSpeed": len(names & {name for name in DEEPSPEED if "." not in name}),
    }
    if scores["SimpleTuner"] > scores["DeepSpeed"] and context.program is RUN:
        read_launch_alone(found, path, result, context)
        return "SimpleTuner"
    if scores["SimpleTuner"] > scores["DeepSpeed"]:
        read_simpletuner(found, path, result, context)
        return "SimpleTuner"
    if scores["DeepSpeed"] == 0 and found:
        raise unknown_key(str(path), next(iter(map(str, found))), [*DEEPSPEED, *ACCELERATE])
    program = context.program if context.program is RUN else trainer()
    read_deepspeed(found, str(path), result, replace(context, program=program))
    return f"DeepSpeed, its autos as the {program.name} fills them"


def check(result: ImportedConfig, where: str) -> None:
    """Check the result against our models; fill missing values with examples."""
    from zerotrain.config.families import LANGUAGE_MODELS
    from zerotrain.config.read import parse_config

    found = nest(result.values)
    run = {"run": "imported", "base": "nano", "phases": [{"name": "train", "until": 1}]}
    data = found.pop("data", {})
    if not {"images", "path", "sources"} & set(data):
        text = found.get("family") in LANGUAGE_MODELS
        data = {"source": "text", "path": "-"} if text else {**data, "images": "-"}
    parse_config({**run, **found, "data": data}, f"{where}, in our form")
