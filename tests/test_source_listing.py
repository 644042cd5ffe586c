"""A listing of sources is as new as the last edit of any of them, and no newer."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from zerotrain.source_listing import listed, write_listing

OLD, NEW, LATER = 1_000_000_000, 1_100_000_000, 1_200_000_000


@pytest.fixture
def sources(tmp_path: Path, monkeypatch) -> list[str]:
    """Two sources, of which the second is the newer one."""
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("one.py", OLD), ("two.py", NEW)):
        Path(name).write_text(name)
        os.utime(name, (seconds, seconds))
    return ["one.py", "two.py"]


def test_a_new_listing_is_as_old_as_its_newest_source(sources: list[str]) -> None:
    """Whoever removes .snakemake has edited nothing."""
    listing = Path(write_listing("train", sources))
    digest = hashlib.sha256(b"two.py").hexdigest()
    assert listing.read_text().splitlines()[1] == f"{digest}  two.py"
    assert listing.stat().st_mtime == NEW


def test_a_touch_leaves_the_listing_and_an_edit_renews_it(sources: list[str]) -> None:
    """What counts is the content."""
    listing = Path(write_listing("train", sources))
    os.utime("one.py", (LATER, LATER))
    write_listing("train", sources)
    assert listing.stat().st_mtime == NEW
    Path("one.py").write_text("edited")
    os.utime("one.py", (OLD, OLD))
    write_listing("train", sources)
    assert listing.stat().st_mtime > LATER
    assert hashlib.sha256(b"edited").hexdigest() in listing.read_text()


def test_a_listing_stands_for_its_sources(sources: list[str]) -> None:
    """In their place and order; other paths are left as they are."""
    listing = write_listing("train", sources)
    assert listed(["a.json", listing, "b/c.sha256"]) == ["a.json", *sources, "b/c.sha256"]
    assert [path.name for path in Path(listing).parent.iterdir()] == ["train.sha256"]
