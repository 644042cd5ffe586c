"""Contents of another program's checkpoint that are not read: files, keys, an adapter's settings.

They are accounted for: what is known not to matter is passed over, and the rest is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import Names
from zerotrain.models.adapter_config import ADAPTER_CONFIG
from zerotrain.models.base import PROCESSOR_FILES, TOKENIZER_FILES
from zerotrain.state.checkpoint_path import OPTIMIZERS
from zerotrain.state.external.documents import ModelFile
from zerotrain.state.external.progress import RECORDS

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
