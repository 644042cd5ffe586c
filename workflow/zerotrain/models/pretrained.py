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

REFUSED = "trust_remote_code"
"""A word of the message of transformers about code that it would have to run."""
CONFIG = "config.json"
DEPTH = re.compile(r"(^|_)(n_)?(layers?|blocks|depth)(_|$)")
"""Names of the numbers of layers in a config.json: num_hidden_layers, layers_per_block, n_layer."""
MOST_LAYERS = 1000
"""The deepest known models have 200. A module takes memory and time, even on the meta device."""


def from_pretrained(cls: Any, place: Path, **options: Any) -> Any:
    """Call `cls.from_pretrained`, without code from the folder.

    Args:
        cls: A class of transformers or diffusers.
        place: A folder on this machine.
        **options: Further arguments of the loader.

    Raises:
        PipelineError: the model needs Python code of its own, or has more than MOST_LAYERS layers.
    """
    for file in (place / CONFIG, *place.glob(f"*/{CONFIG}")):
        # The loader reports a damaged file.
        with contextlib.suppress(OSError, ValueError, RecursionError):
            check_depth(json.loads(file.read_text(encoding="utf-8")), file)
    with _no_code(str(place)):
        return cls.from_pretrained(place, **options, **_refusal(cls))


def from_config(cls: Any, config: Any, **options: Any) -> Any:
    """Call `cls.from_config`, without code from the folder that the configuration is from.

    Raises:
        PipelineError: the model needs Python code of its own, or has more than MOST_LAYERS layers.
    """
    place = getattr(config, "name_or_path", "") or CONFIG
    check_depth(config if isinstance(config, Mapping) else config.to_dict(), place)
    with _no_code(place):
        return cls.from_config(config, **options, **_refusal(cls))


def check_depth(config: Any, file: str | Path) -> None:
    """Check that a model can be built: not more layers than MOST_LAYERS.

    Args:
        config: Content of a config.json.
        file: The file, for the message.

    Raises:
        PipelineError: a number of layers is larger.
    """
    if not isinstance(config, Mapping):
        return
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_depth(value, file)
        elif DEPTH.search(str(name)):
            for count in _numbers(value):
                if count > MOST_LAYERS:
                    raise PipelineError(
                        f"{file}: {name} is {count}, and a model has at most {MOST_LAYERS} layers",
                        hint="the file is damaged or made to harm; take the one that the model was "
                        "published with",
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

    with _no_code(str(folder)):
        return PeftModel.from_pretrained(model, str(folder))


def _refusal(cls: Any) -> dict[str, bool]:
    """Return the argument; models and samplers of diffusers run no code and do not know it."""
    names = {base.__name__ for base in cls.__mro__}
    of_diffusers = cls.__module__.partition(".")[0] == "diffusers"
    return {} if of_diffusers and "DiffusionPipeline" not in names else {REFUSED: False}


@contextlib.contextmanager
def _no_code(place: str) -> Iterator[None]:
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # parts that a library loads itself ask nothing
    try:
        yield
    except ValueError as error:
        if REFUSED not in str(error):
            raise
        raise PipelineError(
            f"{place}: is a model with Python code of its own, which is not run",
            hint="choose a model whose class is part of transformers or diffusers",
        ) from error
