"""The split by content."""

from __future__ import annotations

import hashlib

from zerotrain.data.dataset import choose_split

HASHES = [hashlib.sha256(bytes([n % 256, n // 256])).hexdigest() for n in range(4000)]


def test_the_share_held_out_is_the_one_asked_for():
    held = [choose_split(sha256, 0.25) for sha256 in HASHES].count("holdout")
    assert 900 < held < 1100
    assert {choose_split(sha256, 0.0) for sha256 in HASHES} == {"train"}


def test_a_larger_share_moves_images_one_way_only():
    small = {sha256 for sha256 in HASHES if choose_split(sha256, 0.1) == "holdout"}
    large = {sha256 for sha256 in HASHES if choose_split(sha256, 0.3) == "holdout"}
    assert small < large
