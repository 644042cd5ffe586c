"""Random damage of files: bytes, lines, and values of JSON and YAML."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import yaml

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "x", "../x", "a\x00b", "\ud800", "💥" * 50, "1e5", "auto", "2024-13-45",
    [], {}, [None], [[]], {"a": {"b": []}}, [1, "a", None], {"": 0},
]  # fmt: skip
"""What stands where something else should."""

TOKENS = [
    b"\x00", b"\xff\xfe", b"{", b"}", b"[", b"]", b":", b"- ", b"\n", b'"', b"'", b"#", b"&a ",
    b"*a", b"!!python/object:os.system ", b"\t", b"%", b"|", b">", b"~", b"<<: ", b"9" * 40, b"e",
    b"-", b".",
]  # fmt: skip


def damage_bytes(draw: random.Random, content: bytes) -> bytes:
    """Change, insert, drop or repeat some bytes, or cut the end."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        place = draw.randrange(len(changed) + 1)
        act = draw.randrange(5)
        if act == 0 and place < len(changed):
            changed[place] = draw.randrange(256)
        elif act == 1:
            changed[place:place] = draw.choice(TOKENS)
        elif act == 2:
            del changed[place : place + draw.choice((1, 4, 64))]
        elif act == 3:
            changed[place:place] = changed[place : place + draw.choice((1, 16, 256))]
        else:
            del changed[place:]
    return bytes(changed)


def damage_lines(draw: random.Random, content: bytes) -> bytes:
    """Drop, repeat, move or indent a line."""
    lines = content.split(b"\n")
    place, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    act = draw.randrange(4)
    if act == 0:
        del lines[place]
    elif act == 1:
        lines.insert(other, lines[place])
    elif act == 2:
        lines[place], lines[other] = lines[other], lines[place]
    else:
        lines[place] = b" " * draw.choice((1, 2, 3, 8)) + lines[place]
    return b"\n".join(lines)


def damage_value(draw: random.Random, value: Any) -> Any:
    """Replace, drop or add a value somewhere in a document."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        act = draw.random()
        if act < 0.1:
            return {name: one for name, one in value.items() if name != key}
        if act < 0.15:
            return {**value, draw.choice(("x", "", "a.b", "__class__")): draw.choice(VALUES)}
        return {**value, key: damage_value(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        if draw.random() < 0.1:
            return value[:place] + value[place + 1 :]
        return [*value[:place], damage_value(draw, value[place]), *value[place + 1 :]]
    return draw.choice(VALUES)


def _of_document(
    parse: Callable[[str], Any], dump: Callable[[Any], str]
) -> Callable[[random.Random, bytes], bytes]:
    def damage(draw: random.Random, content: bytes) -> bytes:
        changed = damage_value(draw, parse(content.decode("utf-8")))
        return dump(changed).encode("utf-8", "surrogatepass")

    return damage


damage_json = _of_document(json.loads, json.dumps)
damage_yaml = _of_document(yaml.safe_load, lambda value: yaml.safe_dump(value, sort_keys=False))


def damaged(draw: random.Random, name: str, content: bytes) -> bytes:
    """Damage a file in a way that its kind has."""
    ways: list[Callable[[random.Random, bytes], bytes]] = [damage_bytes]
    if name.endswith((".yaml", ".json", ".toml", ".sh", ".jsonl")):
        ways.append(damage_lines)
    if name.endswith(".json"):
        ways += [damage_json] * 4
    if name.endswith(".yaml"):
        ways += [damage_yaml] * 4
    return draw.choice(ways)(draw, content)
