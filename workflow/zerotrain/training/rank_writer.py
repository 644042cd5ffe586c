"""One process's part of a checkpoint, written by a thread while the engine's tensors lie still."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zerotrain.checkpoint import Fragment, span, tensor_name, write_rank, write_rank_files
from zerotrain.training.staging import Staging, staged_bytes


@dataclass
class Written:
    """What a process tells of its part; it travels to the first one."""

    spans: dict[str, list[int]] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    """sha256 of its files, where it was computed on the way."""
    errno: int | None = None
    """What the system said, where the part could not be written."""


def write_now(folder: Path, rank: int, fragments: Iterable[Fragment]) -> Written:
    """Write a part at once: fragments whose memory goes to the next one when that is asked for."""
    try:
        return Written(write_rank(folder, rank, fragments))
    except OSError as error:
        return Written(errno=error.errno or 0)


class RankWriter:
    """Writes a part in a thread. Until `free` has returned, its tensors must not be changed."""

    def __init__(self, folder: Path, rank: int, fragments: Iterable[Fragment]) -> None:
        """Begin to write into a draft folder; the tensors may lie on any device."""
        held = list(fragments)
        self._place = folder, rank
        self._lent = {
            tensor_name(fragment.name, slot): tensor.detach()
            for fragment in held
            for slot, tensor in fragment.slots.items()
        }
        self._sizes = {name: tensor.numel() for name, tensor in self._lent.items()}
        self._copies: dict[str, torch.Tensor] = {}
        self._reading = False
        self._cancelled = False
        self._turn = threading.Condition()
        self._written = Written({fragment.name: span(fragment) for fragment in held})
        self._error: BaseException | None = None
        self._beside = _beside_the_computation(self._lent)
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def writing(self) -> bool:
        """Whether it is not all on disk yet."""
        return self._thread.is_alive()

    def free(self, allowance: int) -> None:
        """Return once the engine's tensors may be changed.

        The last ones are copied, up to `allowance` bytes; for the others it waits. The thread comes
        from the other side, so that both work on it.
        """
        with self._turn:
            staging = Staging(min(allowance, sum(map(staged_bytes, self._lent.values()))))
        while True:
            with self._turn:
                name = next(reversed(self._lent), None)
                if name is None:
                    self._turn.wait_for(lambda: not self._reading)
                    return
                # Under the lock, so that the thread does not ask for it meanwhile.
                copied = staging.copy(self._lent[name])
                if copied is None:
                    self._turn.wait()
                else:
                    self._copies[name] = copied
                    del self._lent[name]

    def result(self) -> Written:
        """Wait until the part is on disk, or could not be written; what is to be told of it."""
        self._thread.join()
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        return self._written

    def cancel(self) -> None:
        """Give up: nobody will publish it."""
        self._cancelled = True
        self._thread.join()

    def _write(self) -> None:
        try:
            with self._beside:
                self._written.known = write_rank_files(*self._place, self._sizes, self._take)
        except BaseException as error:  # the loop asks for the result
            self._error = error
            self._written.errno = (error.errno or 0) if isinstance(error, OSError) else None
        finally:
            with self._turn:
                self._lent.clear()
                self._copies.clear()
                self._reading = False
                self._turn.notify_all()

    def _take(self, name: str) -> torch.Tensor:
        if self._cancelled:
            raise InterruptedError
        with self._turn:
            self._reading = name in self._lent
            tensor = self._lent.pop(name) if self._reading else self._copies.pop(name)
            self._turn.notify_all()
        return tensor.flatten()


def _beside_the_computation(tensors: dict[str, torch.Tensor]) -> AbstractContextManager[object]:
    """On a GPU: a stream of its own, which begins where the computation has come to."""
    device = next((t.device for t in tensors.values() if t.device.type == "cuda"), None)
    if device is None:
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
