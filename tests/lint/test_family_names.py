"""No module but those of the families knows a family by its name."""

from __future__ import annotations

from pathlib import Path

from tests.lint.family_names import check


def test_a_planted_name_is_refused(tmp_path: Path) -> None:
    """With its line; an allowance that no name needs is refused, too."""
    (tmp_path / "a.py").write_text('one = "other"\nif family == "flux":\n    ...')
    (tmp_path / "config/families").mkdir(parents=True)
    (tmp_path / "config/families/flux.py").write_text('name = "flux"')
    assert check(tmp_path, {}) == ["a.py:2: flux: ask its FamilySpec"]
    assert check(tmp_path, {"a.py": "a test"}) == []
    (tmp_path / "a.py").write_text("")
    assert check(tmp_path, {"a.py": "a test"}) == ["a.py: knows no family: remove it from ALLOWED"]
