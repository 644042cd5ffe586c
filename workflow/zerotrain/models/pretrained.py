"""The one way to transformers' and diffusers' loaders: a folder's own code is never run.

transformers asks on the terminal whether to run the Python files that a config.json names, unless
`trust_remote_code` is given; a test finds each call that does not come through here. Kernels from
the hub are off for all of the package (zerotrain/__init__.py).
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import read_header, read_object, read_shard_names
from zerotrain.errors import PipelineError
from zerotrain.machine.memory_errors import find_out_of_memory
from zerotrain.machine.regular_file import open_to_read
from zerotrain.models.adapter_config import (
    ADAPTER_CONFIG,
    PEFT_PREFIX,
    check_patterns,
    list_layers,
    read_adapter_config,
    read_adapter_header,
)

REFUSED = "trust_remote_code"
"""A word of the message of transformers about code that it would have to run."""
CONFIG, MODEL_INDEX, INDEX = "config.json", "model_index.json", ".safetensors.index.json"
CONFIGS = (
    *(CONFIG, MODEL_INDEX, "scheduler_config.json", "generation_config.json"),
    *("preprocessor_config.json", "tokenizer_config.json"),
)
"""Files that hold keys with values. diffusers would take a name in place of them for a hub id."""
DEPTH = re.compile(r"(^|_)(n_)?(layers?|blocks|depth)(_|$)")
"""Names of the numbers of layers in a config.json: num_hidden_layers, layers_per_block, n_layer."""
TIMESTEPS = re.compile(r"(^|_)timesteps$")
OUT_OF_MEMORY = "OutOfMemoryError"
"""The device's memory; its message is made where the command is known."""
MOST_LAYERS = 1000
"""The deepest known models have 200. A module takes memory and time, even on the meta device."""
MOST_TIMESTEPS = 1_000_000
"""Published schedules have 1,000. Each takes a number of several tables."""
LIBRARIES = ("diffusers", "transformers")
"""Libraries of a model's parts."""
HARMFUL = "the file is damaged or made to harm; take the one that the model was published with"


class DamagedModelError(PipelineError):
    """A library cannot load a model's files."""


def from_pretrained(cls: Any, place: Path, **options: Any) -> Any:
    """Call `cls.from_pretrained`, without code from the folder.

    Args:
        cls: A class of transformers or diffusers.
        place: A folder on this machine.
        **options: Further arguments of the loader.

    Raises:
        PipelineError: the model needs Python code of its own, has more than MOST_LAYERS layers or
            MOST_TIMESTEPS timesteps, names files outside of its folder, or is damaged.
    """
    _check_files(place)
    with loading(str(place)):
        return cls.from_pretrained(place, **options, **_refusal(cls))


def from_config(cls: Any, config: Any, **options: Any) -> Any:
    """Call `cls.from_config`, without code from the folder that the configuration is from.

    Raises:
        PipelineError: the model needs Python code of its own, has more than MOST_LAYERS layers or
            MOST_TIMESTEPS timesteps, does not fit the memory, or its values are damaged.
    """
    place = getattr(config, "name_or_path", "") or CONFIG
    check_sizes(config if isinstance(config, Mapping) else config.to_dict(), place)
    with loading(str(place)):
        try:
            return cls.from_config(config, **options, **_refusal(cls))
        except Exception as error:
            if (message := find_out_of_memory(error)) is None:
                raise
            raise PipelineError(
                f"{place}: describes a model that does not fit the memory ({message})",
                hint="compare its sizes with those that the model was published with; if they are "
                "right, see `ulimit -v`, or take a machine or a job with more memory",
            ) from error


def _check_files(place: Path) -> None:
    """Check the files of a folder that its library opens, and those that it finds by them."""
    for file in (*place.glob("*"), *place.glob("*/*")):
        if file.name in CONFIGS:
            check_sizes(config := read_config(file), file)
            if file.name == MODEL_INDEX:
                check_libraries(config, file)
        elif file.name.endswith(INDEX):
            read_shard_names(file)
        elif file.exists() and not (file.is_file() or file.is_dir()):
            open_to_read(file, follow_links=True).close()  # a pipe would never end
    if (place / ADAPTER_CONFIG).is_file():  # transformers applies it by itself
        headers = [read_header(file, follow_links=True) for file in place.glob("*.safetensors")]
        names = {name.removeprefix(PEFT_PREFIX) for header in headers for name in header.tensors}
        check_patterns(read_adapter_config(place), place / ADAPTER_CONFIG, list_layers(names))


def read_config(file: Path) -> dict[str, Any]:
    """Read a config.json, or another of CONFIGS; it may be a link, as in the hub's cache.

    Raises:
        FileError: it is missing, or no file.
        DocumentError: it is no JSON, or holds no keys with values.
    """
    return read_object(file, follow_links=True, hint="download the model again")


