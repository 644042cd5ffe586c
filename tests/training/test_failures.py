"""Known failures are reported with a cause and what to change; unknown ones keep their
traceback."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from tests.builders.phases import make_phase
from tests.training.endings import start
from torch import distributed

from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.launch.files import write_run_yaml
from zerotrain.machine.child_process import SUPERVISOR
from zerotrain.training import rank
from zerotrain.training.process import ending, failures
from zerotrain.training.process.failures import (
    EXIT_FAULT,
    KNOWN,
    recognise,
    recognise_log,
    recognise_text,
)


def raised(act: Any) -> BaseException:
    """The exception that a call ends with."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        act()
    return caught.value


def _port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        distributed.TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=0.2))


def _no_process_comes() -> None:
    distributed.TCPStore(
        "127.0.0.1", 0, world_size=2, is_master=True, timeout=timedelta(seconds=0.2)
    )


def _no_process_says() -> None:
    store = distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=0.2), wait_for_workers=False
    )
    store.get("never")


def _full() -> None:
    with Path("/dev/full").open("wb") as file:
        file.write(b"x" * 100_000)


def _is_full() -> bool:
    try:
        _full()
    except OSError:
        return True
    return False


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda: torch.empty(2**60), "host_memory"),
        (lambda: np.empty(2**50), "host_memory"),
        (_full, "disk_full"),
        (_port_in_use, "port"),
        (_no_process_comes, "timeout"),
        (_no_process_says, "timeout"),
        (lambda: torch.zeros(2, device="cuda"), "no_device"),
        (lambda: torch.zeros(2, dtype=torch.bool).softmax(0), "no_operation"),
    ],
)  # fmt: skip
def test_what_libraries_really_raise(act: Any, kind: str) -> None:
    """Each is the library's own exception, of this machine."""
    if kind == "no_device" and (torch.cuda.is_available() or not torch.backends.cuda.is_built()):
        pytest.skip("needs a torch for CUDA and no GPU")
    if act is _full and not _is_full():
        pytest.skip("this system's /dev/full takes what it is given")
    found = recognise(raised(act))
    assert found is not None
    assert found.kind == kind


TEXTS = {
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total": "device_memory",
    "CUDA error: out of memory": "device_memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "device_memory",
    "MPS backend out of memory (MPS allocated: 17.9 GB, other": "device_memory",
    "unable to open shared memory object </torch_31_1> in read-write mode": "shared_memory",
    "DataLoader worker is killed by signal: Bus error. It is possible that dataloader's workers "
    "are out of shared memory / insufficient shared memory (shm)": "shared_memory",
    "Error while creating shared memory segment /dev/shm/nccl-f2x (size 9637888)": "shared_memory",
    "I/O error: No space left on device (os error 28)": "disk_full",
    "[Errno 122] Disk quota exceeded": "disk_full",
    "I/O error: Read-only file system (os error 30)": "read_only",
    "[Errno 5] Input/output error": "storage",
    "[Errno 116] Stale file handle": "storage",
    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: "
    "false, code: -98, name: EADDRINUSE, message: address already in use": "port",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, "
    "NumelIn=112, NumelOut=112, Timeout(ms)=1800000) ran for 1800010 milliseconds": "timeout",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms "
    "for recv operation to complete": "timeout",
    "Application timeout caused pair closure": "timeout",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:35518. This is typically caused by a remote worker crashing.": "lost",
    "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.": "lost",
    "CUDA error: uncorrectable ECC error encountered": "device_lost",
    "CUDA error: unspecified launch failure": "device_lost",
    "NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus.": "device_lost",
    "CUDA error: no kernel image is available for execution on the device": "device_build",
    "The NVIDIA driver on your system is too old (found version 11040)": "device_build",
    "No CUDA GPUs are available": "no_device",
    "CUDA error: invalid device ordinal": "no_device",
    "CUDA error: all CUDA-capable devices are busy or unavailable": "no_device",
    "CUDA error: device-side assert triggered": "device_assert",
    "CUDA error: an illegal memory access was encountered": "device_assert",
    "The operator 'aten::_fft' is not currently implemented for the MPS device.": "no_operation",
    "Could not run 'aten::empty.memory_format' with arguments from the 'X' backend": "no_operation",
    "Unable to JIT load the async_io op due to it not being compatible": "op_build",
    "CUDA_HOME does not exist, unable to compile CUDA op(s)": "op_build",
}


@pytest.mark.parametrize(("text", "kind"), TEXTS.items())
def test_what_libraries_say(text: str, kind: str) -> None:
    """Their words, as users have reported them; found through an exception that wraps them, too."""
    found = recognise(RuntimeError(text))
    assert found is not None
    assert found.kind == kind
    wrapped = ValueError("in a worker")
    wrapped.__cause__ = RuntimeError(text)
    assert recognise(wrapped) == found


def test_every_failure_has_been_seen() -> None:
    """None is listed whose words no test has."""
    assert {one.kind for one in KNOWN} == {*TEXTS.values(), "host_memory"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ECONNRESET])
