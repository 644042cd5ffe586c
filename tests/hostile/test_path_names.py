"""Paths of a configuration that no file system could have are sentences of check and page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.builders.refusals import refusal

from zerotrain.builder.draft import read_draft
from zerotrain.config.text import with_value
from zerotrain.graph.checks import read_checked_runs

RUN: dict[str, Any] = {
    "run": "a", "base": "nano", "data": {"images": "photos"},
    "phases": [{"name": "p", "until": 10, "launch": "torch"}],
}  # fmt: skip
KEYS = (
    "base", "data.images", "data.metadata", "data.mask_images",
    "resume_from_checkpoint", "phases.0.launch.offload_path",
)  # fmt: skip


@pytest.mark.parametrize("invalid", [False, True])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a" * 300, "is longer than the 255 bytes of a name"),
        ("b/" + "ä" * 128 + ".safetensors", "is longer than the 255 bytes of a name"),
        ("a/" * 2500, "4,095 of a path"),
        ("a\0b", "holds a null byte"),
        ("~nobody-here/a", "a user whom this machine does not know"),
    ],
)
def test_a_path_that_cannot_be_looked_for(
    text: str, why: str, invalid: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its key, also next to a value that is invalid."""
    monkeypatch.chdir(tmp_path)
    file = Path("config/a.yaml")
    file.parent.mkdir()
    for key in KEYS:
        values = yaml.safe_load(yaml.safe_dump(RUN))
        if key.startswith("phases"):
            values = with_value(values, ("phases", 0, "launch"), {"preset": "zero3_nvme"})
        values = with_value(values, [int(k) if k.isdigit() else k for k in key.split(".")], text)
        if invalid:
            values = with_value(values, ("train", "learning_rate"), "fast")
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        found = refusal(read_checked_runs, file)
        assert why in found, key
        problems = read_draft({"from": str(file)}).problems
        assert any((".learning_rate" if invalid else why) in one.what for one in problems), key
