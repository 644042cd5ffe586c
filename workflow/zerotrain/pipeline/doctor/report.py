"""The report: facts as nested keys, problems as sentences, as plain text or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.machine.host import gib

SECRETS = re.compile(r"\b(hf_|sk-|ghp_|github_pat_)\w{8,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
"""Hub tokens, and user and password in a URL."""


@dataclass
class Report:
    """Facts and problems. Keys that end in _bytes hold bytes; text shows them in GiB or MiB."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Sentences; without any, a training would start."""

    def text(self) -> str:
        """Format as plain text, without the home folder and without secrets."""
        count = len(self.problems)
        verdict = f"{count} problem{'s' if count > 1 else ''}" if count else "no problem found"
        lines = [f"zerotrain doctor: {verdict}", *(f"  - {problem}" for problem in self.problems)]
        return redact("\n".join([*lines, *_lines(self.facts, "")])) + "\n"

    def json(self) -> str:
        """Format as one JSON object: `problems`, and the facts by section."""
        return redact(json.dumps({"problems": self.problems, **self.facts}, indent=1)) + "\n"


def redact(text: str) -> str:
    """Remove the user's home folder and likely secrets from a text."""
    for home in {str(Path.home()), str(Path.home().resolve())} - {"/"}:
        text = re.sub(rf"{re.escape(home)}(?=[/\s\"':,;)]|$)", "~", text)
    return SECRETS.sub("***", text)


def _lines(facts: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in facts.items():
        name = key.removesuffix("_bytes")
        if isinstance(value, dict) and value:
            if not indent:
                yield ""
            yield f"{indent}{name}"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and value:
            yield f"{indent}{name}"
            for item in value:
                if isinstance(item, dict):
                    first, *rest = _lines(item, indent + "    ")
                    yield f"{indent}  - {first.strip()}"
                    yield from rest
                else:
                    yield f"{indent}  {item}"
        elif key.endswith("_bytes") and isinstance(value, int):
            yield f"{indent}{name}: {gib(value)}"
        else:
            yield f"{indent}{name}: {_word(value)}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if value or value == 0 else "none"
