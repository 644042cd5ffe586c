"""The built-in example."""

from __future__ import annotations

import hashlib
import shutil

import pytest
import yaml
from sklearn.datasets import load_digits

from zerotrain.config.data import DataConfig
from zerotrain.data import digits
from zerotrain.data.open import open_source, source_files
from zerotrain.data.source import DIGITS
from zerotrain.errors import PipelineError

DATA = DataConfig(source="digits")


def test_every_scan_is_captioned_in_words():
    entries = open_source(DATA).found()
    assert len(entries) == 1797
    assert [entry.file for entry in entries] == sorted(entry.file for entry in entries)
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    assert [entry.caption for entry in entries] == [
        f"a handwritten digit {words[digit]}" for digit in load_digits().target
    ]
    assert source_files(DATA) == ["data/digits.csv.gz"]


def test_images_are_the_package_s_pixels_without_loss():
    source = open_source(DATA)
    grey = [round(value * 255 / 16) for value in load_digits().images[5].reshape(-1)]
    assert source.sha256("scan-0005") == hashlib.sha256(bytes(grey)).hexdigest()
    image = source.image_of("scan-0005", source.sha256("scan-0005"))
    assert (image.mode, image.size) == ("RGB", (32, 32))
    assert len({source.sha256(f"scan-{index:04d}") for index in range(1797)}) == 1797


def test_an_unknown_scan_is_refused():
    with pytest.raises(PipelineError, match="digits: scan-9999: no such scan"):
        open_source(DATA).image_of("scan-9999", "")


def test_the_examples_file_is_tracked_and_the_package_s_own_takes_its_place(tmp_path, monkeypatch):
    """git, DVC, the code and scikit-learn name the same bytes; where the project's file is absent
    the package's is read."""
    (tracked,) = yaml.safe_load(DIGITS.with_name("digits.csv.gz.dvc").read_text())["outs"]
    assert tracked["md5"] == digits.MD5 == hashlib.md5(DIGITS.read_bytes()).hexdigest()
    assert tracked["size"] == DIGITS.stat().st_size
    monkeypatch.chdir(tmp_path)
    assert source_files(DATA) == []
    assert hashlib.md5(digits.digits_file().read_bytes()).hexdigest() == digits.MD5


def test_other_scans_are_refused(tmp_path, monkeypatch):
    """A file of another content is no example; the message names it and both hashes."""
    own = tmp_path / DIGITS
    own.parent.mkdir()
    shutil.copy2(DIGITS, own)
    with own.open("ab") as stream:
        stream.write(b"1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(digits, "_scans", digits._scans.__wrapped__)
    with pytest.raises(PipelineError, match=f"{DIGITS}: md5 .*, the example's scans have 9b33"):
        open_source(DATA).found()
