"""Damaged files of others: every reader reads them or refuses them in a sentence."""

from __future__ import annotations

import os
import random
import shutil
import signal
import traceback
from collections import Counter
from pathlib import Path

import pytest
from tests.hostile.mutations import damaged
from tests.hostile.readers import READERS

from zerotrain.errors import PipelineError

SECONDS = 5
"""Longest time of one input."""
COUNT = int(os.environ.get("FUZZ_COUNT", "100"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))


class Hang(BaseException):
    """An input took too long."""


def _raise_hang(*_: object) -> None:
    raise Hang


def fuzz(name: str, folder: Path, count: int, seed: int) -> Counter[str]:
    """Read damaged inputs; where other errors than PipelineError were raised, and how often.

    Args:
        name: Of the reader.
        folder: An empty folder.
        count: Number of inputs.
        seed: Input number n of a seed is always the same.
    """
    reader, whole, tried = READERS[name], folder / "whole", folder / "tried"
    whole.mkdir()
    reader.write(whole)
    files = sorted(path for path in whole.glob(reader.files) if path.is_file())
    found: Counter[str] = Counter()
    former = signal.signal(signal.SIGALRM, _raise_hang)
    for number in range(count):
        draw = random.Random(f"{name} {seed} {number}")
        chosen = draw.choice(files)
        shutil.copytree(whole, tried)
        changed = tried / chosen.relative_to(whole)
        changed.write_bytes(damaged(draw, chosen.name, chosen.read_bytes()))
        signal.alarm(SECONDS)
        try:
            reader.read(tried, changed)
        except PipelineError:
            pass
        except (Exception, Hang) as error:
            found[describe(error, chosen.name)] += 1
        finally:
            signal.alarm(0)
            shutil.rmtree(tried)
    signal.signal(signal.SIGALRM, former)
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
