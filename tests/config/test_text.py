"""New values in a configuration's text: the whole text, before and after."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.builders.refusals import refusal

from zerotrain.config.text import ConfigText, dump, same_values, with_value, without_key

ROOT = Path(__file__).parents[2]
TEXT = """\
# My cats.
run: cats   # a name

train:
  learning_rate:   1.0e-4   # tried 1e-3
  # Twice the images of a GPU.
  global_batch_size: 2
  optimizer: adamw
launch: {preset: torch,   mixed_precision: bf16}  # one line
phases:
  # Plain first.
  - {name: plain,   until: 300, launch: torch}   # short
  - name: offload
    until: 700
    launch: zero2_offload # less memory
data:
  images: "~/cats"
"""
AFTER = """\
# My cats.
run: cats   # a name
lora:
  rank: 16
  target_modules: [to_q, to_k]

train:
  learning_rate:   1.0e-4   # tried 1e-3
  max_grad_norm: 0.5
  # Twice the images of a GPU.
  global_batch_size: 2
launch: {preset: torch, num_processes: 2}  # one line
phases:
  # Plain first.
  - {name: plain,   until: 300, launch: torch}   # short
  - name: end
    until: 700
  - {name: more, until: 9}
data:
  images: "~/cats"
"""
REPLACED: dict[str, Any] = {
    "run": "cats",
    "lora": {"rank": 16, "target_modules": ["to_q", "to_k"]},
    "train": {"learning_rate": 1e-4, "max_grad_norm": 0.5, "global_batch_size": 2},
    "launch": {"preset": "torch", "num_processes": 2},
    "phases": [
        {"name": "plain", "until": 300, "launch": "torch"},
        {"until": 700, "name": "end"},
        {"name": "more", "until": 9},
    ],
    "data": {"images": "~/cats"},
}
GONE = object()
LINES = "a: 1 # one\nb:\n  c: 2\n  d: [x,  y]\n"
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    # A text, new values by their keys (of all by none), and the text that follows.
    "a number": (TEXT, {"train.learning_rate": 0.002}, TEXT.replace("1.0e-4 ", "0.002 ")),
    "a word that YAML 1.1 takes for a switch": (
        TEXT, {"launch.mixed_precision": "no"}, TEXT.replace(": bf16", ': "no"'),
    ),
    "a value in a row of a table": (TEXT, {"phases.0.until": 400}, TEXT.replace("300", "400")),
    "a section for a name": (
        TEXT, {"phases.1.launch.offload_optimizer": "cpu"},
        TEXT.replace("zero2_offload #", "{preset: zero2_offload, offload_optimizer: cpu} #"),
    ),
    "keys and items, new and gone, in the given order": (TEXT, {"": REPLACED}, AFTER),
    "before the first": (
        "# Top.\n\na: 1 # one\n", {"": {"run": "r", "base": "nano", "a": 1, "seed": 2}},
        "# Top.\n\nrun: r\nbase: nano\na: 1 # one\nseed: 2\n",
    ),
    "line ends of Windows": (
        TEXT.replace("\n", "\r\n"), {"seed": 7}, TEXT.replace("\n", "\r\n") + "seed: 7\r\n",
    ),
    "the mark of Windows": ("\ufeffa: 1\n", {"a": 2}, "\ufeffa: 2\n"),
    "no line end": ("a: 1", {"a": 2, "b": "x"}, "a: 2\nb: x"),
    "nothing but the key": ("a:\nb: ~ # none\n", {"a": 1, "b": 2}, "a: 1\nb: 2 # none\n"),
    "another indentation": (
        "a:\n    b: 1\n", {"a.c": {"d": 2}}, "a:\n    b: 1\n    c:\n      d: 2\n",
    ),
    "behind a text of several lines": (
        "a:\n  b: |\n    one\n\n  c: 1\n", {"a": {"b": "one\n", "d": 2, "c": 1}},
        "a:\n  b: |\n    one\n  d: 2\n\n  c: 1\n",
    ),
    "several keys behind one line": (
        "a:\n  b: 1 # one\n", {"a.c": 2, "d": 3, "a.e": 4},
        "a:\n  b: 1 # one\n  c: 2\n  e: 4\nd: 3\n",
    ),
    "a key of the last item, and a new item": (
        "p:\n- a: 1\n", {"p": [{"a": 1, "b": 2}, {"a": 3}]}, "p:\n- a: 1\n  b: 2\n- {a: 3}\n",
    ),
    "the first of a row": ("a: {b: 1,  c: 2}\n", {"a.b": GONE}, "a: {c: 2}\n"),
    "the last of a row": ("a: {b: 1,  c: 2}\n", {"a.c": GONE}, "a: {b: 1}\n"),
    "a new one of a row": ("a: {b: 1,  c: 2}\n", {"a.d": 3}, "a: {b: 1,  c: 2, d: 3}\n"),
    "the last key of a section": (LINES, {"b.c": GONE, "b.d": GONE}, "a: 1 # one\n"),
    "an item of a list in a row": (LINES, {"b.d.1": "z"}, LINES.replace("y", "z")),
    "a longer list in a row": (LINES, {"b.d": ["x", "y", "z"]}, LINES.replace("y", "y, z")),
    "a shorter list in a row": (LINES, {"b.d": ["x"]}, LINES.replace(",  y", "")),
    "no list": (LINES, {"b.d": []}, LINES.replace("[x,  y]", "[]")),
    "a section of another kind": (LINES, {"b": 3}, "a: 1 # one\nb: 3\n"),
    "the first key of an item": (
        "p:\n- a: 1\n  b: 2\n", {"p.0.a": GONE}, "p:\n- b: 2\n",
    ),
    "a value that another line has": (
        "a: &x {b: 1}\nc: *x\n", {"c.b": 2}, "a: &x {b: 1}\nc: {b: 2}\n",
    ),
    "what two lines have": (
        "a: &x {b: 1}\nc: *x\n", {"a.b": 2, "c.b": 2}, "a: &x {b: 2}\nc: {b: 2}\n",
    ),
    "next to merged keys": (
        "one: &one {a: 1} # shared\ntwo:\n  <<: *one\n  b: 2 # own\n", {"two.b": 3},
        "one: &one {a: 1} # shared\ntwo:\n  <<: *one\n  b: 3 # own\n",
    ),
    "a merged key": (
        "one: &one {a: 1}\ntwo:\n  b: 2 # own\n  <<: *one\n", {"two.a": 3},
        "one: &one {a: 1}\ntwo:\n  a: 3\n  b: 2 # own\n  <<: *one\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_text_after_new_values(case: str) -> None:
    """What is not meant to change keeps its bytes: comments, columns, quotes and line ends."""
    text, changes, result = CASES[case]
    before = ConfigText(text, "cats.yaml")
    values = changes.get("", before.values)
    for name, value in changes.items() if "" not in changes else ():
        key = [int(part) if part.isdigit() else part for part in name.split(".")]
        values = without_key(values, key) if value is GONE else with_value(values, key, value)
    found = before.update(values)
    assert found.text == result
    assert same_values(found.values, values)
    assert before.text == text


@pytest.mark.parametrize(
    ("text", "values", "why"),
    [
        ("- a\n", {"a": 1}, "x.yaml: is written in a way"),
        ("", {"a": 1}, "x.yaml: is written in a way"),
        ("text", {"a": 1}, "x.yaml: is written in a way"),
        ("a: [\n", {"a": 1}, "x.yaml: not valid YAML"),
        ("1: a\n", {1: "b"}, "x.yaml: is written in a way"),
        ("a: &x {b: 1}\nc: *x\n", {"a": {"b": 2}, "c": {"b": 1}}, "x.yaml: is written in a way"),
        ("a: {<<: {b: 1}, c: 2}\n", {"a": {"c": 2}}, "x.yaml: is written in a way"),
        ("a: 1\n", {"b": 1}, "x.yaml: is written in a way"),
    ],
)
def test_what_only_a_person_can_edit_is_refused(text: str, values: Any, why: str) -> None:
    """What is no mapping, and values that other keys have, too, are left to their author."""
    assert why in refusal(lambda: ConfigText(text, "x.yaml").update(values))


@pytest.mark.parametrize("key", [("train", 0), ("run", "x"), ("phases", "name"), ("phases", 7)])
def test_a_place_that_is_none_is_refused(key: tuple[str | int, ...]) -> None:
    """No section is made of a value or of a list."""
    name = ".".join(map(str, key))
    assert f"{name}: the configuration has no such place" in refusal(with_value, REPLACED, key, 1)


def test_new_text_has_a_line_for_each_key() -> None:
    """Read again it means the same; its diff shows every line."""
    text = dump(REPLACED)
    assert text.startswith("run: cats\nlora:\n  rank: 16\n  target_modules: [to_q, to_k]\ntrain:\n")
    found = ConfigText(text, "x.yaml", is_new=True)
    assert same_values(found.values, REPLACED)
    assert found.diff()[:2] == ["--- x.yaml", "+++ x.yaml"]
    assert found.diff()[3:] == [f"+{line}" for line in text.splitlines()]


def test_a_file_that_was_saved_meanwhile_is_kept(tmp_path: Path) -> None:
    """An edit replaces the text that it was made of, and no other; a new file replaces none."""
    file = tmp_path / "config" / "a.yaml"
    ConfigText("a: 1\n", file, is_new=True).save(file)
    edited = ConfigText.read(file).update({"a": 2})
    edited.save(file)
    assert file.read_text() == "a: 2\n"
    for late in (edited, ConfigText("b: 1\n", file, is_new=True)):
        assert "a.yaml: was saved by another program meanwhile" in refusal(late.save, file)
    assert file.read_text() == "a: 2\n"


def changes(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each key of a configuration removed, given another value, and joined by a new one."""
    made = []
    for key, value in found.items():
        for other in (1, "a: b # c", {"y": {"z": "no"}}):
            made.append({**found, key: other})
        made += [{k: v for k, v in found.items() if k != key}] * (len(found) > 1)
        if isinstance(value, dict):
            made += [{**found, key: inner} for inner in changes(value)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            made += [{**found, key: [inner, *value[1:]]} for inner in changes(value[0])]
            made += [{**found, key: value[1:]}, {**found, key: [*value, {"name": "new"}]}]
    return [*made, {**found, "new": {"section": {"k": [1.5]}}}]


def test_every_change_of_the_example_is_meant_and_keeps_the_other_lines() -> None:
    """After each change of one key the text means that change, and no comment outside of a section
    that is gone is lost."""
    text = (ROOT / "config" / "config.yaml").read_text()
    found = YAML(typ="safe").load(text)
    for new in changes(found)[::6]:
        after = ConfigText(text, "config.yaml").update(new).text
        assert same_values(YAML(typ="safe").load(after), new)
        if all(type(new.get(key)) is type(value) for key, value in found.items()):
            lines = difflib.ndiff(text.splitlines(), after.splitlines())
            lost = [line[2:].strip() for line in lines if line.startswith("- ")]
            assert not [line for line in lost if line.startswith("#")], after
