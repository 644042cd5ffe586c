"""Removal of needless work at every start of DeepSpeed: it takes seconds before the first step."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
from collections.abc import Callable
from typing import Any

import cpuinfo
import torch

from zerotrain.artifact.documents import read_object
from zerotrain.machine.compiled_ops import ops_folder
from zerotrain.machine.regular_file import write_text

MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
PROCESSOR = "processor.json"
"""File in the folder of the compiled ops, which is specific to this processor."""


def import_muon() -> None:
    """Import DeepSpeed's Muon as deepspeed.initialize would, but leave its functions uncompiled.

    Decorating them imports all of torch's compiler, and nothing here uses them.
    """
    compiler, torch.compile = torch.compile, _skip_compilation  # type: ignore[assignment]
    try:
        importlib.import_module(MUON)
    finally:
        torch.compile = compiler


def _skip_compilation(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return _skip_compilation if function is None else function


def remember_processor() -> None:
    """Make cpuinfo inspect the processor only once.

    An inspection runs programs for a second or two, and each op that DeepSpeed loads makes one.
    """
    if getattr(cpuinfo.get_cpu_info, "__module__", "").startswith(cpuinfo.__name__):
        cpuinfo.get_cpu_info = functools.cache(
            functools.partial(_read_or_detect, cpuinfo.get_cpu_info)
        )


def _read_or_detect(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    path = ops_folder() / PROCESSOR
    with contextlib.suppress(OSError, ValueError):
        return read_object(path)
    processor = look()
    draft = path.with_name(f"{PROCESSOR}.new-{os.getpid()}")
    with contextlib.suppress(OSError):  # the folder may be read-only
        write_text(draft, json.dumps(processor))
        draft.replace(path)
    return processor
