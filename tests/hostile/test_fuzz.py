"""Damaged files of others: every reader reads them or refuses them in a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hostile.fuzzing import fuzz
from tests.hostile.readers import READERS
from tests.hostile.template_readers import TEMPLATE_READERS

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("FUZZ_COUNT", "25"))
ALL = {**READERS, **TEMPLATE_READERS}
SEED = int(os.environ.get("FUZZ_SEED", "1"))


LONG = "DeepSpeed checkpoint"
"""DeepSpeed's engine takes long to write whole ones."""


@pytest.mark.parametrize(
    "name", [*(name for name in ALL if name != LONG), pytest.param(LONG, marks=pytest.mark.slow)]
)
def test_a_corpus_of_damaged_files(name: str, tmp_path: Path) -> None:
    """Always the same few of each reader."""
    assert fuzz(name, ALL[name], tmp_path, count=20, seed=0, seconds=60) == {}


@pytest.mark.soak
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    """FUZZ_COUNT inputs of FUZZ_SEED; `make fuzz` takes 10,000 of each reader."""
    print(f"{name}: FUZZ_SEED={SEED} FUZZ_COUNT={COUNT}")
    assert fuzz(name, READERS[name], tmp_path, COUNT, SEED) == {}


@pytest.mark.soak
@pytest.mark.parametrize("name", TEMPLATE_READERS)
def test_damaged_templates_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    """In a process that forks fast."""
    print(f"{name}: FUZZ_SEED={SEED} FUZZ_COUNT={COUNT}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.fuzzing", name, tmp_path, str(COUNT), str(SEED)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    *said, found = done.stdout.splitlines() or [""]
    print(*said, sep="\n")
    assert done.returncode == 0
    assert json.loads(found) == {}
