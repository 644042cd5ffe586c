"""What is wrong with a configuration, as one message: every key, its line, and what to do.

pydantic finds the errors; the sentences are ours.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from zerotrain.artifact.documents import DocumentError, compose_yaml
from zerotrain.config.models import Phase
from zerotrain.config.run import RunConfig
from zerotrain.config.suggestions import did_you_mean, join_first, nearest
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError

Location = Sequence[str | int]
"""Keys and places in lists, from the top: ("phases", 0, "launch")."""

WORD = r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*"
"""A key in a sentence."""


class KeyLines:
    """The lines of a file's keys, 1 the first, which is read again for messages alone.

    Of a text that is no YAML, none is known.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str | int, ...], int] = {}
        self._phases: dict[str, tuple[str | int, ...]] = {}
        """The place of each phase, by its name."""
        with contextlib.suppress(DocumentError):
            self._read(compose_yaml(text, "the file"), ())

    def at(self, location: Location) -> int | None:
        """Return the line of a key, or of the section that it is missing in.

        A phase is flat in the file, and may take a section from the run: both are tried.
        """
        for candidate in _spellings(tuple(location)):
            if (line := self._lines.get(candidate)) is not None:
                return line
        return self.at(location[:-1]) if len(location) > 1 else None

    def mentioned(self, sentence: str) -> int | None:
        """Return the line of the first key that a sentence names; None if the file has none.

        A bare key counts where one section alone has it: `packing` stands for `train.packing`.
        """
        phase = re.match(r"phase ([A-Za-z0-9_-]+): ", sentence)
        inside = self._phases.get(phase[1], ()) if phase else ()
        words = re.findall(WORD, sentence[phase.end() if phase else 0 :])
        # Words such as `run` or `data` are keys where they begin a sentence; else they are English.
        for word in [*words[:1], *(word for word in words[1:] if "_" in word or "." in word)]:
            parts = tuple(word.split("."))
            if inside and (line := self._exact((*inside, *parts))) is not None:
                return line
            if (line := self._exact(parts)) is not None:
                return line
            found = {n for c, n in self._lines.items() if len(parts) == 1 and c[-1:] == parts}
            if len(found) == 1:
                return found.pop()
        return self._lines.get(inside) if inside else None

    def _exact(self, location: tuple[str | int, ...]) -> int | None:
        return next((self._lines[c] for c in _spellings(location) if c in self._lines), None)

    def _read(self, node: Any, location: tuple[str | int, ...]) -> None:
        """Note the line of everything in a node of the parser's tree."""
        if node is None or not isinstance(node.value, list):
            return
        for place, child in enumerate(node.value):
            key, value = child if isinstance(child, tuple) else (child, child)
            name = key.value if isinstance(child, tuple) else place
            if isinstance(name, str | int):
                self._lines[*location, name] = key.start_mark.line + 1
                if location[:1] == ("phases",) and name == "name" and len(location) == 2:
                    self._phases[str(value.value)] = location
                self._read(value, (*location, name))


