"""Loading of torch.save files without running code from their pickles."""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.state.external import records


class Record:
    """A stand-in for another program's object: its attributes without its code."""

    def __new__(cls, *arguments: Any) -> Record:
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def _numpy_scalar(dtype: Record, data: bytes = b"") -> float | int | None:
    code = getattr(dtype, "arguments", ("",))[0]
    formats = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i", "b1": "<?"}
    return struct.unpack(formats[code], data)[0] if code in formats else None


_ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def _enum_member(stand_in: type, name: str) -> int | str:
    """Read an enum member that Python 3.11.0 to 3.11.3 pickled as getattr(class, name)."""
    return _ZERO_STAGES.get(name, name) if stand_in is int else name


_STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_enum_member, "builtins.getattr"),
    (_enum_member, "getattr"),
    (str, "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum"),
    (str, "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile"),
    *(
        (Record, name)
        for name in (
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.utils.tensor_fragment.fragment_address",
            "deepspeed.utils.tensor_fragment.tensor_fragment",
            "argparse.Namespace",
            "pathlib.PosixPath",
            "pathlib.WindowsPath",
            "numpy.dtype",
            "numpy.ndarray",
        )
    ),
    *(
        (stand_in, f"numpy.{core}.{name}")
        for core in ("core", "_core")
        for stand_in, name in (
            (_numpy_scalar, "multiarray.scalar"),
            (Record, "multiarray._reconstruct"),
        )
    ),
]
"""Classes in real checkpoints of DeepSpeed and accelerate, in addition to torch's."""


def load(path: Path, *, trust_pickle: bool = False) -> Any:
    """Load a torch.save file, with tensors mapped from the file.

    Classes other than torch's and those above are refused unless `trust_pickle`; before that no
    code from the file runs. The file's bytes are checked against its checksums first, which a
    mapped read skips.

    Raises:
        PipelineError: the file is missing, truncated or damaged, or names a class that is not
            listed.
    """
    if not path.is_file():
        raise PipelineError(
            f"{path}: no such file", hint="the checkpoint is incomplete; copy it again, whole"
        )
    mapped = records.is_zip(path)  # files from before torch 1.6 cannot be mapped
    if mapped:
        records.check_records(path)
    arguments: dict[str, Any] = {"map_location": "cpu", "mmap": mapped}
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, weights_only=True, **arguments)
    except pickle.UnpicklingError as error:
        if not trust_pickle:
            raise _refusal(path, error) from error
    except Exception as error:  # damaged bytes can raise anything
        raise _unreadable(path, error) from error
    try:
        return torch.load(path, weights_only=False, **arguments)
    except Exception as error:  # code in a pickle can raise anything
        raise _unreadable(path, error) from error


def _refusal(path: Path, error: Exception) -> PipelineError:
    named = re.search(r"GLOBAL (\S+)", str(error))
    what = f"the class {named[1]}" if named else "what cannot be read without running code"
    return PipelineError(
        f"{path}: its pickle asks for {what}, and a pickle can run any program",
        hint="--trust-pickle, if you trust who made it",
    )


def _unreadable(path: Path, error: Exception) -> PipelineError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return PipelineError(
        f"{path}: truncated or no file of torch.save, {path.stat().st_size} bytes ({first})",
        hint="copy the checkpoint again, or use an older one",
    )
