"""The files of another program's checkpoint besides its tensors: progress, and what is not read.

Step and epoch are read where trainers record them: files, headers of weights, names. Sources: HF's
Trainer (trainer_state.json), SimpleTuner (training_state.json), train_network.py of kohya's
sd-scripts (train_state.json), InternalModelSaverMixin of OneTrainer (meta.json), and
BaseSDTrainProcess of ai-toolkit (training_info in the header of weights).

Files, keys and an adapter's settings that are not read are accounted for: what is known not to
matter is passed over, and the rest is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import Names, check_object, parse_json, read_bytes
from zerotrain.models.adapter_config import ADAPTER_CONFIG
from zerotrain.models.base import PROCESSOR_FILES, TOKENIZER_FILES
from zerotrain.state.checkpoint_path import BACKUP_RECORD, OPTIMIZERS
from zerotrain.state.external.consistency import AGAIN, STEP_FILES, read_number
from zerotrain.state.external.ranks import ModelFile

OF_STEP = re.compile(r"(?:^|[-_])(?:step|checkpoint)[-_]?(\d+)(?:-state)?$")
"""The step at the end of a name; kohya's scripts put `-state` behind it."""
RECORDS = {
    **dict.fromkeys(STEP_FILES, ("", "global_step", "epoch")),
    "train_state.json": ("", "current_step", "current_epoch"),
    BACKUP_RECORD: ("train_progress", "global_step", "epoch"),
}
"""Files in which trainers record step and epoch: the section, and the keys of both."""
INFO = "training_info"


@dataclass(frozen=True)
class Progress:
    """What a checkpoint says of its training, and where.

    Args:
        step: Updates of the weights; None if nothing says it.
        epoch: The epoch; None if nothing says it.
        source: The file, header or name that says it.
    """

    step: int | None = None
    epoch: float | None = None
    source: str = ""

    def describe(self, optimizer: str, counted: int) -> str:
        """Describe the step that a checkpoint counts as.

        Args:
            optimizer: The optimizer's file.
            counted: Its own count, which holds if nothing else says a step.
        """
        if self.step is None:
            if counted:
                return f"step {counted:,} of {optimizer}"
            return "step 0: no file, header, name or optimizer says it"
        epoch = "" if self.epoch is None else f" and epoch {self.epoch:g}"
        return f"step {self.step:,}{epoch} of {self.source}"


def read_progress(folder: Path) -> Progress:
    """Read step and epoch of a folder: of the first file that has a step, or of its name.

    Raises:
        PipelineError: a file is damaged, or its values are no numbers.
    """
    for name, (section, *keys) in RECORDS.items():
        path = folder / name
        if not path.is_file():
            continue
        text = read_bytes(path, follow_links=True, hint=AGAIN)
        values = check_object(parse_json(text, path, hint=AGAIN, cells=True), path, hint=AGAIN)
        values = values.get(section, {}) if section else values  # a loss in it may be NaN
        found = _read(values, keys[0], keys[1], path, name)
        if found.step is not None:
            return found
    return read_name(folder.resolve().name, "the folder's name")


def read_file_progress(path: Path, header: Mapping[str, str]) -> Progress:
    """Read step and epoch of a file of weights: of its header, of its name or its folder's.

    Raises:
        PipelineError: the header's record is damaged.
    """
    if INFO in header:
        where = f"{path}: {INFO}"
        values = check_object(parse_json(header[INFO], where, hint=AGAIN), where, hint=AGAIN)
        return _read(values, "step", "epoch", where, f"{INFO} in the header of {path.name}")
    own = read_name(path.stem, "the file's name")
    return (
        own if own.step is not None else read_name(path.resolve().parent.name, "its folder's name")
    )


def read_name(name: str, source: str) -> Progress:
    """Read the step at the end of a name."""
    found = OF_STEP.search(name)
    return Progress(int(found[1]), None, source) if found else Progress()


def _read(values: Any, step: str, epoch: str, where: Path | str, source: str) -> Progress:
    if not isinstance(values, dict):
        return Progress()
    numbers = [
        None if values.get(key) is None else read_number(values[key], where, key)
        for key in (step, epoch)
    ]
    return Progress(None if numbers[0] is None else int(numbers[0]), numbers[1], source)


