"""New values in a configuration's text: the whole text, before and after."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.builders.refusals import refusal

from zerotrain.config.update import same_values, update_text

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


def values() -> Any:
    return YAML(typ="safe").load(TEXT)


def test_one_value_changes_its_own_bytes() -> None:
    """A number, a value in a flow mapping and one in a list change; everything else stays."""
    new = values()
    new["train"]["learning_rate"] = 0.002
    new["launch"]["mixed_precision"] = "no"
    new["phases"][0]["until"] = 400
    new["phases"][1]["launch"] = {"preset": "zero2", "offload_optimizer": "cpu"}
    assert update_text(TEXT, new, "cats.yaml") == (
        TEXT.replace("1.0e-4 ", "0.002 ")
        .replace("mixed_precision: bf16", 'mixed_precision: "no"')
        .replace("until: 300", "until: 400")
        .replace("zero2_offload #", "{preset: zero2, offload_optimizer: cpu} #")
    )


def test_new_and_removed_keys_have_lines_of_their_own() -> None:
    """A new section follows the one before it in the given order, and keys leave with their line,
    from a block, a flow mapping and the first place of a list's item."""
    new = values()
    new = {
        "run": new["run"],
        "lora": {"rank": 16, "target_modules": ["to_q", "to_k"]},
        "train": {"learning_rate": 1e-4, "max_grad_norm": 0.5, "global_batch_size": 2},
        "launch": {"preset": "torch", "num_processes": 2},
        "phases": [new["phases"][0], {"until": 700, "name": "end"}, {"name": "more", "until": 9}],
        "data": new["data"],
    }
    assert update_text(TEXT, new, "cats.yaml") == (
        """\
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
    )


def test_keys_before_the_first_come_first() -> None:
    """Several new keys at one place keep their order, and comments at the top stay at the top."""
    new = {"run": "r", "base": "nano", "a": 1, "phases": [{"name": "p", "until": 3}], "seed": 2}
    assert update_text("# Top.\n\na: 1 # one\n", new, "x.yaml") == (
        "# Top.\n\nrun: r\nbase: nano\na: 1 # one\nphases:\n  - {name: p, until: 3}\nseed: 2\n"
    )


def test_line_ends_of_other_systems_stay() -> None:
    """A file with CRLF keeps them, on new lines as well."""
    new = values() | {"seed": 7}
    text = TEXT.replace("\n", "\r\n")
    assert update_text(text, new, "cats.yaml") == text + "seed: 7\r\n"


def test_what_cannot_be_cut_is_written_by_the_parser() -> None:
    """Merged keys and changed anchors keep their comments, and mean the new values."""
    text = "one: &one {a: 1} # shared\ntwo:\n  <<: *one\n  b: 2 # own\n"
    new = {"one": {"a": 1}, "two": {"a": 1, "b": 3}}
    found = update_text(text, new, "x.yaml")
    assert YAML(typ="safe").load(found) == new
    assert "# shared" in found
    assert "# own" in found


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "", "text"])
def test_text_without_keys_is_refused(text: str) -> None:
    """What is no mapping is left to its author."""
    assert "x.yaml: is written in a way" in refusal(update_text, text, {"a": 1}, "x.yaml")


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
        after = update_text(text, new, "config.yaml")
        assert same_values(YAML(typ="safe").load(after), new)
        if all(type(new.get(key)) is type(value) for key, value in found.items()):
            lines = difflib.ndiff(text.splitlines(), after.splitlines())
            lost = [line[2:].strip() for line in lines if line.startswith("- ")]
            assert not [line for line in lost if line.startswith("#")], after
