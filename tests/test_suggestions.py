"""Near names are found in one way, and reported in one wording."""

from __future__ import annotations

from zerotrain.config.suggestions import did_you_mean, known_names, nearest


def test_the_nearest_names_come_first_in_any_case() -> None:
    """Spelled as they are known."""
    known = ["AdamW", "Adam", "SGD"]
    assert nearest("ADAMW", known, most=2) == ["AdamW", "Adam"]
    assert did_you_mean("adamv1", known) == "did you mean Adam?"


def test_nothing_near_is_no_question() -> None:
    """The hint has the names that there are, which may be none."""
    assert did_you_mean("xyz", ["plain"]) == ""
    assert known_names("xyz", ["plain"], "phases") == "phases: plain"
    assert known_names("plian", ["plain", "b"], "phases") == "did you mean plain? phases: plain, b"
    assert known_names("x", [], "runs here") == "runs here: none"
