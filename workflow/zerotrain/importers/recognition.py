"""Which program a pasted command starts, by its script's name or by a key that it alone has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerotrain.errors import PipelineError


@dataclass(frozen=True)
class Marks:
    """What a program's commands have and those of no other program."""

    keys: frozenset[str] = frozenset()
    """Flags of its scripts."""
    scripts: str = "(?!)"
    """A regular expression of its scripts' names without folders, or of its modules."""
    commands: str = "(?!)"
    """A regular expression of its own commands."""


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


SUPPORTED = {
    "trainer": Marks(
        _keys(
            "per_device_train_batch_size per_device_eval_batch_size max_steps logging_steps bf16 "
            "fp16 deepspeed save_strategy eval_strategy evaluation_strategy warmup_ratio"
        )
    ),
    "diffsynth": Marks(
        _keys(
            "dataset_base_path dataset_metadata_path model_paths model_id_with_origin_paths "
            "trainable_models lora_base_model"
        )
    ),
    "simpletuner": Marks(_keys("model_family data_backend_config")),
}
"""The programs whose arguments are read; diffusers' examples are read by their scripts' names."""
UNSUPPORTED = {
    "musubi-tuner": Marks(
        scripts=r"(hv|wan|fpack|zimage|flux_2|flux_kontext|qwen_image)_train.*\.py"
    ),
    "kohya's sd-scripts": Marks(
        _keys(
            "network_module network_dim network_alpha network_args dataset_config save_model_as "
            "max_train_epochs caption_extension in_json"
        ),
        r"(sdxl|sd3|flux|lumina|hunyuan_image|anima)_train.*\.py|fine_tune\.py|"
        r"train_(network|db|control_net|textual_inversion|leco)\.py",
    ),
    "ai-toolkit": Marks(scripts=r"run\.py \S+\.(ya?ml|json)"),
    "OneTrainer": Marks(_keys("config_path secrets_path"), r"train_remote\.py"),
    "LLaMA-Factory": Marks(
        _keys("finetuning_type dataset_dir cutoff_len"), r"llamafactory.*", "llamafactory-cli|lmf"
    ),
    "axolotl": Marks(scripts=r"axolotl\..*", commands="axolotl"),
    "TRL": Marks(
        _keys("use_peft dataset_text_field"),
        r"(sft|dpo|grpo|kto|orpo|ppo|reward_modeling)(_\w+)?\.py|trl\..*", "trl",
    ),
    "ms-swift": Marks(_keys("train_type tuner_type rlhf_type"), r"swift\..*", "swift|megatron"),
}  # fmt: skip
"""Programs that are refused by their names."""
ADVICE = (
    "write its values into `zerotrain new`'s file; `launch import` reads its accelerate or "
    "DeepSpeed file, and the command without the script's flags"
)


def find_program(script: str, arguments: Iterable[str]) -> str | None:
    """Return which of SUPPORTED a script belongs to; None if it has no mark of any.

    Raises:
        PipelineError: it belongs to a program that is not read, or has marks of several.
    """
    check_script(script)
    given = set(arguments)
    for name, marks in UNSUPPORTED.items():
        if marks.keys & given:
            raise refused_program(script, name)
    found = {name: sorted(marks.keys & given) for name, marks in SUPPORTED.items()}
    found = {name: keys for name, keys in found.items() if keys}
    if len(found) > 1:
        flags = " and ".join(f"--{keys[0]}" for keys in found.values())
        raise PipelineError(
            f"{script}: {flags} belong to different programs", hint="paste a command of one program"
        )
    return next(iter(found), None)


def check_script(script: str, file: str = "") -> None:
    """Check that a script is of no program that is not read.

    Args:
        script: Its path or module.
        file: What follows it, if that is one file.

    Raises:
        PipelineError: it is.
    """
    for name, marks in UNSUPPORTED.items():
        if re.fullmatch(marks.scripts, f"{script.rpartition('/')[2]} {file}".rstrip()):
            raise refused_program(f"{script} {file}".rstrip(), name)


def check_command(words: Sequence[str]) -> None:
    """Refuse the commands of programs that are not read.

    Args:
        words: The words of the command, whose first is the program's or python's.

    Raises:
        PipelineError: it is one of theirs.
    """
    for name, marks in UNSUPPORTED.items():
        if re.fullmatch(marks.commands, words[0].rpartition("/")[2]):
            raise refused_program(" ".join(words[:2]), name)


def refused_program(command: str, name: str) -> PipelineError:
    """Return the error for a command of a program that is not read."""
    return PipelineError(f"{command}: a command of {name}, which is not read", hint=ADVICE)


def unknown_script(script: str) -> PipelineError:
    """Return the error for a script with arguments that no program is recognised by."""
    known = ", ".join(f"--{min(marks.keys)}" for marks in SUPPORTED.values())
    return PipelineError(
        f"{script}: not a script that is read: diffusers' examples are known by their names, other "
        f"programs by flags such as {known}",
        hint=ADVICE,
    )