def find_class_name(config: Mapping[str, Any]) -> str | None:
    """Return the class that a config.json of diffusers or transformers names; None if none."""
    architectures = config.get("architectures")
    names = [config.get("_class_name"), *(architectures if isinstance(architectures, list) else ())]
    return next((name for name in names if name and isinstance(name, str)), None)


def check_libraries(index: Mapping[str, Any], file: Path) -> None:
    """Check that the parts in a model_index.json are of LIBRARIES: others would be imported.

    Args:
        index: Its content; a part is a list of a library and a class, or of two nulls.
        file: The file, for the message.

    Raises:
        PipelineError: a part is of another library, or its class is no name.
    """
    for part, entry in index.items():
        if part.startswith("_") or not isinstance(entry, list) or entry == [None, None]:
            continue
        if len(entry) != 2 or entry[0] not in LIBRARIES or not isinstance(entry[1], str):
            raise PipelineError(
                f"{file}: {part} is {entry!r}, not a class of {' or '.join(LIBRARIES)}",
                hint="download the model again; do not use it if you do not know who made it",
            )


def check_sizes(config: Any, file: str | Path) -> None:
    """Check that a model can be built: its numbers of layers and of timesteps.

    Args:
        config: Content of a config.json.
        file: The file, for the message.

    Raises:
        PipelineError: a number is above MOST_LAYERS or MOST_TIMESTEPS.
    """
    if not isinstance(config, Mapping):
        return
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_sizes(value, file)
            continue
        for names, most, of in (
            (DEPTH, MOST_LAYERS, "a model has at most {:,} layers"),
            (TIMESTEPS, MOST_TIMESTEPS, "a schedule has at most {:,} timesteps"),
        ):
            for count in _numbers(value) if names.search(str(name)) else ():
                if count > most:
                    raise PipelineError(
                        f"{file}: {name} is {count}, and {of.format(most)}", hint=HARMFUL
                    )


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one)


def load_peft(model: Any, folder: Path) -> Any:
    """Return peft's model with the adapter of a folder; peft itself refuses the folder's code.

    Raises:
        PipelineError: its settings are damaged or made to harm, or do not fit the model.
    """
    from peft import PeftModel

    check_adapter(model, folder)
    with loading(str(folder)):
        return PeftModel.from_pretrained(model, str(folder))


def check_adapter(model: Any, folder: Path) -> None:
    """Check the settings in a folder of peft, before the model searches for their layers."""
    names = (name for name, _ in model.named_modules())
    check_patterns(read_adapter_config(folder), folder / ADAPTER_CONFIG, names)


def check_lora_file(model: Any, file: Path) -> None:
    """Check the settings in the header of a LoRA's file, as check_adapter does."""
    check_patterns(read_adapter_header(file), file, (name for name, _ in model.named_modules()))


def _refusal(cls: Any) -> dict[str, bool]:
    """Return the argument; models and samplers of diffusers run no code and do not know it."""
    names = {base.__name__ for base in cls.__mro__}
    of_diffusers = cls.__module__.partition(".")[0] == "diffusers"
    return {} if of_diffusers and "DiffusionPipeline" not in names else {REFUSED: False}


@contextlib.contextmanager
def loading(place: str) -> Iterator[None]:
    """Turn what a library raises on a file of others into a sentence, and run none of its code.

    Raises:
        PipelineError: the block raised, and not because of the machine.
    """
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # parts that a library loads itself ask nothing
    try:
        yield
    except ImportError as error:
        raise PipelineError(
            f"{place}: needs a package that is not installed ({_one_line(error)})",
            hint="take the model's weights that are not quantised, or install the package",
        ) from error
    except BaseException as error:
        if not _is_of_file(error):
            raise
        if REFUSED in str(error):
            raise PipelineError(
                f"{place}: is a model with Python code of its own, which is not run",
                hint="choose a model whose class is part of transformers or diffusers",
            ) from error
        raise DamagedModelError(
            f"{place}: cannot be loaded ({type(error).__name__}: {_one_line(error)})",
            hint="a file of it is damaged, or of another version of its library: download the "
            "model again",
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _is_of_file(error: BaseException) -> bool:
    """Return whether an error can be of a file's content, rather than of the machine."""
    if isinstance(error, PipelineError) or find_out_of_memory(error):
        return False
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
        return False
    # By their names: torch is not imported here, and the other is the tokenizers' panic in Rust.
    name = type(error).__name__
    return name == "PanicException" or (isinstance(error, Exception) and name != OUT_OF_MEMORY)
