"""kill -9 at any moment of an encoding: the next run ends in the same bytes; nothing is lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.builders.caching import SIDE, Run, contents, load_fake_family

from zerotrain.artifact import MANIFEST
from zerotrain.cache.reuse import orphan_shards
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset


class Kills:
    """A cache of one dataset, which is encoded for another by processes that are killed."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)
        self.folder = folder
        self.cache = folder / "cache"
        for path in self.run.images.iterdir():
            if int(path.stem) >= 12:
                path.unlink()
        self._prepare("before")
        self.encode("before")
        self.start = folder / "start"
        shutil.copytree(self.cache, self.start)
        for number in (2, 5, 11):
            Image.new("RGB", (20, 20), (number, 0, 0)).save(self.run.images / f"{number:02d}.png")
        (self.run.images / "07.txt").write_text("a tower")
        self._prepare("after")
        self.moments = self.killed(sys.maxsize)
        self.expected = contents(self.cache)

    def _prepare(self, name: str) -> None:
        prepare_dataset(self.run.config({}).data, self.folder / name)

    def encode(self, name: str) -> None:
        """Encode a dataset in this process."""
        dataset, base = self.folder / name, self.folder / "base"
        settings = CacheSettings.of(self.run.config({}))
        cache_latents(settings, SIDE, dataset, base, self.cache)

    def killed(self, moment: int) -> int:
        """Encode the second dataset in a process that is killed at a call of a C function.

        Returns:
            The number of calls; 0 if it was killed.
        """
        counted = self.folder / "calls"
        counted.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            calls = 0

            def count(frame: object, event: str, argument: object) -> None:
                nonlocal calls
                calls += event == "c_call"
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

            try:
                sys.setprofile(count)
                self.encode("after")
                sys.setprofile(None)
                counted.write_text(str(calls))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return int(counted.read_text()) if counted.is_file() else 0


@pytest.fixture
def kills(tmp_path: Path, monkeypatch) -> Kills:
    load_fake_family(monkeypatch)
    return Kills(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.soak)])
def test_kills_at_seeded_moments_end_in_the_same_manifest(kills, count, capsys):
    """And in what was published before: back to the first dataset, nothing is encoded."""
    draw = random.Random(count)
    for _ in range(count):
        shutil.rmtree(kills.cache)
        shutil.copytree(kills.start, kills.cache)
        killed = 0
        for moment in (draw.randrange(kills.moments), draw.randrange(kills.moments)):
            killed += kills.killed(moment) == 0
        assert killed
        kills.encode("after")
        assert contents(kills.cache) == kills.expected
        assert (kills.cache / MANIFEST).is_file()
        assert orphan_shards(kills.cache)
        capsys.readouterr()
        kills.encode("before")
        said = capsys.readouterr().out
        assert "encoded 0 of 12 latents, 0 of 4 captions" in said
        assert contents(kills.cache) == contents(kills.start)
