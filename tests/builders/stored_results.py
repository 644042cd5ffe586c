"""Results of stages as small JSON files, and the rule that holds a result to its stored one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NUMBERS = "workflow/zerotrain/artifact/stage_versions.py"
RENEW = "`pytest tests/stages/test_stage_versions.py --fix`"
ROUNDING = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""How far an element may move, as a part of the tensor's root mean square.

One and two threads, and torch's and oneDNN's kernels for SSE4, AVX2 and AVX-512, moved no float32
of the cases by more than 1.1e-5. A change of what is computed, such as another scale, is far larger
than 1e-4. In 16 bits a value halfway between two numbers is rounded to either."""
SUMS, PLAIN = 1e-3, 1e-4
"""How far mean and norm may move at most, and a plain float, such as a loss, as parts of them."""
WIDTH = 100
ELEMENTS = 4


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """What is stored of a tensor: shape, dtype, mean, norm and four elements; whole if it has no
    fractions."""
    kind = str(tensor.dtype).removeprefix("torch.")
    facts = {"dtype": kind, "shape": list(tensor.shape)}
    if not tensor.is_floating_point():
        return facts | {"values": tensor.flatten().tolist()}
    flat = tensor.detach().flatten().double()
    places = [number * (len(flat) - 1) // (ELEMENTS - 1) for number in range(ELEMENTS)]
    elements = [_short(flat[place]) for place in dict.fromkeys(places)]
    return facts | {"mean": _short(flat.mean()), "norm": _short(flat.norm()), "elements": elements}


def _short(number: torch.Tensor) -> float:
    """Seven digits, as many as a float32 has."""
    return float(f"{float(number):.7g}")


@dataclass(frozen=True)
class Difference:
    """A value that is not what is stored."""

    place: str
    stored: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.place} was {_shown(self.stored)} and is {_shown(self.now)}"


def _shown(value: Any) -> str:
    text = "absent" if value is ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}..."


ABSENT = object()


def differences(stored: Any, now: Any, place: str = "") -> Iterator[Difference]:
    """What differs, in the order of the stored result; floats only beyond rounding."""
    if isinstance(stored, dict) and isinstance(now, dict):
        if "norm" in stored and stored.get("dtype") in ROUNDING:
            yield from _tensor_differences(stored, now, place)
            return
        keys = list(dict.fromkeys([*stored, *now]))
        common = [key for key in stored if key in now]
        if common != [key for key in now if key in stored]:
            yield Difference(f"the order in {place or 'the result'}", [*stored], [*now])
        for key in keys:
            inner = f"{place}: {key}" if place else key
            yield from differences(stored.get(key, ABSENT), now.get(key, ABSENT), inner)
    elif isinstance(stored, list) and isinstance(now, list):
        if len(stored) != len(now):
            yield Difference(f"the length of {place}", len(stored), len(now))
        for number, (old, new) in enumerate(zip(stored, now, strict=False)):
            yield from differences(old, new, f"{place}[{number}]")
    elif isinstance(stored, float) and isinstance(now, float):
        if not math.isclose(stored, now, rel_tol=PLAIN):
            yield Difference(place, stored, now)
    elif type(stored) is not type(now) or stored != now:
        yield Difference(place, stored, now)


def _tensor_differences(
    stored: dict[str, Any], now: dict[str, Any], place: str
) -> Iterator[Difference]:
    kind, shape = stored["dtype"], stored["shape"]
    if (kind, shape) != (now.get("dtype"), now.get("shape")):
        facts = [[one.get("dtype"), one.get("shape")] for one in (stored, now)]
        yield Difference(f"{place}: dtype and shape", *facts)
        return
    size = stored["norm"] / math.sqrt(math.prod(shape) or 1)
    near = ROUNDING[kind]
    together = min(near, SUMS)
    numbers = [("norm", stored["norm"], now["norm"], together * stored["norm"])]
    numbers.append(("mean", stored["mean"], now["mean"], together * size))
    for number, (old, new) in enumerate(zip(stored["elements"], now["elements"], strict=True)):
        numbers.append((f"elements[{number}]", old, new, near * max(size, abs(old))))
    for name, old, new, most in numbers:
        if not math.isclose(old, new, rel_tol=0, abs_tol=most):
            yield Difference(f"{place}: {name}", old, new)


@dataclass(frozen=True)
class StoredResult:
    """The stored result of a case of a stage.

    Args:
        path: Its file.
        stage: The stage.
        inputs: The stages that made the case's inputs: raising their numbers may move its result.
    """

    path: Path
    stage: str
    inputs: tuple[str, ...] = ()

    def problem(self, result: Any, versions: Mapping[str, int], *, fix: bool) -> str | None:
        """What is wrong with a result, in one sentence; with `fix` it is stored if it may be."""
        result = json.loads(json.dumps(result))
        now = {stage: versions[stage] for stage in (self.stage, *self.inputs)}
        if not self.path.exists():
            if fix:
                self._write(result, now)
                return None
            return f"{self.path.name} is missing: {RENEW} writes it."
        stored = json.loads(self.path.read_text(encoding="utf-8"))
        old = stored["versions"]
        if lowered := [one for one in now if now[one] < old.get(one, 0)]:
            return (
                f"The version of {lowered[0]} is {now[lowered[0]]}, and {self.path.name} is of "
                f"version {old[lowered[0]]}: a number is never lowered in {NUMBERS}."
            )
        if raised := [one for one in now if now[one] > old.get(one, 0)]:
            if fix:
                self._write(result, now)
                return None
            before = old.get(raised[0], "absent")
            return (
                f"The version of {raised[0]} was raised from {before} to {now[raised[0]]}, and "
                f"{self.path.name} is of the old one: {RENEW} renews it."
            )
        found = [*differences(stored["result"], result)]
        if not found:
            return None
        more = f" ({len(found) - 1} more values differ)" if len(found) > 1 else ""
        refused = ", which --fix does not store" if fix else ""
        first = ""
        if self.inputs:
            first = f"look first at the tests of {', '.join(self.inputs)}, whose results it reads; "
        return (
            f"{self.stage} makes something else than {self.path.name} from equal inputs{refused}: "
            f"{found[0]}{more}; {first}undo the change, or raise the number of {self.stage} in "
            f"{NUMBERS}, add a line to CHANGELOG.md and call {RENEW}."
        )

    def _write(self, result: Any, versions: Mapping[str, int]) -> None:
        self.path.parent.mkdir(exist_ok=True)
        document = {"versions": versions, "result": result}
        self.path.write_text(f"{_format(document)}\n", encoding="utf-8")


def _format(value: Any, indent: str = "") -> str:
    """JSON in which a value takes one line if it fits in one, so that a diff shows tensors."""
    line = json.dumps(value, ensure_ascii=False)
    is_tensor = isinstance(value, dict) and "dtype" in value
    if len(indent + line) <= WIDTH or is_tensor or not isinstance(value, dict | list):
        return line
    inner = f"{indent} "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_format(one, inner)}" for key, one in value.items()]
    else:
        parts = [_format(one, inner) for one in value]
    opened, closed = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{opened}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closed}"
