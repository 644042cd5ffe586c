"""A configuration gives DeepSpeed no file to write."""

from __future__ import annotations

import pytest
from tests.builders.refusals import refused

from zerotrain.launch.derive import overlay
from zerotrain.launch.keys import DEEPSPEED

PROFILE = {
    "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
    "flops_profiler": {"enabled": True, "module_depth": -1, "top_modules": 3},
    "timers": {"throughput": {"enabled": False}},
}


@pytest.mark.parametrize("path", ["~/.bashrc", "log.txt", "results/a/b/weights/manifest.json"])
def test_a_profile_overwrites_no_file(path: str) -> None:
    """Wherever it is; the reason says where the profile goes."""
    given = {"flops_profiler": {"enabled": True, "output_file": path}}
    found = refused(overlay, {}, "deepspeed", given, "one")
    assert f"output_file: {path!r} is not possible: it would replace a file" in found.what


def test_every_value_that_is_passed_on_has_a_row() -> None:
    """So a new key of DeepSpeed is refused, not passed on unread; the known ones still are."""
    blocks = [k.name for k in DEEPSPEED.values() if (k.type, k.fate) == ("block", "passed_through")]
    assert blocks == []
    made = overlay({}, "deepspeed", PROFILE, "one")
    assert {name: value for name, (value, *_) in made.items()} == {
        "comms_logger.enabled": True,
        "comms_logger.prof_ops": ["all_reduce"],
        "flops_profiler.enabled": True,
        "flops_profiler.module_depth": -1,
        "flops_profiler.top_modules": 3,
        "timers.throughput.enabled": False,
    }
    empty = {"flops_profiler": {"output_file": None}, "comms_logger": {}, "timers": {}}
    assert overlay({}, "deepspeed", empty, "one") == {}
    for given in ({"timers": {"file": "a"}}, {"flops_profiler": {"file": "a"}}):
        assert "unknown key" in refused(overlay, {}, "deepspeed", given, "one").what
