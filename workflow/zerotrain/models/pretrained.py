"""The one way to transformers' and diffusers' loaders: a folder's own code is never run.

transformers asks on the terminal whether to run the Python files that a config.json names, unless
`trust_remote_code` is given; a test finds each call that does not come through here. Kernels from
the hub are off for all of the package (zerotrain/__init__.py).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.machine.memory_errors import find_out_of_memory

REFUSED = "trust_remote_code"
"""A word of the message of transformers about code that it would have to run."""
CONFIG = "config.json"
CONFIGS = (
    *(CONFIG, "model_index.json", "scheduler_config.json", "generation_config.json"),
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
            MOST_TIMESTEPS timesteps, or is damaged.
    """
    for name in CONFIGS:
        for file in (place / name, *place.glob(f"*/{name}")):
            if file.is_file():
                check_sizes(read_config(file), file)
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


def read_config(file: Path) -> dict[str, Any]:
    """Read a config.json, or another of CONFIGS.

    Raises:
        PipelineError: it cannot be read, or holds no keys with values.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__}, not keys with values")
    except (OSError, ValueError, RecursionError) as error:
        raise PipelineError(
            f"{file}: cannot be read ({error})", hint="download the model again"
        ) from error
    return found


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
    """Return peft's model with the adapter of a folder; peft itself refuses the folder's code."""
    from peft import PeftModel

    with loading(str(folder)):
        return PeftModel.from_pretrained(model, str(folder))


def _refusal(cls: Any) -> dict[str, bool]:
    """Return the argument; models and samplers of diffusers run no code and do not know it."""
    names = {base.__name__ for base in cls.__mro__}
    of_diffusers = cls.__module__.partition(".")[0] == "diffusers"
    return {} if of_diffusers and "DiffusionPipeline" not in names else {REFUSED: False}


@contextlib.contextmanager
def loading(place: str) -> Iterator[None]:
    """Turn what a library raises on a file of others into a sentence, and run none of its code.

    Raises:
        PipelineError: the block raised, and not because of the machine or a missing package.
    """
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # parts that a library loads itself ask nothing
    try:
        yield
    except BaseException as error:
        if not _is_of_file(error):
            raise
        if REFUSED in str(error):
            raise PipelineError(
                f"{place}: is a model with Python code of its own, which is not run",
                hint="choose a model whose class is part of transformers or diffusers",
            ) from error
        cause = " ".join(str(error).split())[:300]
        raise DamagedModelError(
            f"{place}: cannot be loaded ({type(error).__name__}: {cause})",
            hint="a file of it is damaged, or of another version of its library: download the "
            "model again",
        ) from error


def _is_of_file(error: BaseException) -> bool:
    """Return whether an error can be of a file's content, rather than of the machine."""
    if isinstance(error, PipelineError | ImportError) or find_out_of_memory(error):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return False
    # By their names: torch is not imported here, and the other is the tokenizers' panic in Rust.
    name = type(error).__name__
    return name == "PanicException" or (isinstance(error, Exception) and name != OUT_OF_MEMORY)
