"""A limit of memory (ulimit -v) is one sentence in every command."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from zerotrain import cli
from zerotrain.data.decode import decode, read_size
from zerotrain.export.formats.opening import name_file_in_errors
from zerotrain.export.formats.tensors import report_load_errors
from zerotrain.models.pretrained import loading
from zerotrain.state.external import pickles
from zerotrain.state.external.consistency import reading
from zerotrain.state.external.weight_files import SafeTensors
from zerotrain.state.state import Shards


@pytest.mark.parametrize(
    "said",
    [
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)",
        "Unable to allocate 3.73 GiB for an array with shape (1000000000,) and data type float32",
        "tokenizers.abi3.so: failed to map segment from shared object",
        "std::bad_alloc",
    ],
)
def test_what_libraries_say_is_a_sentence(said: str, monkeypatch, capsys) -> None:
    """Of the error itself, or of one that another library has wrapped."""

    def fail() -> None:
        try:
            raise RuntimeError(said)
        except RuntimeError as error:
            raise ImportError("Failed to import diffusers") from error

    monkeypatch.setattr(cli, "command_line", lambda words: fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"ERROR: memory is used up, or limited: {said}"
    assert hint.startswith("  Hint: see `ulimit -v`")


def test_a_limited_command_ends_with_a_sentence() -> None:
    """No traceback, and no waiting: the first library that is too large for 300 MiB."""
    limit = 300 * 2**20
    code = (
        "from zerotrain import cli; cli.command_line = lambda words: lambda: __import__('torch'); "
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("ERROR: memory is used up, or limited: ")
    assert "Traceback" not in done.stderr


SAID = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000 bytes"


@pytest.mark.parametrize(
    "block",
    [
        lambda folder: loading("weights"),
        lambda folder: report_load_errors(folder),
        lambda folder: name_file_in_errors(folder),
        lambda folder: reading(folder),
    ],
)
def test_too_little_memory_is_no_damage(block: Any, tmp_path: Path) -> None:
    """No sentence asks to download a whole model again."""
    with pytest.raises(RuntimeError, match="can't allocate memory"), block(tmp_path):
        raise RuntimeError(SAID)


def test_a_whole_checkpoint_is_not_called_damaged(tmp_path: Path, monkeypatch) -> None:
    """Where torch maps it, and where safetensors does."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(SAID)

    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(pickles, "_check_cost", lambda path: None)  # in a process of its own
    monkeypatch.setattr(Shards, "file", fail)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        pickles.load(tmp_path / "a.pt")
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        SafeTensors([tmp_path / "a.safetensors"])


@pytest.mark.parametrize("read", [decode, read_size])
def test_a_whole_image_is_no_bad_sample(read: Any, monkeypatch) -> None:
    """A dataset that is prepared with too little memory would lose images."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(MemoryError):
        read(b"an image")
