"""The table of processes: which of them are Snakemakes, and whose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zerotrain.machine.processes import find_parents, is_snakemake


@pytest.mark.parametrize(
    ("line", "is_it"),
    [
        ("/env/bin/snakemake --cores all", True),
        ("/env/bin/python3.11 /env/bin/snakemake --cores all", True),
        ("/env/bin/python -m snakemake --cores all", True),
        ("python -u -X dev -m snakemake", True),
        ("code work/snakemake", False),
        ("bash -c /env/bin/snakemake", False),
        ("python -m pytest tests/snakemake", False),
        ("python train.py work/snakemake", False),
        ("python -c pass snakemake", False),
        ("python", False),
        ("", False),
    ],
)
def test_snakemake_is_recognised_by_its_program(line: str, is_it: bool) -> None:
    """A folder of this name among the words of an editor or a shell is none."""
    assert is_snakemake(line.split()) is is_it


def test_the_snakemake_above_a_process_is_found(tmp_path: Path) -> None:
    """A process between them that only names a file like it is none."""
    script = "import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    call = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', {!r}, 'my/snakemake'])\n"
    above = tmp_path / "snakemake"
    above.write_text(call.format(call.format(script)), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(above.resolve())], stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout
        pid = int(caller.stdout.readline())
        found = [one for one in find_parents(pid) if is_snakemake(one.words)]
        assert [one.pid for one in found] == [caller.pid]
        assert found[0].is_running()
        os.kill(pid, signal.SIGKILL)
    assert not found[0].is_running()
    assert [*find_parents(pid)] == []
