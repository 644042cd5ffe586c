"""Read damaged inputs with limits of time and memory, and list what is no sentence.

As a program it does so for a reader of template_readers.py: `python -m tests.hostile.fuzzing READER
FOLDER COUNT SEED` prints the findings as JSON. Each chat template has a fork of the process that
reads it, and a process with torch forks five times as slowly as one without.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile.mutations import damaged
from tests.hostile.reader import Reader
from tests.hostile.structures import FORMS, hostile
from tests.hostile.template_readers import TEMPLATE_READERS

from zerotrain.errors import PipelineError

SECONDS = 5
"""Longest time of one input."""
BYTES = 2**30
"""Most memory of one input."""
MOST_LETTERS = 1000
"""Of a message."""


class Hang(BaseException):
    """An input took too long."""


def _raise_hang(*_: object) -> None:
    raise Hang


@contextlib.contextmanager
def limits(seconds: int) -> Iterator[None]:
    """End the block with an error after so many seconds or at BYTES more memory."""
    signal.signal(signal.SIGALRM, _raise_hang)
    faulthandler.dump_traceback_later(4 * seconds, exit=True)  # of code that no signal interrupts
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    taken = pages * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (taken + BYTES, hard))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        faulthandler.cancel_dump_traceback_later()


def fuzz(
    name: str, reader: Reader, folder: Path, count: int, seed: int, seconds: int = SECONDS
) -> Counter[str]:
    """Read damaged inputs; where other errors than PipelineError were raised, and how often.

    Args:
        name: Of the reader.
        reader: The reader.
        folder: An empty folder. If an input ends the process, it is left there.
        count: Number of inputs.
        seed: Input number n of a seed is always the same.
        seconds: Longest time of an input.
    """
    whole, tried, outside = folder / "whole", folder / "tried", folder / "outside"
    whole.mkdir()
    outside.mkdir()
    reader.write(whole)
    (outside / "victim").write_text("[]", encoding="utf-8")
    before = _listing(outside)
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
        _damage(draw, chosen, changed, outside, reader.opens)
        try:
            with limits(seconds):
                reader.read(tried, changed)
        except PipelineError as error:
            refused += 1
            if len(str(error)) > MOST_LETTERS:
                found[f"a message of over {MOST_LETTERS} letters, of {chosen.name}"] += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            found[describe(error, chosen.name)] += 1
        shutil.rmtree(tried)
        if _listing(outside) != before:
            found[f"a file outside was changed, by {chosen.name}"] += 1
            before = _listing(outside)
    print(f"{refused} of {count} refused in {time.monotonic() - started:.0f} s")
    return found


def _damage(draw: random.Random, whole: Path, changed: Path, outside: Path, opens: bool) -> None:
    """Write a damaged file, or put a link, a pipe or a folder in its place, or nothing."""
    act = draw.random()
    if act < (0.4 if str(whole).endswith((*FORMS,)) else 0.85):
        changed.write_bytes(damaged(draw, whole.name, whole.read_bytes()))
    elif act < 0.9 or not opens:
        changed.write_bytes(hostile(draw, str(whole), whole.read_bytes()))
    else:
        draw.choice(PLACES)(changed, outside)


PLACES: list[Callable[[Path, Path], None]] = [
    lambda path, outside: path.symlink_to(outside / "victim"),
    lambda path, _: path.symlink_to(path.name),
    lambda path, outside: path.symlink_to(outside / "missing"),
    lambda path, _: path.symlink_to("/dev/zero"),
    lambda path, outside: path.symlink_to(outside),
    lambda path, _: os.mkfifo(path),
    lambda path, _: path.mkdir(),
    lambda path, _: None,
]


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    return [
        (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in os.scandir(folder)
    ]


def describe(error: BaseException, file: str) -> str:
    """Describe an error by its kind and by the last line of the package before it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/zerotrain/" in frame.filename][-1:]
    place = "".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours)
    return f"{type(error).__name__} at {place}, of {file}: {str(error)[:80]!r}"


if __name__ == "__main__":
    name, folder, count, seed = sys.argv[1:]
    found = fuzz(name, TEMPLATE_READERS[name], Path(folder), int(count), int(seed))
    print(json.dumps(found))
