"""Random damage of files: bytes, lines, and values of JSON and YAML."""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Callable, Sequence
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
JINJA = [
    b"{% for m in messages %}", b"{% endfor %}", b"{% if m %}", b"{% else %}", b"{% endif %}",
    b"{{", b"}}", b"{%", b"%}", b"{#", b"| upper", b" | join(0)", b".x", b"[0]", b"[-1:]", b" ~ ",
    b" * 99", b" / 0", b" ** 99", b"messages", b"loop", b"range(9999)", b"|tojson", b"none", b"(",
    b"{{ raise_exception(1) }}", b"{% set m = messages %}", b"m.role", b"is defined", b"self",
    b"{% generation %}", b"{% break %}", b"{% include 'a' %}", b"caller()", b"''.__class__",
]  # fmt: skip
"""Parts of chat templates."""
SHELL = [
    b" ", b" \\\n", b"'", b'"', b"--", b" --x", b"=", b";", b"&&", b"|", b">", b"#", b"$A", b"${",
    b"1e99", b"-1", b"accelerate launch ", b"torchrun ", b"python ", b"deepspeed ",
    b" --deepspeed a.json", b" --config_file ", b"\n", b"`", b",", b"true", b"[]", b"{}", b"None",
]  # fmt: skip
"""Parts of commands."""


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


def _with_tokens(tokens: list[bytes]) -> Callable[[random.Random, bytes], bytes]:
    """Insert some of a language's words, or put one in another's place."""
    words = re.compile(rb"[\w.]+|[^\w\s]+")

    def damage(draw: random.Random, content: bytes) -> bytes:
        for _ in range(draw.choice((1, 1, 2, 4))):
            places = [found.span() for found in words.finditer(content)] or [(0, 0)]
            start, end = draw.choice(places)
            end = draw.choice((start, end))
            content = content[:start] + draw.choice(tokens) + content[end:]
        return content

    return damage


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


def damage_value(draw: random.Random, value: Any, odd: Sequence[Any] = VALUES) -> Any:
    """Replace, drop or add a value somewhere in a document."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        act = draw.random()
        if act < 0.1:
            return {name: one for name, one in value.items() if name != key}
        if act < 0.15:
            return {**value, draw.choice(("x", "", "a.b", "__class__")): draw.choice(odd)}
        return {**value, key: damage_value(draw, value[key], odd)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        if draw.random() < 0.1:
            return value[:place] + value[place + 1 :]
        return [*value[:place], damage_value(draw, value[place], odd), *value[place + 1 :]]
    return draw.choice(odd)


def _of_document(
    parse: Callable[[str], Any], dump: Callable[[Any], str]
) -> Callable[[random.Random, bytes], bytes]:
    def damage(draw: random.Random, content: bytes) -> bytes:
        changed = damage_value(draw, parse(content.decode("utf-8")))
        return dump(changed).encode("utf-8", "surrogatepass")

    return damage


def _dump_yaml(value: Any) -> str:
    try:
        return yaml.dump(value, Dumper=yaml.CSafeDumper, sort_keys=False)
    except UnicodeEncodeError:  # half a surrogate pair, which Python's emitter escapes
        return yaml.dump(value, Dumper=yaml.SafeDumper, sort_keys=False)


damage_json = _of_document(json.loads, json.dumps)
damage_yaml = _of_document(
    lambda text: yaml.load(text, yaml.CSafeLoader),
    _dump_yaml,
)


def damage_header(draw: random.Random, content: bytes) -> bytes:
    """Damage a value in the header of a safetensors file, whose length stays right."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = damage_json(draw, content[8:end])
    return len(header).to_bytes(8, "little") + header + content[end:]


def damage_pickle(draw: random.Random, content: bytes) -> bytes:
    """Damage a value in a file of torch.save, which a program then writes with right checksums."""
    import torch  # the other files need none

    tensors = (
        torch.ones(()), torch.ones(3), torch.zeros(0, 2), torch.ones(2, 2, dtype=torch.int64),
        torch.tensor([True]), torch.full((2, 3), float("nan"), dtype=torch.float16),
        torch.ones(1) * 1j,
    )  # fmt: skip
    document = torch.load(io.BytesIO(content), weights_only=False)
    saved = io.BytesIO()
    torch.save(damage_value(draw, document, [*VALUES, *tensors]), saved)
    return saved.getvalue()


SUFFIXES: dict[tuple[str, ...], list[Callable[[random.Random, bytes], bytes]]] = {
    (".yaml", ".json", ".toml", ".sh", ".jsonl", ".csv", ".jinja"): [damage_lines],
    (".json",): [damage_json] * 4,
    (".yaml",): [damage_yaml] * 4,
    (".jinja",): [_with_tokens(JINJA)] * 3,
    (".sh",): [_with_tokens(SHELL)] * 3,
    (".safetensors",): [damage_header] * 4,
    (".bin", ".pt", ".pth", ".pkl"): [damage_pickle] * 4,
}
"""Further ways to damage a file, by the end of its name."""


def damaged(draw: random.Random, name: str, content: bytes) -> bytes:
    """Damage a file in a way that its kind has."""
    ways: list[Callable[[random.Random, bytes], bytes]] = [damage_bytes]
    for suffixes, more in SUFFIXES.items():
        if name.endswith(suffixes):
            ways += more
    return draw.choice(ways)(draw, content)
