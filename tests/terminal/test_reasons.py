"""Why a stage runs, of jobs as Snakemake plans them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zerotrain.pipeline.terminal.reasons import describe_reason


def reason_of(recorded: str, now: str, before: list[str], inputs: list[str]) -> str:
    """Describe a job whose version and inputs were `recorded` and `before`, and are others now."""
    job: Any = SimpleNamespace(
        rule=SimpleNamespace(name="evaluate"), output=["out"], input=inputs,
        params={"version": now}, wildcards={},
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


def test_a_version_is_no_value_and_no_file() -> None:
    """Not a file of the user that is new, changed or removed; those are named after it."""
    versions, reason = (
        ("version 1 of evaluate", "version 2 of evaluate"),
        "its stage has version 2, 1 before",
    )
    assert reason_of(*versions, ["a.png"], ["a.png"]) == reason
    found = reason_of(*versions, ["a.png"], ["b.png"])
    assert found == f"{reason}; new: b.png; removed: a.png"
