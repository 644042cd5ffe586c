"""What training ran on, in words: hand-made records, as a checkpoint or a stranger's folder has."""

from __future__ import annotations

from typing import Any

import pytest
from tests.builders.states import HISTORY, RAN_ON, make_position

from zerotrain.state.ran_on import RanOn, as_markdown


def ran_on(step: int = 700, **changes: Any) -> RanOn:
    return RanOn.of(make_position(step, ran_on=RAN_ON, history=HISTORY, **changes))


def test_exact_covers_the_steps_since_the_last_change():
    assert ran_on().exact == (
        "steps 301 to 700, since the change after step 300: version of train_phase 1 → 2, "
        "NVIDIA_TF32_OVERRIDE unset → 0"
    )
    none = RanOn.of(make_position(ran_on=RAN_ON))
    assert none.exact == "all steps"
    assert ran_on(step=300).exact.startswith("no step: the last change came after step 300")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "not recorded"),
        ({**RAN_ON, "full_determinism": False}, "no step: full_determinism is false"),
        (
            {"device": "cpu", "full_determinism": False, "dynamo_backend": "inductor"},
            "no step: full_determinism is false",
        ),
        ({**RAN_ON, "device": "cpu", "full_determinism": False}, "all steps"),
    ],
)
def test_exact_is_not_claimed_where_nothing_holds_it(values, expected):
    """Unrecorded, or with kernels that add up in any order or are chosen by their time."""
    assert RanOn.of(make_position(ran_on=values)).exact == expected


def test_rows_name_versions_device_and_threads_shortly():
    assert ran_on().rows() == [
        ("device", "NVIDIA H100 80GB HBM3, driver 570.86"),
        ("threads per process", "8"),
        ("versions", "torch 2.13.0, diffusers 0.36.0, python 3.12.3"),
        ("environment", "NVIDIA_TF32_OVERRIDE=0"),
        ("version of train_phase", "2"),
    ]


def test_changes_are_reported_in_plain_words():
    said = [change.text for change in ran_on().changes]
    assert said == [
        "after step 120: torch 2.12.0 → 2.13.0",
        "after step 120: gradient_checkpointing false → true",
        "after step 300: version of train_phase 1 → 2",
        "after step 300: NVIDIA_TF32_OVERRIDE unset → 0",
    ]


def test_markdown_of_readme_and_card():
    text = as_markdown(ran_on())
    assert "- exact: steps 301 to 700" in text
    assert "- device: NVIDIA H100 80GB HBM3, driver 570.86\n" in text
    assert "Changed while it trained:\n\n- after step 120: torch 2.12.0 → 2.13.0\n" in text
    assert as_markdown(RanOn.of(make_position())) == ""


@pytest.mark.parametrize(
    "made_by",
    [
        {},
        {"ran_on": 3, "history": "none"},
        {"ran_on": {"device": {"a": 1}}, "history": [1, {"step": "x"}, {"step": 1, "key": 2}, {}]},
        {"ran_on": ["device"], "history": [{"step": True, "key": "a", "old": [], "new": {}}]},
    ],
)
def test_a_strangers_record_is_read_as_far_as_it_is_one(made_by):
    """Nothing binds made_by: whatever has another type is left out."""
    found = RanOn.of_manifest(made_by, step=7)
    assert (found.rows(), found.changes, found.exact) == ([], [], "not recorded")


def test_a_strangers_text_is_no_markup():
    found = RanOn.of_manifest({"ran_on": {"device": "<b>\n# GPU |"}}, step=7)
    text = as_markdown(found)
    assert "- device: &lt;b&gt; # GPU |\n" in text


def test_what_a_manifest_carries_is_what_the_position_has():
    found = RanOn.of_manifest(ran_on().made_by(), step=700)
    assert (found.exact, found.rows()) == (ran_on().exact, ran_on().rows())
    assert RanOn.of(make_position()).made_by() == {}


def test_the_software_of_a_cache_is_read_as_it_names_it():
    """Versions and device by the same keys."""
    software = {"versions.torch": "2.13.0", "device": "cpu", "cudnn.allow_tf32": "False"}
    assert RanOn.of_encoding(software).rows() == [("device", "cpu"), ("versions", "torch 2.13.0")]