def test_an_error_of_the_system_is_known_by_its_number(number: int) -> None:
    """In whatever language the system speaks."""
    assert recognise(OSError(number, "anders")) is not None


@pytest.mark.parametrize(
    "error",
    [ValueError("shape mismatch"), FileNotFoundError(errno.ENOENT, "no such file"),
     KeyError("w"), RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")],
)  # fmt: skip
def test_a_fault_of_the_program_is_none_of_these(error: Exception) -> None:
    """It must keep its traceback."""
    assert recognise(error) is None


def test_the_first_cause_of_a_log_counts() -> None:
    """What others say about the process that they lost comes after it."""
    lost, timeout = (next(text for text, kind in TEXTS.items() if kind == name)
                     for name in ("lost", "timeout"))  # fmt: skip
    found = recognise_log(["step 3", lost, timeout, lost])
    assert found is not None
    assert found[1] == timeout
    assert recognise_log(["step 3"]) is None
    found = recognise_log([lost])
    assert found is not None
    assert found[0].kind == failures.LOST


def test_a_sentence_has_the_librarys_words_without_its_advice() -> None:
    """One line, as long as it needs to be."""
    text = next(text for text, kind in TEXTS.items() if kind == "lost")
    found = recognise_text(text)
    assert found is not None
    error = failures.format_failure(found, "main", f"  {text}\n  GLHF!")
    assert error.what == (
        "phase main: the connection to another process is lost: Connection closed by peer "
        "[127.0.0.1]:35518."
    )


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "step-4/w"), EXIT_USER_ERROR,
         "no space is left for what training writes: [Errno 28] No space left on device"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "step-4"), EXIT_USER_ERROR,
         "a folder or file that training reads or writes is read-only or not ours: [Errno 30]"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error "
                         "28)"), EXIT_USER_ERROR, "no space is left for what training writes"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might"),
         EXIT_FAULT, "the GPU has failed: CUDA error: uncorrectable ECC error encountered\n"),
        (PipelineError("step-3: 2 bytes", hint="again"), EXIT_USER_ERROR, "step-3: 2 bytes"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
                                "capacity of 8.00 GiB. Of the allocated memory 7 GiB is PyTorch's"),
         EXIT_USER_ERROR, "ERROR: phase plain: the device ran out of memory: CUDA out of memory. "
         "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB.\n"),
    ],
)  # fmt: skip
def test_a_process_ends_with_a_sentence_and_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: Exception, code: int, said: str,
) -> None:  # fmt: skip
    """One ERROR, one Hint, and exit.json for the stage."""
    assert start(tmp_path, monkeypatch, error) == code
    text = capsys.readouterr().err
    assert said in text
    assert text.count("ERROR: ") == text.count("Hint: ") == 1
    left = json.loads((tmp_path / "exit.json").read_text())
    assert left["code"] == code
    assert left["reason"] in text
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    assert ("`zerotrain switch cats --to zero2_offload`" in text) == out_of_memory


def test_a_fault_of_the_program_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no word that the stage could take for an answer."""
    with pytest.raises(ValueError, match="shapes"):
        start(tmp_path, monkeypatch, ValueError("shapes"))
    assert not (tmp_path / "exit.json").exists()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_connection_that_is_lost_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    processes: str,
) -> None:  # fmt: skip
    """A single process has lost no other: it is a server's, and keeps its traceback. One of two
    says in a line what it has lost, and leaves the answer to the stage."""
    lost = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(SUPERVISOR, "1")
    monkeypatch.setattr(rank, "end_with_parent", lambda: None)
    monkeypatch.setattr(ending.os, "_exit", lambda code: sys.exit(code))
    with pytest.raises(ConnectionResetError if processes == "1" else SystemExit):
        start(tmp_path, monkeypatch, lost)
    said = "" if processes == "1" else "rank 0: [Errno 104] Connection reset by peer\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "exit.json").exists()


def test_a_device_out_of_memory_names_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's figures, no traceback, exit code 2."""

    def full(**_: Any) -> bool:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 "
            "GiB. Of the allocated memory 7 GiB is allocated by PyTorch"
        )

    monkeypatch.setattr(rank, "run", full)
    (tmp_path / "launch").mkdir()
    write_run_yaml(make_phase(), tmp_path / "launch" / "run.yaml")
    words = {"launch": tmp_path / "launch", "base": "b", "cache": "c", "progress": tmp_path}
    rank.main([word for key, value in words.items() for word in (f"--{key}", str(value))])
    said = (
        "phase plain: the device ran out of memory: CUDA out of memory. Tried to allocate 2.00 "
        "GiB. GPU 0 has a total capacity of 8.00 GiB."
    )
    assert json.loads((tmp_path / "exit.json").read_text()) == {"code": 2, "reason": said}
    text = capsys.readouterr().err
    assert f"ERROR: {said}\n" in text
    assert "`zerotrain switch cats --to zero2_offload`" in text
