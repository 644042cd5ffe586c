"""zerotrain generate: answers to a prompt from exported weights of any format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from zerotrain.config.models import EvaluateConfig
from zerotrain.data.conversation import PROMPT, Message
from zerotrain.errors import PipelineError
from zerotrain.export.formats.opening import (
    check_whole,
    name_file_in_errors,
    only_file,
    prefix_before,
    tensor_names,
)
from zerotrain.export.options import GenerateOptions
from zerotrain.machine.device import device_type
from zerotrain.models.adapter_config import read_adapter_config
from zerotrain.models.base import MODEL_INDEX
from zerotrain.models.families import load_family
from zerotrain.models.families.language import LanguageFamily, answer
from zerotrain.models.families.lora import PEFT_ADAPTER, PEFT_CONFIG
from zerotrain.models.families.model_family import CONFIG
from zerotrain.models.families.model_tensors import stored_tensors
from zerotrain.models.families.positions import longest_prompt
from zerotrain.models.pretrained import check_adapter, from_pretrained, loading

Opened = tuple[LanguageFamily, Any, Any]
"""Family, model and tokenizer."""


def generate(options: GenerateOptions) -> list[str]:
    """Answer a prompt; the answer of a seed does not depend on how many are made.

    Raises:
        PipelineError: the prompt is too long, or the weights cannot be opened.
    """
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if options.number == 1 else 1.0
    family, model, tokenizer = open_language_model(options.weights, options.base, device_type())
    turns = [Message("system", options.system)] if options.system else []
    turns.append(Message(PROMPT if options.raw else "user", options.prompt))
    length, most = len(family.prompt(tokenizer, turns, sys.maxsize)), longest_prompt(model)
    if length > most:
        raise PipelineError(
            f"the prompt has {length} tokens, and the model has positions for {most}",
            hint="shorten it",
        )
    config = EvaluateConfig(max_new_tokens=options.max_new_tokens, batch_size=1)
    answers = []
    for seed in range(options.seed, options.seed + options.number):
        torch.manual_seed(seed)
        answers += answer(
            family,
            model,
            tokenizer,
            [turns],
            config,
            max_length=sys.maxsize,
            temperature=temperature,
        )
    return answers


def open_language_model(path: Path, base: Path | None, device: str) -> Opened:
    """Open a language model on a device with the loaders of transformers and peft.

    Args:
        path: A folder in transformers' layout, with or without an adapter, a folder of peft, an
            exported folder, or its safetensors file.
        base: Folder of the base model in transformers' layout, for formats that have only a part;
            default: the folder that a peft adapter names.
        device: Device to put it on; in float32 on a CPU, else in bfloat16.

    Raises:
        PipelineError: there is nothing to open, the base is missing or superfluous, names fit no
            format, or a file differs from its manifest.
    """
    check_whole(path, base)
    if (path / MODEL_INDEX).is_file():
        raise PipelineError(
            f"{path}: is a model of images", hint=f"zerotrain sample {path} PROMPT makes them"
        )
    if (path / CONFIG).is_file():
        if base is not None:
            raise PipelineError(f"--base: {path} is a whole model already", hint="omit --base")
        return _open_folder(path, device)
    folder = path if path.is_dir() else path.parent
    if (folder / PEFT_CONFIG).is_file():
        named = read_adapter_config(folder).get("base_model_name_or_path")
        family, model, tokenizer = _open_folder(_read_base(base, path, named), device)
        check_adapter(model, folder)
        with loading(str(folder)), name_file_in_errors(folder / PEFT_ADAPTER):
            model.load_adapter(str(folder))
        return family, model.eval(), tokenizer
    file = only_file(path, CONFIG)
    family, model, tokenizer = _open_folder(_read_base(base, path, None), device)
    _load_file(model, file)
    return family, model, tokenizer


def _open_folder(folder: Path, device: str) -> Opened:
    """Load a model in transformers' layout; its configuration decides whether it is seq2seq."""
    config = from_pretrained(transformers.AutoConfig, folder)
    family: Any = load_family("seq2seq_lm" if config.is_encoder_decoder else "causal_lm")
    return family, family.load_for_answers(folder, device), family.load_tokenizer(folder)


def _read_base(base: Path | None, path: Path, named: str | None) -> Path:
    """Return the base's folder, after checking that it is a model without an adapter."""
    if base is None and named and (Path(named) / CONFIG).is_file():
        base = Path(named)
        check_whole(base, None)
    hint = "add --base FOLDER: the model that the training started from, such as results/RUN/base"
    if base is None:
        of = f" of {named}" if named else ""
        raise PipelineError(f"{path}: is a part of a model, and the rest{of} is needed", hint=hint)
    if not (base / CONFIG).is_file():
        raise PipelineError(
            f"--base: {base} has no {CONFIG}, so it is not a model in transformers' layout",
            hint=hint,
        )
    if (base / PEFT_CONFIG).is_file():
        raise PipelineError(f"--base: {base} has an adapter of its own, {PEFT_CONFIG}", hint=hint)
    return base


def _load_file(model: Any, file: Path) -> None:
    """Load a file's tensors into the model; it has only the first of tied ones."""
    prefix = prefix_before(tensor_names(file), set(model.state_dict()), file)
    state = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    if missing := sorted(stored_tensors(model).keys() - state.keys()):
        raise PipelineError(
            f"{file}: {missing[0]} is missing, and {len(missing) - 1} others",
            hint="name the base that the training started from, or export the weights again",
        )
    with name_file_in_errors(file):
        model.load_state_dict(state, strict=False)