def _spellings(location: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield where a file may have a key of the merged configuration, the likeliest place first."""
    yield location
    if location[:1] == ("phases",) and len(location) > 2:
        own = location[2:]
        if own[0] == "train":
            yield (*location[:2], *own[1:])
        if own == ("launch", "preset"):
            yield (*location[:2], "launch")
        if len(own) > 1:
            yield own


PHASE_KEYS = ("name", "until", "launch", "allow", "validation")
"""The keys of a phase that are not training values."""
TOP = "the run"
MOST_PROBLEMS = 20
"""Of a file that are explained: more are not read at once."""
KINDS = {
    "model_type": "must be keys with values",
    "model_attributes_type": "must be keys with values",
    "dict_type": "must be keys with values",
    "string_type": "must be text; put it in quotes",
    "list_type": "must be a list",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}
"""Our words for pydantic's errors of type."""
PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9_-]*$": "must be letters, digits, - and _, and not begin with - or _",
    r"^\.": "must begin with a dot",
}
"""Our words for the patterns of texts."""
BOUNDS = {
    "greater_than": ("gt", "must be above {}"),
    "greater_than_equal": ("ge", "must be at least {}"),
    "less_than": ("lt", "must be below {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "multiple_of": ("multiple_of", "must be a multiple of {}"),
    "string_too_long": ("max_length", "must have at most {} letters"),
}
"""Of pydantic's errors of size: the context's key, and our words."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: The sentence, which names key and value.
        hint: What to do.
        location: The key's place in the merged configuration; empty where the sentence alone
            names it.
    """

    what: str
    hint: str
    location: Location = ()


class InvalidConfigError(PipelineError):
    """A file whose values are wrong.

    Attributes:
        source: What messages call it.
        problems: What is wrong.
        raw: What was read.
        text: The file's text; None if there is no file.
    """

    def __init__(
        self, source: str, problems: Sequence[Problem], raw: Mapping[str, Any], text: str | None
    ) -> None:
        joined = join_problems(source, problems, text)
        super().__init__(joined.what, hint=joined.hint)
        self.source, self.problems, self.raw, self.text = source, problems, raw, text


def join_problems(source: str, problems: Sequence[Problem], text: str | None) -> PipelineError:
    """Make one error of all problems of a file.

    Args:
        source: What messages call the file.
        problems: What is wrong, at least one.
        text: The file's text, for the lines; None if there is no file.
    """
    lines = None if text is None else KeyLines(text)
    sentences = []
    for problem in problems:
        line = None
        if lines is not None:
            line = lines.at(problem.location) if problem.location else lines.mentioned(problem.what)
        sentences.append(problem.what if line is None else f"line {line}: {problem.what}")
    return PipelineError(
        f"{source}: " + "\n       ".join(dict.fromkeys(sentences)),
        hint="; ".join(dict.fromkeys(problem.hint for problem in problems)),
    )


def explain_errors(details: Sequence[Any]) -> list[Problem]:
    """Turn pydantic's errors into problems, each named once; of more than MOST_PROBLEMS the first.

    Near names are looked up for each unknown key, which takes seconds for thousands of them.
    """
    own = _once(details)
    found = [problem for detail in own[:MOST_PROBLEMS] for problem in _explain(detail)]
    if len(own) > MOST_PROBLEMS:
        found.insert(0, Problem(f"{len(own):,} problems, such as these:", "correct these first"))
    return found


def _once(details: Sequence[Any]) -> list[Any]:
    """Return errors without those that a phase has only taken over from the run's sections."""

    def identify(detail: Any, location: tuple[Any, ...]) -> tuple[Any, ...]:
        value = detail["input"]
        return location, detail["msg"], None if isinstance(value, dict) else repr(value)

    own = {identify(d, d["loc"]) for d in details if d["loc"][:1] != ("phases",)}
    return [
        d for d in details if d["loc"][:1] != ("phases",) or identify(d, d["loc"][2:]) not in own
    ]


def _explain(detail: Any) -> Iterable[Problem]:
    """Yield the problems of one of pydantic's errors: several if a validator lists them."""
    location = [part for part in detail["loc"] if part != "[key]"]  # pydantic's mark of a key
    if location[:1] == ["phases"] and len(location) > 3 and location[2] == "train":
        location.pop(2)
    key = ".".join(str(part) for part in location)
    value = detail["input"]
    shown = "" if isinstance(value, dict | list | BaseModel) else f" (found {value!r})"
    shown = " (it is empty)" if value is None else shown
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "invalid_key":  # a number or null, which is the value, too
        place = [*location[:-1], str(location[-1])]
        yield Problem(f"{key}: unknown key", explain_unknown_key(detail["loc"]), place)
        return
    if kind == "extra_forbidden":
        yield Problem(f"{key}: unknown key{shown}", explain_unknown_key(detail["loc"]), location)
        return
    if kind == "missing":
        yield Problem(f"{key}: missing", f"add `{location[-1]}:` to {_place(location)}", location)
        return
    if kind == "literal_error":
        choices = _choices(context)
        message, hint = f"must be one of {', '.join(choices)}", did_you_mean(value, choices)
        yield Problem(f"{key}: {message}{shown}", hint or _look_up(location), location)
        return
    if kind in BOUNDS:
        name, bound = BOUNDS[kind]
        message = bound.format(f"{context[name]:g}")
        yield Problem(f"{key}: {message}{shown}", _look_up(location), location)
        return
    if words := KINDS.get(kind) or PATTERNS.get(context.get("pattern", "")):
        yield Problem(f"{key}: {words}{shown}", _look_up(location), location)
        return
    for sentence in str(detail["msg"]).removeprefix("Value error, ").split("\n"):
        message = sentence[:1].lower() + sentence[1:]
        what = f"{key}: {message}{shown}" if key else message
        yield Problem(what, _look_up(location), location)


def explain_unknown_key(location: tuple[Any, ...]) -> str:
    """Return the hint for a key that its section does not have: where it belongs, or a near one."""
    name, here = str(location[-1]), keys_beside(location)
    if homes := [home for home in section_keys() if name in section_keys()[home]]:
        *others, last = [home if home == TOP else f"`{home}`" for home in homes]
        of = f"{', '.join(others)} and {last}" if others else last
        there = f"to `{homes[0]}:`" if homes[0] != TOP else "to the left edge of the file"
        move = "move it there" if others else f"move it {there}"
        return f"{name} is a key of {of}: {move}"
    some = f"known keys here: {join_first(here, 12)}; docs/configuration.md lists all"
    return did_you_mean(name, here) or some


def find_mistyped(raw: Mapping[Any, Any]) -> dict[str, str]:
    """Map unknown keys of a file to those that are meant: near, not in it, of no other section."""
    known = frozenset().union(*section_keys().values())
    unknown = [name for name in raw if isinstance(name, str) and name not in known]
    found: dict[str, str] = {}
    for name in unknown[:MOST_PROBLEMS]:
        for near in nearest(name, RunConfig.model_fields):
            if near not in raw and near not in found.values():
                found[name] = near
    return found


@cache
def section_keys() -> Mapping[str, frozenset[str]]:
    """Return the keys of each section of a file, by the section's path; TOP for the file itself."""
    found = {TOP: frozenset(RunConfig.model_fields), "phases": frozenset(PHASE_KEYS)}
    for name, field in RunConfig.model_fields.items():
        if name != "phases":
            found |= _sections_below(name, field.annotation)
    return found


def _sections_below(path: str, annotation: Any) -> dict[str, frozenset[str]]:
    """Return the keys of the section at a path, and of those inside of it."""
    found: dict[str, frozenset[str]] = {}
    for model in _models_in(annotation):
        found[path] = frozenset(model.model_fields)
        for name, field in model.model_fields.items():
            found |= _sections_below(f"{path}.{name}", field.annotation)
    return found


def keys_beside(location: tuple[Any, ...]) -> list[str]:
    """List the keys that the section at a location takes."""
    model: Any = RunConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        model = next(iter(_models_in(model.model_fields[part].annotation)))
    if model is Phase or (location[0] == "phases" and model is TrainConfig):
        return [*PHASE_KEYS, *TrainConfig.model_fields]
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section models of an annotation, also inside of unions, lists and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def _choices(context: Mapping[str, Any]) -> list[str]:
    """Return the values that a Literal takes, from pydantic's sentence: `'a', 'b' or 'c'`."""
    found = re.findall(r"'([^']*)'|([^\s',]+)", str(context.get("expected", "")))
    return [quoted or bare for quoted, bare in found if quoted or bare != "or"]


def _place(location: Sequence[Any]) -> str:
    above = ".".join(str(part) for part in location[:-1])
    return f"`{above}`" if above else "the file"


def _look_up(location: Sequence[Any]) -> str:
    """Return the hint where the sentence itself says what is right."""
    sections = section_keys()
    named = [str(part) for part in location if part in sections]
    if named[:1] == ["phases"]:
        named = [*named[1:], "train" if len(location) > 2 else "phases"]
    words = f"the keys of `{named[0]}`" if named else "its keys"
    return f"docs/configuration.md explains {words}"


def collect_errors(*checks: Callable[[], Any]) -> list[PipelineError]:
    """Run every check and list the errors that they raise."""
    found = []
    for check in checks:
        try:
            check()
        except PipelineError as error:
            found.append(error)
    return found
