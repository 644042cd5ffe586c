"""The built-in example."""

from __future__ import annotations

import hashlib

import pytest
from sklearn.datasets import load_digits

from zerotrain.config import DataConfig
from zerotrain.data.source import open_source, source_files
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
    assert source_files(DATA) == []


def test_images_are_the_package_s_pixels_without_loss():
    source = open_source(DATA)
    grey = [round(value * 255 / 16) for value in load_digits().images[5].reshape(-1)]
    assert source.sha256("scan-0005") == hashlib.sha256(bytes(grey)).hexdigest()
    image = source.image("scan-0005")
    assert (image.mode, image.size) == ("RGB", (32, 32))
    assert len({source.sha256(f"scan-{index:04d}") for index in range(1797)}) == 1797


def test_an_unknown_scan_is_refused():
    with pytest.raises(PipelineError, match="digits: scan-9999: no such scan"):
        open_source(DATA).image("scan-9999")
