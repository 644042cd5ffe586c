"""Pasted command lines: the launcher and its flags, the script and its arguments."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.keys import Key, unknown_key
from zerotrain.importing.keys_accelerate import (
    ACCELERATE,
    DEEPSPEED_FLAGS,
    LAUNCH_FLAGS,
    TORCHRUN_FLAGS,
)

LAUNCHERS = {
    ("accelerate", "launch"): "accelerate",
    ("torchrun",): "torchrun",
    ("python", "-m", "torch.distributed.run"): "torchrun",
    ("python", "-m", "accelerate.commands.launch"): "accelerate",
    ("python3", "-m", "torch.distributed.run"): "torchrun",
}
VALUED = ("zero3_init_flag", "zero3_save_16bit_model", "downcast_bf16")
"""Flags of `accelerate launch` that hold true or false, and yet take a value."""

ACCELERATE_FLAGS: dict[str, Key] = {
    **{name: key for name, key in ACCELERATE.items() if "." not in name},
    **{name: ACCELERATE[path] for name, path in DEEPSPEED_FLAGS.items()},
    **LAUNCH_FLAGS,
}
HINT = "paste a whole command line: 'accelerate launch ... train.py ...' or 'torchrun ...'"
SEPARATORS = set(";|&")
REDIRECTION = re.compile(r"(?<=\s)(?:\d|&)?>{1,2}\s*(&\d|[^\s;|&]+)")


@dataclass
class Command:
    """One command line."""

    launcher: str
    """accelerate or torchrun."""
    flags: dict[str, Any] = field(default_factory=dict)
    script: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    log: str | None = None
    """Where its output was sent."""


def parse_commands(text: str) -> list[Command]:
    """Every training command of a pasted text.

    A backslash before white space joins lines, also where a page has made one line of them all.

    Raises:
        PipelineError: no such command, an unknown flag of the launcher, or no script.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s+", " ", "\n".join(lines) + "\n")
    logs = [file for file in REDIRECTION.findall(joined) if not file.startswith("&")]
    joined = REDIRECTION.sub(" ", joined)
    try:
        lexer = shlex.shlex(joined.replace("\n", " ; "), posix=True, punctuation_chars=";|&")
        lexer.whitespace_split = True
        lexer.commenters = ""
        words = list(lexer)
    except ValueError as error:
        raise PipelineError(f"--command: {error}".lower(), hint=HINT) from error
    if "accelerate" in words and "config" in words[words.index("accelerate") + 1 :][:1]:
        raise PipelineError(
            "--command: `accelerate config` asks questions and trains nothing",
            hint="`zerotrain launch init` asks them; `launch import FILE` takes what it wrote",
        )
    starts = [place for place in range(len(words)) if _launcher(words, place)]
    if not starts:
        raise PipelineError("--command: neither accelerate launch nor torchrun", hint=HINT)
    commands = [
        _parse(words[start:end])
        for start, end in zip(starts, [*starts[1:], len(words)], strict=True)
    ]
    commands[-1].log = logs[-1] if logs else None
    return commands


def _launcher(words: list[str], place: int) -> tuple[str, ...] | None:
    return next((n for n in LAUNCHERS if tuple(words[place : place + len(n)]) == n), None)


def _parse(words: list[str]) -> Command:
    launcher = _launcher(words, 0)
    assert launcher is not None
    command = Command(LAUNCHERS[launcher])
    rest = list(itertools.takewhile(lambda word: set(word) - SEPARATORS, words[len(launcher) :]))
    table = ACCELERATE_FLAGS if command.launcher == "accelerate" else TORCHRUN_FLAGS
    while rest and rest[0].startswith("-"):
        word, _, value = rest.pop(0).partition("=")
        name = "module" if word == "-m" else word.lstrip("-").replace("-", "_")
        if name not in table:
            raise unknown_key(f"{' '.join(launcher)}", name, list(table))
        if value:
            command.flags[name] = value
        elif table[name].kind == "flag" and name not in VALUED:
            command.flags[name] = True
        elif rest:
            command.flags[name] = rest.pop(0)
        else:
            raise PipelineError(f"--{name}: has no value", hint=HINT)
    if not rest:
        raise PipelineError(f"--command: no script after {' '.join(launcher)}", hint=HINT)
    command.script = rest.pop(0)
    command.arguments = _arguments(rest)
    return command


def _arguments(words: list[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, and a name alone, which is true."""
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value if equals else True
        elif name is None:
            raise PipelineError(f"--command: {word!r} belongs to no flag", hint=HINT)
        elif found[name] is True:
            found[name] = word
        else:
            found[name] = f"{found[name]},{word}"
    return found


def processes(command: Command) -> tuple[int | None, str]:
    """How many processes torchrun starts.

    Raises:
        PipelineError: it is left to the machine.
    """
    given = command.flags.get("nproc_per_node")
    if given is None:
        return 1, "torchrun's default of --nproc_per_node"
    if not str(given).isdigit() or int(given) < 1:
        raise PipelineError(
            f"--nproc_per_node is {given!r}", hint="give the number of GPUs of one machine"
        )
    return int(given), f"--nproc_per_node {given}"


def port(given: Any) -> int | None:
    """A port, or None where a guide leaves a place for one, as in --master_port=xxx."""
    return int(given) if str(given).isdigit() and 0 < int(given) < 65536 else None


def script_table(command: Command, tables: Mapping[str, Mapping[str, Key]]) -> str | None:
    """Whose script it is, by the arguments that it takes; None where none is known."""
    scores = {
        name: sum(argument in table for argument in command.arguments)
        for name, table in tables.items()
    }
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] else None
