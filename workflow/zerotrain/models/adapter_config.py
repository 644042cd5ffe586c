"""Settings of a peft adapter from others, tried before peft uses them.

peft searches the name of each layer for the settings' regular expressions, without a limit of time.
Python's own engine does it there, so another one cannot tell whether it ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import (
    DocumentError,
    check_object,
    check_type,
    parse_json,
    read_header,
    read_json,
)
from zerotrain.errors import PipelineError
from zerotrain.machine.confined import Confined, RaisedError

ADAPTER_CONFIG = "adapter_config.json"
"""The file in a folder of peft."""
PEFT_PREFIX = "base_model.model."
"""Of the names in its file of tensors."""
METADATA = "lora_adapter_metadata"
"""Key of the settings in the header of diffusers' file."""
HINT = "copy or download the adapter again; do not use it if you do not know who made it"
PLAIN = re.compile(r"[\w.-]*")
"""Texts that are searched for in a moment."""
WHOLE = ("target_modules", "exclude_modules", "feedforward_modules", "target_parameters")
"""Settings that are a regular expression for the whole name of a layer, or a list of names."""
FORMS = {
    "layers_pattern": r"(?:^|.*?\.){}\.(\d+)\..*",
    "modules_to_save": r"(^|.*\.){}($|\..*)",
}
"""What peft makes of an entry of a setting's."""
FORM = r"(.*\.)?({})"
"""What it makes of the keys of rank_pattern, alpha_pattern and their like."""


@dataclass(frozen=True)
class AdapterSettings:
    """The settings that are of one form in all methods."""

    peft_type: str | None = None
    r: int | list[int] | dict[str, int] | None = None
    lora_alpha: float | None = None
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    feedforward_modules: str | list[str] | None = None
    target_parameters: str | list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    layers_pattern: str | list[str] | None = None
    modules_to_save: str | list[str] | None = None
    base_model_name_or_path: str | None = None


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read the settings in a folder of peft.

    Raises:
        FileError: they are missing, or no file.
        DocumentError: they are no JSON, or a setting has another type.
    """
    path = folder / ADAPTER_CONFIG
    return _check_types(read_json(path, follow_links=True, hint=HINT), path)


def read_adapter_header(file: Path) -> dict[str, Any]:
    """Read the settings in the header of a file of safetensors; none if it has none.

    Raises:
        FileError: it is missing, or no file.
        DocumentError: it is no such file, or a setting has another type.
    """
    header = read_header(file, follow_links=True, hint=HINT)
    if odd := next((name for name in header.tensors if not PLAIN.fullmatch(name)), None):
        raise DocumentError(file, f"{odd!r} is the name of no layer's tensor", hint=HINT)
    return parse_settings(header.metadata, file)


def parse_settings(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    """Parse the settings in a header's metadata; none if it has none.

    Raises:
        DocumentError: they are no JSON, or a setting has another type.
    """
    where = f"{file}: {METADATA}"
    return _check_types(parse_json(metadata.get(METADATA, "{}"), where, hint=HINT), where)


def check_patterns(settings: Mapping[str, Any], where: Path, layers: Iterable[str]) -> None:
    """Check that the settings' regular expressions are ones, and find the layers in a moment.

    Args:
        settings: As read_adapter_config or read_adapter_header returns them.
        where: Their file, for messages.
        layers: Names of all layers, which peft will compare.

    Raises:
        PipelineError: one is invalid, or takes longer than any honest one; or a setting would have
            peft import a module of the settings' choice.
    """
    if settings.get("megatron_config") is not None:
        raise PipelineError(f"{where}: megatron_config is set, which is not read", hint=HINT)
    patterns = [*_list_patterns(settings)]
    if not patterns:
        return
    trial = Confined(partial(_search, patterns), f"search for the patterns of {where}")
    try:
        trial("\n".join(layers))
    except RaisedError as error:
        raise PipelineError(f"{where}: {error}", hint=HINT) from error
    finally:
        trial.close()


def list_layers(names: Iterable[str]) -> set[str]:
    """Return the names of the modules that have tensors of these names, and of those above."""
    return {
        name[:end]
        for name in names
        for end in (place for place, letter in enumerate(name) if letter == ".")
    }


def _check_types(found: Any, where: object) -> dict[str, Any]:
    settings = check_object(found, where, hint=HINT)
    # A header has the settings of several models, such as unet.r and text_encoder.r.
    plain = {name.rpartition(".")[2]: value for name, value in settings.items()}
    check_type(plain, AdapterSettings, where, hint=HINT)
    return settings


def _list_patterns(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the whole of each regular expression, as peft completes it."""
    for name, value in settings.items():
        key = name.rpartition(".")[2]
        form, texts = "{}", [value] if isinstance(value, str) and key in WHOLE else []
        if key in FORMS and value:
            form, texts = FORMS[key], [value] if isinstance(value, str) else value
        elif key.endswith("_pattern") and isinstance(value, dict):
            form, texts = FORM, [*value]
        yield from ((name, form.format(one)) for one in texts if not PLAIN.fullmatch(one))


def _search(patterns: Iterable[tuple[str, str]], layers: str) -> str:
    for name, pattern in patterns:
        try:
            compiled = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{name} {pattern!r} is no regular expression: {error}") from error
        for layer in layers.split("\n"):
            compiled.fullmatch(layer)
    return ""
