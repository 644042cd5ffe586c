"""Snakemake is used through what it shows, and one module decides what is current."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / "Snakefile",
    *sorted((ROOT / "rules").glob("*.smk")),
    *sorted((ROOT / "workflow/zerotrain").rglob("*.py")),
]
PRIVATE = re.compile(r"\b(dag|job|persistence|workflow|rule)\._[a-z]")
OBJECTS = {"dag", "job", "persistence", "workflow", "rule", "rules"}
"""What modules and rules call Snakemake's objects."""


def private_uses(text: str) -> list[str]:
    """The private attributes of Snakemake's objects in a source."""
    return [found[0] for found in PRIVATE.finditer(text)]


def assignments(text: str) -> Iterator[str]:
    """The attributes of Snakemake's objects, modules and classes to which a module assigns."""
    tree = ast.parse(text)
    theirs = {
        (name.asname or name.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
        if "snakemake" in (getattr(node, "module", None) or name.name).split(".")[0]
    }
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            held = isinstance(target, ast.Attribute | ast.Subscript)
            if held and isinstance(root, ast.Name) and root.id in theirs | OBJECTS:
                yield ast.unparse(target)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("dag._needrun.add(job)", ["dag._n"]),
        ("workflow._build_dag = build", ["workflow._b"]),
        ("dag.needrun_jobs()", []),
    ],
)
def test_a_private_attribute_is_found(source: str, found: list[str]) -> None:
    """So is one that is only read."""
    assert private_uses(source) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from snakemake.jobs import Job\nJob.cleanup = keep", ["Job.cleanup"]),
        ("from snakemake import common\ncommon.a = common.b = c", ["common.a", "common.b"]),
        ("def f(workflow):\n    workflow.rerun_triggers |= {1}", ["workflow.rerun_triggers"]),
        ("from snakemake.logging import logger\nlogger.addHandler(h)\nself.dag = 1", []),
    ],
)
def test_an_assignment_is_found(source: str, found: list[str]) -> None:
    """To an object that a function gets, to a class and to a module."""
    assert [*assignments(source)] == found


def test_nothing_private_of_snakemake_is_used_and_nothing_of_it_is_assigned_to() -> None:
    """So that it plans and works as its manual says, in each version."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    assert {path: found for path in texts if (found := private_uses(texts[path]))} == {}
    modules = [path for path in texts if path.suffix == ".py"]
    assert {path: found for path in modules if (found := [*assignments(texts[path])])} == {}


def test_one_module_decides_what_is_current() -> None:
    """The plan, and a stage for itself; all others are told."""
    users = {
        str(path.relative_to(ROOT / "workflow/zerotrain"))
        for path in SOURCES
        if re.search(r"recipe import .*\bdifferences\b", path.read_text(encoding="utf-8"))
    }
    assert users == {"graph/currency.py"}
