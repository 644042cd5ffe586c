"""The digest of code is the same in every version of Python, and an edit of words keeps it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zerotrain.artifact import code_tokens
from zerotrain.artifact.code_tokens import code_text

SAMPLE = Path("tests/golden/code/sample.py.txt")
GOLDEN = SAMPLE.with_suffix("").with_suffix(".sha256")
READER = Path(code_tokens.__file__)
SCRIPT = """
import hashlib, runpy, sys
text = runpy.run_path(sys.argv[1], run_name="code_tokens")["code_text"]
for name in sys.argv[2:]:
    print(hashlib.sha256(text(open(name, encoding="utf-8").read()).encode()).hexdigest())
"""


def python_of(version: str) -> str:
    """An interpreter of that version, or a skipped test."""
    minor = int(version.partition(".")[2])
    if sys.version_info[:2] == (3, minor):
        return sys.executable
    installed = [
        str(path / "bin/python") for path in Path.home().glob(f".pyenv/versions/{version}.*")
    ]
    for found in (*installed, shutil.which(f"python{version}")):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    pytest.skip(f"this machine has no Python {version}")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_digest_is_that_of_every_version(version: str) -> None:
    """Of a file that holds what versions read differently, and of modules full of f-strings."""
    modules = [
        READER.parents[1] / "pipeline/terminal/changes.py",
        READER.parents[1] / "pipeline/rebuild.py",
    ]
    files = [str(path) for path in (SAMPLE, *modules, Path("rules/train_phase.smk"))]
    found = subprocess.run(
        [python_of(version), "-c", SCRIPT, str(READER), *files],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert found[0] == GOLDEN.read_text().strip()
    assert found == [
        hashlib.sha256(code_text(Path(f).read_text(encoding="utf-8")).encode()).hexdigest()
        for f in files
    ]


KEPT = {
    "a comment": ("# a comment", "# another"),
    "a docstring": ('"""The area."""', '"""The area, in\n        metres."""'),
    "a module's docstring": ('"""A module', '"""One module'),
    "a value's docstring": ('"""What the value is."""\n', ""),
    "a line break in brackets": ("width\n            * height", "width * height"),
    "a blank line": ("\n\n\nclass", "\n\n\n\nclass"),
    "a continued line": ("VALUE \\\n            + 1", "VALUE + 1"),
    "deeper indentation": ("            pass", "                pass"),
}
CHANGED = {
    "a number": ("1_000", "1_001"),
    "an operator": ("* height", "+ height"),
    "a string": ('"shape"', '"shapes"'),
    "an f-string": ("} of {", "} in {"),
    "a value inside an f-string": ("{VALUE:,}", "{VALUES:,}"),
    "a name": ("def area", "def areas"),
    "an indentation": ("        lambda", "    lambda"),
}


@pytest.mark.parametrize("edit", KEPT)
def test_an_edit_of_words_or_layout_keeps_the_code(edit: str) -> None:
    """Comments, docstrings, blank lines, line breaks."""
    text = SAMPLE.read_text(encoding="utf-8")
    assert text.count(KEPT[edit][0]) == 1
    assert code_text(text.replace(*KEPT[edit])) == code_text(text)


@pytest.mark.parametrize("edit", CHANGED)
def test_an_edit_of_code_changes_it(edit: str) -> None:
    """However small."""
    text = SAMPLE.read_text(encoding="utf-8")
    assert code_text(text.replace(*CHANGED[edit])) != code_text(text)


def test_the_command_of_a_rule_is_code() -> None:
    """A rule's docstring is none, and what follows `shell:` is no docstring."""
    head = 'rule a:\n    """Say."""\n    output:\n        "a",\n'
    rule = head + '    shell:\n        """\n        {}\n        """\n'
    assert code_text(rule.format("echo")) != code_text(rule.format("date"))
    assert code_text(rule.format("echo")) == code_text(rule.format("echo").replace("Say", "Tell"))
