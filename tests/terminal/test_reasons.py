"""Why a stage runs, of jobs as Snakemake plans them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerotrain.pipeline.graph.code import Code
from zerotrain.pipeline.terminal.reasons import describe_reason


def reason_of(recorded: Code, now: Code, before: list[str], inputs: list[str]) -> str:
    """Describe a job whose code and inputs were `recorded` and `before`, and are others now."""
    job: Any = SimpleNamespace(
        rule=SimpleNamespace(name="evaluate"), output=["out"], input=inputs, params={"code": now},
        wildcards={},
    )  # fmt: skip
    found = SimpleNamespace(
        forced=False, updated_input=[], updated_input_run=set(), input_changed=True,
        code_changed=False, software_stack_changed=False, missing_output=set(),
        _incomplete_output=False,
    )  # fmt: skip
    changed = SimpleNamespace(only_old={repr(recorded)}, only_new={repr(now)})
    persistence = SimpleNamespace(
        params_changed=lambda job: changed,
        params=lambda path: [repr(recorded)],
        input=lambda path: before,
        metadata=lambda path: SimpleNamespace(input_checksums={}),
    )
    workflow = SimpleNamespace(persistence=persistence)
    dag: Any = SimpleNamespace(reason=lambda job: found, workflow=workflow)
    return describe_reason(job, dag)


@pytest.mark.parametrize(
    ("recorded", "now", "reason"),
    [
        (["sdxl", "sdxl_nano"], ["sd3", "sd3_nano"], "the code of its family changed"),
        (["sdxl", "sdxl_nano"], ["sdxl"], "its code changed"),
        ([], ["planner"], "its code changed"),
        (["sdxl"], ["sdxl"], "its code changed"),
    ],
)
def test_code_is_no_value_and_no_file(recorded: list[str], now: list[str], reason: str) -> None:
    """Not a file of the user that is new, changed or removed; those are named after it."""
    codes = Code("0" * 64, recorded), Code("1" * 64, now)
    assert reason_of(*codes, ["a.png"], ["a.png"]) == reason
    found = reason_of(*codes, ["a.png"], ["b.png"])
    assert found == f"{reason}; new: b.png; removed: a.png"
