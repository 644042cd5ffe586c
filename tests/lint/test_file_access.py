"""No module reads documents of others, or writes files, in a way of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lint.file_access import FUNCTIONS, READ, WRITE, YAML, Allowed, check, find_calls

PLANTED = {
    "import json\njson.loads(path)": ("json.loads", READ),
    "json.load(stream)": ("json.load", READ),
    "yaml.load(text, yaml.CSafeLoader)": ("yaml.load", READ),
    "yaml.safe_load(text)": ("yaml.safe_load", READ),
    "yaml.parse(text)": ("yaml.parse", READ),
    "YAML(typ='safe').load(text)": ("YAML", READ),
    "yaml.safe_dump(values, width=80)": ("yaml.safe_dump", YAML),
    "yaml.dump(values, Dumper=yaml.CSafeDumper)": ("yaml.dump", YAML),
    "tomllib.loads(text)": ("tomllib.loads", READ),
    "adapter().validate_json(text)": ("validate_json", READ),
    "path.read_text()": ("read_text", READ),
    "(folder / name).read_bytes()": ("read_bytes", READ),
    "path.open('rb')": ("open", READ),
    "with open(path) as stream: ...": ("open", READ),
    "os.open(path, os.O_RDONLY)": ("os.open", READ),
    "path.write_text('a')": ("write_text", WRITE),
    "(folder / name).write_bytes(b'a')": ("write_bytes", WRITE),
    "path.touch()": ("touch", WRITE),
    "shutil.copyfile(a, b)": ("shutil.copyfile", WRITE),
    "fcntl.flock(a, fcntl.LOCK_EX)": ("fcntl.flock", FUNCTIONS["fcntl.flock"]),
    "psutil.Process(1).status()": ("psutil.Process", FUNCTIONS["psutil.Process"]),
}


@pytest.mark.parametrize("source", PLANTED)
def test_a_planted_call_is_refused(source: str, tmp_path: Path) -> None:
    """With its line, and what to do instead."""
    name, instead = PLANTED[source]
    (tmp_path / "a.py").write_text(source)
    line = source.count("\n") + 1
    assert check(tmp_path, {}) == [f"a.py:{line}: {name}: {instead}"]
    assert check(tmp_path, {"a.py": Allowed((name,), "a test")}) == []


def test_what_opens_no_path_is_not_refused() -> None:
    """Libraries that get a stream, and this project's own functions."""
    source = "Image.open(stream)\ntarfile.open(fileobj=a)\nwrite_text(path, '')\njson.dumps(1)"
    assert list(find_calls(source)) == []


def test_an_allowance_that_nobody_needs_is_refused(tmp_path: Path) -> None:
    """The list says where to look, so that it is true."""
    (tmp_path / "a.py").write_text("1")
    allowed = {"a.py": Allowed(("open",), "a test"), "b.py": Allowed((), "a test")}
    assert check(tmp_path, allowed) == [
        "a.py: calls no open: remove it from ALLOWED",
        "b.py: is no module: remove it from ALLOWED",
    ]
