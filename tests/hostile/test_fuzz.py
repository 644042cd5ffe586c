"""Damaged files of others: every reader reads them or refuses them in a sentence."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hostile.mutations import damaged
from tests.hostile.readers import READERS

from zerotrain.errors import PipelineError

SECONDS = 5
"""Longest time of one input."""
BYTES = 2**30
"""Most memory of one input."""
COUNT = int(os.environ.get("FUZZ_COUNT", "100"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))


class Hang(BaseException):
    """An input took too long."""


def _raise_hang(*_: object) -> None:
    raise Hang


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """End the block with an error after SECONDS or at BYTES more memory."""
    signal.signal(signal.SIGALRM, _raise_hang)
    faulthandler.dump_traceback_later(4 * SECONDS, exit=True)  # of code that no signal interrupts
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    taken = pages * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (taken + BYTES, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        faulthandler.cancel_dump_traceback_later()


def fuzz(name: str, folder: Path, count: int, seed: int) -> Counter[str]:
    """Read damaged inputs; where other errors than PipelineError were raised, and how often.

    Args:
        name: Of the reader.
        folder: An empty folder. If an input ends the process, it is left there.
        count: Number of inputs.
        seed: Input number n of a seed is always the same.
    """
    reader, whole, tried = READERS[name], folder / "whole", folder / "tried"
    whole.mkdir()
    reader.write(whole)
    files = sorted(path for path in whole.glob(reader.files) if path.is_file())
    found: Counter[str] = Counter()
    refused, started = 0, time.monotonic()
    for file in files:  # imports what the limit of memory does not count
        shutil.copytree(whole, tried)
        with contextlib.suppress(PipelineError):
            reader.read(tried, tried / file.relative_to(whole))
        shutil.rmtree(tried)
    for number in range(count):
        draw = random.Random(f"{name} {seed} {number}")
        chosen = draw.choice(files)
        shutil.copytree(whole, tried, copy_function=os.link)
        changed = tried / chosen.relative_to(whole)
        changed.unlink()
        changed.write_bytes(damaged(draw, chosen.name, chosen.read_bytes()))
        try:
            with limits():
                reader.read(tried, changed)
        except PipelineError:
            refused += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            found[describe(error, chosen.name)] += 1
        shutil.rmtree(tried)
    print(f"{refused} of {count} refused in {time.monotonic() - started:.0f} s")
    return found


def describe(error: BaseException, file: str) -> str:
    """Describe an error by its kind and by the last line of the package before it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/zerotrain/" in frame.filename][-1:]
    place = "".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours)
    return f"{type(error).__name__} at {place}, of {file}: {str(error)[:80]!r}"


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    """FUZZ_COUNT inputs of FUZZ_SEED; `make fuzz` takes 10,000 of each reader."""
    print(f"{name}: FUZZ_SEED={SEED} FUZZ_COUNT={COUNT}")
    assert fuzz(name, tmp_path, COUNT, SEED) == {}