MOST_NAMES = 12
READ = (
    *(name.partition("/")[0] for name in OPTIMIZERS),
    *RECORDS,
    ADAPTER_CONFIG,
    *("scaler.pt", "scheduler.bin", "scheduler.pt", "random_states_*.pkl", "rng_state*.pth"),
    *("latest", "latest_universal", "*_model_states.pt", "*_optim_states.pt", "zero"),
)
"""Files of accelerate, HF's Trainer and DeepSpeed that a reader opens, or compares with another."""
OWN_DATA = "a run draws its own samples in its own order"
OF_MODEL = "it describes the model, which the base gives, or the program"
IRRELEVANT = {
    **dict.fromkeys(("sampler.bin", "sampler_*.bin", "dl_state_dict*.bin"), OWN_DATA),
    **dict.fromkeys((*TOKENIZER_FILES, *PROCESSOR_FILES, "tokenizer*"), OF_MODEL),
    **dict.fromkeys(("config.json", "generation_config.json", "model_index.json"), OF_MODEL),
    **dict.fromkeys(("scheduler_config.json", "training_args.bin", "*.index.json"), OF_MODEL),
    **dict.fromkeys(("zero_to_*.py", "*.md", ".gitattributes", "events.out.tfevents.*"), OF_MODEL),
    **dict.fromkeys(("optimizer_1.bin", "*_ema", "model_[0-9]*.safetensors"), "named by itself"),
}
"""Files that do not matter, and why."""
OWN_SCHEDULE = "a run has its own schedule"
OF_ENGINE = "it describes the engine, which every launch sets up for itself"
IRRELEVANT_IN_MODEL_FILE = {
    "lr_scheduler": OWN_SCHEDULE,
    "data_sampler": OWN_DATA,
    "random_ltd": OWN_DATA,
    **dict.fromkeys(("ds_config", "ds_version", "optimizer", "mp_world_size"), OF_ENGINE),
    **dict.fromkeys(("sparse_tensor_module_names", "checkpoint_parallel_dimensions"), OF_ENGINE),
    "universal_checkpoint_info": OF_ENGINE,
}
"""Keys of DeepSpeed's model file that are not compared or kept, and why."""
OF_TRAINING = "it chose how the adapter began or was trained, not what its tensors do"
IRRELEVANT_IN_ADAPTER = {
    **dict.fromkeys(("task_type", "auto_mapping", "peft_version", "revision"), OF_TRAINING),
    **dict.fromkeys(("base_model_name_or_path", "inference_mode", "runtime_config"), OF_TRAINING),
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config"), OF_TRAINING),
    **dict.fromkeys(("megatron_core", "qalora_group_size", "ensure_weight_tying"), OF_TRAINING),
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias"),
        "the names of the tensors say it",
    ),
    "fan_in_fan_out": "it says how the base stores its weights",
}
"""Settings of an adapter that do not change what its tensors do, and why."""


def list_files(folder: Path, used: Iterable[Path]) -> list[str]:
    """Return sentences on the files of a checkpoint's folder that no reader opens.

    Args:
        folder: The folder.
        used: The files that were read; those in a folder below account for that folder.
    """
    names = Names(sorted(path.name for path in folder.iterdir()))
    inside = (path.relative_to(folder).parts for path in used if path.is_relative_to(folder))
    names.use(*(parts[0] for parts in inside if parts))
    patterns = (*READ, *IRRELEVANT)
    names.use(*(n for n in names.leftovers() if any(fnmatchcase(n, one) for one in patterns)))
    return [*_sentences("", names.leftovers(), "not read")]


def list_keys(model: Mapping[str, Any], path: Path) -> list[str]:
    """Return sentences on the keys of DeepSpeed's model file that its program put there.

    Args:
        model: The file's content.
        path: The file.
    """
    names = Names(model)
    names.use(*ModelFile.model_fields)
    names.ignore(IRRELEVANT_IN_MODEL_FILE)
    return [*_sentences(f"{path.name}: ", names.leftovers(), "the program's own value, not read")]


def has_effect(setting: str) -> bool:
    """Return whether a setting of an adapter may change what its tensors do."""
    chose = setting in IRRELEVANT_IN_ADAPTER or setting.startswith("init_")
    return not chose and not setting.endswith("dropout")


def list_settings(settings: Mapping[str, Any], where: Path, read: Iterable[str]) -> list[str]:
    """Return sentences on the settings of an adapter that have an effect and are not read.

    Args:
        settings: Its settings, by peft's names.
        where: Their file.
        read: The settings that a reader uses.
    """
    given = {name for name, value in settings.items() if value not in (None, False, {}, [])}
    names = Names(name for name in settings if name in given and has_effect(name))
    names.use(*read)
    return [*_sentences(f"{where.name}: ", names.leftovers(), "a setting that is not read")]


def _sentences(where: str, names: list[str], why: str) -> Iterator[str]:
    yield from (f"{where}{name}: {why}" for name in names[:MOST_NAMES])
    if more := len(names[MOST_NAMES:]):
        yield f"{where}{more} more: {why}"
