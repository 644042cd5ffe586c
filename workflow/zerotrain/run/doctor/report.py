"""The report: facts as nested keys, problems as sentences, as plain text or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.machine.host import gib

HIDDEN = "***"
NAMES = (
    r"(?:api[_-]?key|access[_-]?key|(?:private|wandb|encryption|account)[_-]?key|secret(?:[_-]?key)?"
    r"|token|passw(?:or)?d|passphrase|_pass|credentials?|authorization|connection_string|webhook_url)"
)
"""Parts of the names of values that are secret, as in HF_TOKEN and aws_secret_access_key."""
NO_SECRET = r"(?:eos|bos|pad|unk|sep|cls|mask|trigger|instance)_token"
"""Names of words that a model knows."""
SECRETS = (
    # Keys with a prefix: Hugging Face, OpenAI, Anthropic, GitHub, GitLab, Slack, AWS, Google, npm,
    # PyPI, W&B, Replicate, DigitalOcean.
    r"\b(?:hf_|api_org_|gh[opsur]_|github_pat_|wandb_v1_|r8_|do[opr]_v1_)[\w-]{8,}",
    r"\bgl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|imt|wt)-[\w-]{8,}",
    r"\bsk-(?=[\w-]*\d)[\w-]{20,}|\bxox[abeprs]-(?=[\w-]*\d)[\w-]{10,}",
    r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\b(?:npm_|pypi-)[\w-]{16,}",
    # Webhooks of Discord and Slack, which trainers notify; Stripe, SendGrid, Telegram.
    r"(?<=/webhooks/)\d+/[\w-]+|(?<=hooks\.slack\.com/services/)[\w/]+",
    r"\b[rs]k_(?:live|test)_\w{8,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\b\d{6,}:[\w-]{30,}",
    r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*",  # a JSON Web Token
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    # W&B's former keys; commits have as many digits.
    r"(?<!revision[:=])(?<!revision: )(?<!revision: ['\"])(?<!revision\": \")(?<!commit )"
    r"(?<!snapshots/)\b[0-9a-fA-F]{40}\b",
    r"(?<=://)[^/\s@]+(?=@)",  # user, password or token in a URL
    r"(?i:(?<=[?&])(?:sig|signature|x-amz-[a-z-]+|x-goog-[a-z-]+|se|sv|key)=[^&\s\"']+)",
    r"(?i:(?<=authorization: )(?:bearer|basic)\s+[^\s\"']+)",
    r"(?i:\b(?:bearer|basic)\s+(?=[\w~+/=-]*[.\d_~+/=]\w)[\w.~+/=-]{8,})",
)
"""Forms of keys, as the well-known scanners look for them.

A list of our own: detect-secrets 1.5.0, the maintained library, finds keys only in their exact form
and knows neither Hugging Face's, Anthropic's and W&B's keys nor `Bearer`, `TOKEN@host` and `sig=`.
A text that is to be pasted rather loses a word too many.
"""
_SECRET = re.compile("|".join(SECRETS))
_NAMED = re.compile(
    rf"""(?ix)\b (?!(?:[\w.-]*[.-])?{NO_SECRET}\b) ([\w.-]*{NAMES}(?:_?\d+)? ["']? \s*[:=]\s*)
    (?:"[^"\n]+" | '[^'\n]+' | [^\s"',;)\]}}}}]+)"""
)
_OPTION = re.compile(rf"(?i)(?<!\S)(--(?!{NO_SECRET})[\w-]*{NAMES}\s+)[^\s-]\S*")
_SECRET_NAME = re.compile(rf"(?i)^(?!(?:.*[.-])?{NO_SECRET}$).*{NAMES}(?:_?\d+)?$")


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
        return redact("\n".join([*lines, *_lines(_without_secrets(self.facts), "")])) + "\n"

    def json(self) -> str:
        """Format as one JSON object: `problems`, and the facts by section."""
        found = _without_secrets({"problems": self.problems, **self.facts})
        return json.dumps(found, indent=1) + "\n"


def redact(text: str) -> str:
    """Remove the user's home folder and likely secrets from a text."""
    for home in {str(Path.home()), str(Path.home().resolve())} - {"/"}:
        text = re.sub(rf"{re.escape(home)}(?=[/\s\"':,;)]|$)", "~", text)
    for named in (_OPTION, _NAMED):
        text = named.sub(rf"\1{HIDDEN}", _SECRET.sub(HIDDEN, text))
    return text


def _without_secrets(value: Any) -> Any:
    """Redact all texts, and the values whose name says that they are secret."""
    if isinstance(value, dict):
        return {
            redact(str(key)): HIDDEN
            if one and _SECRET_NAME.search(str(key))
            else _without_secrets(one)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_secrets(one) for one in value]
    return redact(value) if isinstance(value, str) else value


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
