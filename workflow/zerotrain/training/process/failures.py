"""Known failures of libraries, drivers and the system, each with a cause and a hint.

The patterns match messages of torch, gloo, NCCL, CUDA, DeepSpeed and safetensors. An unknown
failure keeps its traceback: a fault of the program must not look like one of the machine.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass

from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.machine import memory_errors

DEVICE_MEMORY = "device_memory"
HOST_MEMORY = "host_memory"
LOST = "lost"
TIMEOUT = "timeout"
MEMORY = (DEVICE_MEMORY, HOST_MEMORY)
EXIT_FAULT = 1
"""Exit code if a process was killed, hangs, or has a fault: the configuration is not wrong."""
CONTINUES = "the same command continues from the newest checkpoint"


@dataclass(frozen=True)
class Failure:
    """Kind of failure."""

    kind: str
    what: str
    hint: str
    words: str
    """Regular expression for the libraries' messages."""
    errnos: tuple[int, ...] = ()
    code: int = EXIT_USER_ERROR


KNOWN = (
    Failure(
        DEVICE_MEMORY,
        "the device ran out of memory",
        "raise gradient_accumulation_steps, set gradient_checkpointing: true, or offload",
        r"(CUDA|HIP|NPU) out of memory|CUDA error: out of memory|MPS backend out of memory|"
        r"CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|NCCL.*(cudaMalloc|out of memory)",
    ),
    Failure(
        "shared_memory",
        "shared memory (/dev/shm) is full",
        "`docker run --shm-size 16g` or `--ipc host`; without a container, clear /dev/shm",
        r"insufficient shared memory|unable to (open|mmap|allocate) shared memory|"
        r"creating shared memory segment|unable to write to file </torch_|/dev/shm.*No space left",
    ),
    Failure(
        HOST_MEMORY,
        "the host's memory is used up",
        "raise gradient_accumulation_steps, end what else runs here, or take a machine or a job "
        "with more memory; offload to the CPU needs 16 bytes a trained parameter",
        memory_errors.WORDS.pattern,
        (errno.ENOMEM,),
    ),
    Failure(
        "disk_full",
        "no space is left for what training writes",
        "make room, or lower keep; what was half written does not count: the newest checkpoint is "
        "whole, and the same command continues from it",
        r"No space left on device|Disk quota exceeded|\(os error (28|122)\)",
        (errno.ENOSPC, errno.EDQUOT),
    ),
    Failure(
        "read_only",
        "a folder or file that training reads or writes is read-only or not ours",
        "`ls -l` shows whose it is, `mount` what is mounted `ro`, often after a disk's error "
        "(`dmesg`); fix it: "
        + CONTINUES,
        r"Read-only file system|\(os error 30\)",
        (errno.EROFS, errno.EACCES, errno.EPERM),
    ),
    Failure(
        "storage",
        "the disk or the network file system fails",
        "`dmesg` and the file system's server say why; afterwards " + CONTINUES,
        r"Input/output error|Stale file handle|\(os error (5|116)\)",
        (errno.EIO, errno.ESTALE),
    ),
    Failure(
        "port",
        "the port on which the processes meet is taken",
        "remove launch.main_process_port, and a free one is taken; under torchrun give "
        "--master-port, under srun set MASTER_PORT",
        r"EADDRINUSE|[Aa]ddress already in use",
        (errno.EADDRINUSE,),
    ),
    Failure(
        TIMEOUT,
        "a process did not come to where the others wait for it",
        "a long wait that is meant needs a higher launch.ddp_timeout; else look at that process's "
        "machine, disk and GPU (`dmesg`, `nvidia-smi`): " + CONTINUES,
        r"Timed out waiting \d+ms for|Application timeout caused pair closure|"
        r"wait timeout after \d+ms|Timed out after \d+ seconds waiting for clients|"
        r"Watchdog caught collective operation timeout|\) ran for \d+ milliseconds before timing "
        r"out|failed to pass monitoredBarrier|Socket Timeout",
        code=EXIT_FAULT,
    ),
    Failure(
        LOST,
        "the connection to another process is lost",
        "that process has ended: its machine, or the lines above, say why; " + CONTINUES,
        r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|"
        r"ncclRemoteError|remote process exited or there was a network error|"
        r"Connection was likely closed|recvValue failed|failed to (recv|send), got 0 bytes",
        (errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED),
        EXIT_FAULT,
    ),
    Failure(
        "device_lost",
        "the GPU has failed",
        "`nvidia-smi -q` and `dmesg` (lines with Xid) tell more; reset the GPU or take another, "
        "with CUDA_VISIBLE_DEVICES or another node: " + CONTINUES,
        r"uncorrectable ECC error|GPU has fallen off the bus|device is lost|Xid \(|"
        r"CUDA error: unspecified launch failure|CUDA error: unknown error|"
        r"launch timed out and was terminated",
        code=EXIT_FAULT,
    ),
    Failure(
        "device_build",
        "this build of torch or of a compiled op has no code for the GPU",
        "install the torch that `zerotrain doctor` names, then `zerotrain build_ops`",
        r"no kernel image is available|is not compatible with the current PyTorch installation|"
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|"
        r"named symbol not found|invalid device function",
    ),
    Failure(
        "no_device",
        "a process found no GPU of its own",
        "one process needs one GPU: compare launch.num_processes with what `nvidia-smi` and "
        "CUDA_VISIBLE_DEVICES show; a GPU in exclusive mode serves one process",
        r"No CUDA GPUs are available|invalid device ordinal|Found no NVIDIA driver|"
        r"devices? is/are busy or unavailable|all CUDA-capable devices are busy",
    ),
    Failure(
        "device_assert",
        "an operation on the GPU was given a value out of range",
        "most often a token or class beyond the model's, or an index that is no number: train a "
        "step with `CUDA_LAUNCH_BLOCKING=1`, whose traceback names the operation",
        r"device-side assert triggered|illegal memory access|misaligned address",
        code=EXIT_FAULT,
    ),
    Failure(
        "no_operation",
        "torch has no such operation for this device and precision",
        "try another mixed_precision (bf16, fp16 or no); on Apple's MPS set "
        "PYTORCH_ENABLE_MPS_FALLBACK=1",
        r"not (currently )?implemented for '?\w|Could not run 'aten::|"
        r"not currently supported on the MPS",
    ),
    Failure(
        "op_build",
        "an op of DeepSpeed's could not be compiled or loaded",
        "`zerotrain build_ops` builds it and shows the compiler's first error",
        r"Unable to JIT load the|Error building extension|Ninja is required to load|"
        r"CUDA_HOME does not exist|undefined symbol",
    ),
)  # fmt: skip
"""The first match counts."""


