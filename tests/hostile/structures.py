"""Hostile documents that keep their form: other types at every depth, tags, numbers, nesting.

A node of a document is drawn, every one as likely as another, and something else is put in its
place: a value of another type, or a piece of text that no value would be written as.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

LONG = 20_000
"""Letters of a long text, and keys of a large object."""
HOLE = "HOLE0HOLE"
"""Written in the place of what only a text can say."""
Path = tuple[str | int, ...]

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**18, 10**30, 0.5, -0.0, 5e-324,
    1.8e308, "", " ", "0", "nan", "1e5", "null", "../../etc/passwd", "/dev/zero", "a\x00b",
    "\x1b[2J\x9b", "\u202eevil\u2066", "\u2028", "💥", "a" * 300, [], {}, [None], [[]], [[1]], [{}],
    {"": None}, {"a": {"b": {"c": []}}}, [1, "a", None, 0.5], {"value": 1, "source": "user"},
    ["x"] * 2000, "([a-z0-9_.]+)+!", "(a+)+$", "(", "*", "[", "\\", "{% for x in range(9) %}",
]  # fmt: skip
"""What JSON can say; YAML says it in its own words."""
KEYS = [
    "", " ", "x", "a.b", "a/b", "..", "\x00", "\u202e", "__class__", "__metadata__", "<<", "=",
    "0", "k" * 2000, "null", "self", "{x}", "%s",
]  # fmt: skip
JSON_TEXTS = [
    "NaN", "-Infinity", "1e999", "9" * 400, "9" * 5000, "0x10", "1.", "'a'", '"\\ud800"',
    '"\\u0000"', '{"a": 1, "a": 2}', "[" * 60 + "]" * 60, "[" * 50_000, '{"a":' * 50_000, "",
    f'"{"b" * LONG}"', "{" + ", ".join(f'"k{n}": {n}' for n in range(2000)) + "}",
]  # fmt: skip
YAML_TEXTS = [
    "!!int ''", "!!float ''", "!!bool x", "!!null x", "!!binary '='", "!!set {a}", "!!omap [a: 1]",
    "!!pairs [a]", "!!timestamp x", "!!str [a]", "!!map x", "!!seq {}", "!local x", "!!float .",
    "!!python/object/apply:os.system [exit]", "&a [*a]", "*missing", ".nan", "-.inf", "1e999",
    "9" * 400, f"0x{'f' * 400}", "0o9", '"\\ud800"', "2024-13-45", "12:30:45", "2024-01-02",
    "{? [a] : b}", "{<<: 1}", "{a: 1, a: 2}", "{1: a, null: b, 2.5: c, true: d}", "[" * 50_000,
    "{a: " * 50_000, "[" * 60 + "]" * 60, "~", "=", "@x", "%x", "'", '"', "- a", ": :",
    "c" * LONG, "{" + ", ".join(f"k{n}: {n}" for n in range(2000)) + "}",
]  # fmt: skip
WHOLE = [
    b"", b"\n", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 50_000, b"- " * 50_000, b"null",
    b"[]", b"{}", b"3", b'"a"', b"NaN", b"9" * 5000, b"a" * 1_000_000, b"\n" * 100_000,
]  # fmt: skip
"""In the place of the whole file."""


def hostile(draw: random.Random, name: str, content: bytes) -> bytes:
    """Change one node of a document; other files are replaced as a whole."""
    for ending, change in FORMS.items():
        if name.endswith(ending) and draw.random() < 0.95:
            return change(draw, content)
    return draw.choice(WHOLE)


def _json(draw: random.Random, content: bytes) -> bytes:
    return _changed(draw, json.loads(content), JSON_TEXTS, json.dumps, f'"{HOLE}"')


def _json_lines(draw: random.Random, content: bytes) -> bytes:
    lines = content.splitlines()
    place = draw.randrange(len(lines))
    lines[place] = _json(draw, lines[place])
    return b"\n".join(lines) + b"\n"


def _yaml(draw: random.Random, content: bytes) -> bytes:
    document = yaml.load(content, yaml.CSafeLoader)
    return _changed(draw, document, YAML_TEXTS, lambda value: yaml.dump(value, width=10**6), HOLE)


def _header(draw: random.Random, content: bytes) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    header = _json(draw, content[8:end])
    return len(header).to_bytes(8, "little") + header + content[end:]


FORMS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    ".json": _json,
    "progress/lock": _json,
    ".jsonl": _json_lines,
    ".yaml": _yaml,
    ".lock": _yaml,
    ".safetensors": _header,
}
"""How a file is changed, by the end of its name."""


def _changed(
    draw: random.Random, document: Any, texts: list[str], dump: Callable[[Any], str], hole: str
) -> bytes:
    paths = [*_paths(document, ())]
    act = draw.random()
    if act < 0.45:
        document = _put(document, draw.choice(paths), draw.choice(VALUES))
    elif act < 0.8:
        written = dump(_put(document, draw.choice(paths), HOLE))
        return written.replace(hole, draw.choice(texts), 1).encode("utf-8", "surrogatepass")
    elif act < 0.9:
        keyed = [path for path in paths if path and isinstance(path[-1], str)] or [()]
        document = _with_key(document, draw.choice(keyed), draw.choice(KEYS), rename=act < 0.85)
    else:
        for _ in range(draw.choice((2, 5, 20))):
            document = _put(document, draw.choice([*_paths(document, ())]), draw.choice(VALUES))
    return dump(document).encode("utf-8", "surrogatepass")


def _paths(value: Any, path: Path) -> Iterator[Path]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _paths(inner, (*path, number))


def _put(document: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    first, *rest = path
    inner = _put(document[first], tuple(rest), value)
    if isinstance(document, dict):
        return {**document, first: inner}
    return [*document[:first], inner, *document[first + 1 :]]  # type: ignore[operator, misc]


def _with_key(document: Any, path: Path, key: str, *, rename: bool) -> Any:
    """Rename a key, or add one next to it."""
    if not path:
        return {key: document}
    *above, last = path
    outer = document
    for part in above:
        outer = outer[part]
    kept = {name: value for name, value in outer.items() if not (rename and name == last)}
    return _put(document, tuple(above), {**kept, key: outer[last]})