def recognise(error: BaseException) -> Failure | None:
    """Return the failure that an exception, or one of its causes, stands for."""
    if isinstance(error, MemoryError):
        return _find_kind(HOST_MEMORY)
    if type(error).__name__ == "OutOfMemoryError":  # torch's class, which is not imported here
        return _find_kind(DEVICE_MEMORY)
    if failure := recognise_text(str(error)):
        return failure
    if isinstance(error, OSError):
        return next((one for one in KNOWN if error.errno in one.errnos), None)
    return recognise(error.__cause__) if error.__cause__ else None


def recognise_text(text: str) -> Failure | None:
    """Return the failure that a message or the end of a log reports."""
    return next((one for one in KNOWN if re.search(one.words, text)), None)


def recognise_log(lines: Iterable[str]) -> tuple[Failure, str] | None:
    """Return the first known failure in a log's last lines, with its line.

    Lost connections count last: they are a consequence in the processes that remain after one ends.
    """
    matches = [(one, line.strip()) for line in lines if (one := recognise_text(line))]
    return next((pair for pair in matches if pair[0].kind != LOST), matches[0] if matches else None)


def format_failure(failure: Failure, phase: str, text: str) -> PipelineError:
    """Return a failure as ERROR and Hint, with the first words of the library's message."""
    return PipelineError(f"phase {phase}: {failure.what}: {shorten(text)}", hint=failure.hint)


def shorten(text: str) -> str:
    """Return a library's message in one line, without its advice and its stack trace."""
    words = " ".join(text.split())
    for advice in (" Of the allocated", " CUDA kernel errors might", " Exception raised from",
                   " This is typically caused", " GLHF"):  # fmt: skip
        words = words.partition(advice)[0]
    words = re.sub(r"^(\[[^\]]*(?:/|enforce)[^\]]*\]\s*)+", "", words)
    return words[:400]


def _find_kind(kind: str) -> Failure:
    return next(one for one in KNOWN if one.kind == kind)
