"""Pasted command lines: the launcher, the script and its arguments, and whose script that is."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.keys import PROGRAMS
from zerotrain.launch.keys import (
    ACCELERATE,
    DEEPSPEED_FLAGS,
    DEEPSPEED_LAUNCHER_FLAGS,
    LAUNCH_FLAGS,
    TORCHRUN_FLAGS,
    Key,
    unknown_key,
)

LAUNCHERS = {
    ("accelerate", "launch"): "accelerate",
    ("torchrun",): "torchrun",
    ("python", "-m", "torch.distributed.run"): "torchrun",
    ("python", "-m", "torch.distributed.launch"): "torchrun",
    ("python", "-m", "accelerate.commands.launch"): "accelerate",
    ("python3", "-m", "torch.distributed.run"): "torchrun",
    ("python3", "-m", "torch.distributed.launch"): "torchrun",
    ("deepspeed",): "deepspeed",
    ("python",): "python",
    ("python3",): "python",
}
"""Longer ones with the same first word come first."""
FIRST_WORDS = ("deepspeed", "python", "python3")
"""Launchers only at the beginning of a command: other commands have them as arguments."""
ASSIGNMENT = re.compile(r"\w+=")
PYTHON_FLAGS = frozenset("bBdEhiIOqsSuvx")
VALUED = ("zero3_init_flag", "zero3_save_16bit_model", "downcast_bf16")
"""Boolean flags of `accelerate launch` that nevertheless take a value."""

ACCELERATE_FLAGS: dict[str, Key] = {
    **{name: key for name, key in ACCELERATE.items() if "." not in name},
    **{name: ACCELERATE[path] for name, path in DEEPSPEED_FLAGS.items()},
    **LAUNCH_FLAGS,
}
FLAGS: Mapping[str, Mapping[str, Key]] = {
    "accelerate": ACCELERATE_FLAGS,
    "torchrun": TORCHRUN_FLAGS,
    "deepspeed": DEEPSPEED_LAUNCHER_FLAGS,
    "python": {},
}
HINT = "paste a whole command line: 'accelerate launch ... train.py ...', 'torchrun ...'"
MOST_LETTERS = 128 * 1024
"""Of a command, as Linux passes one argument (MAX_ARG_STRLEN)."""
SEPARATORS = set(";|&\n")
REDIRECTION = re.compile(r"(?<=\s)(?:\d|&)?>{1,2}\s*(&\d|[^\s;|&]+)")


@dataclass
class Command:
    """One command line."""

    launcher: str
    """accelerate, torchrun, deepspeed or python."""
    flags: dict[str, Any] = field(default_factory=dict)
    script: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    arguments_file: str | None = None
    """The file that it has instead, as HfArgumentParser takes one."""
    log: str | None = None
    """The file that its output was redirected to."""


def parse_commands(text: str) -> list[Command]:
    """Parse every training command in a pasted text.

    A backslash before white space joins lines, even if a page has put them on one line.

    Raises:
        PipelineError: there is no such command, an unknown launcher flag, or no script.
    """
    if len(text) > MOST_LETTERS:
        raise PipelineError(f"--command: more than {MOST_LETTERS:,} letters", hint=HINT)
    joined = _with_variables(re.sub(r"\\\s+", " ", without_comments(text) + "\n"))
    logs = [file for file in REDIRECTION.findall(joined) if not file.startswith("&")]
    joined = REDIRECTION.sub(" ", joined)
    try:
        lexer = shlex.shlex(joined, posix=True, punctuation_chars="".join(SEPARATORS))
        lexer.whitespace, lexer.whitespace_split = " \t\r", True
        lexer.commenters = ""
        words = list(lexer)
    except ValueError as error:
        raise PipelineError(f"--command: {error}".lower(), hint=HINT) from error
    if "accelerate" in words and "config" in words[words.index("accelerate") + 1 :][:1]:
        raise PipelineError(
            "--command: `accelerate config` asks questions and trains nothing",
            hint="`zerotrain launch import FILE` takes the file that it wrote",
        )
    for place in range(len(words)):
        if _begins(words, place):
            check_command(words[place:])
    starts = [place for place in range(len(words)) if _launcher(words, place)]
    if not starts:
        raise PipelineError(
            "--command: none of accelerate launch, torchrun, deepspeed and python", hint=HINT
        )
    commands = [
        _parse(words[start:end])
        for start, end in zip(starts, [*starts[1:], len(words)], strict=True)
    ]
    launched = [command for command in commands if command.launcher != "python"]
    commands = launched or commands  # next to launchers, python only prepares something
    commands[-1].log = logs[-1] if logs else None
    return commands


COMMENT = re.compile(
    r"""\\\n|\\.#*|'[^']*'|"(?:\\.|[^"\\])*"|(?P<comment>(?<![^\s;|&])#[^\n]*)|.""", re.S
)
"""A character, something quoted, or a comment, which can start only where a word could."""


def without_comments(text: str) -> str:
    """Return the text of a shell script without its comments, as parsed by bash."""
    return COMMENT.sub(lambda found: "" if found["comment"] else found[0], text)


LINE = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\n])+\n?|\n""", re.S)
"""A line of a shell script, which a line break in quotes does not end."""
ASSIGNED = re.compile(
    r"""[ \t]*(?:export[ \t]+)?(\w+)=((?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s;&"'\\])*)"""
    r"""[ \t]*(?:&&|;|$)""",
    re.M,
)
"""A command that only sets a variable: A=1, not A=1 python ..."""


def _with_variables(text: str) -> str:
    """Return the text with variables replaced by values that it sets at the beginning of lines."""
    values: dict[str, str] = {}

    def replaced(part: str) -> str:
        return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], found[0]), part)

    rest = ""
    for line in LINE.findall(text):
        while found := ASSIGNED.match(line):
            values[found[1]] = replaced("".join(shlex.split(found[2])))
            line = line[found.end() :]
        rest += line
    return replaced(rest)


def _launcher(words: list[str], place: int) -> tuple[str, ...] | None:
    found = next((n for n in LAUNCHERS if tuple(words[place : place + len(n)]) == n), None)
    if found is None or len(found) > 1 or words[place] not in FIRST_WORDS:
        return found
    return found if _begins(words, place) else None


def _begins(words: list[str], place: int) -> bool:
    """Return whether a word is the first of a command."""
    before = words[place - 1] if place else ";"
    return not set(before) - SEPARATORS or ASSIGNMENT.match(before) is not None


def _parse(words: list[str]) -> Command:
    launcher = _launcher(words, 0)
    assert launcher is not None
    command = Command(LAUNCHERS[launcher])
    rest = list(itertools.takewhile(lambda word: set(word) - SEPARATORS, words[len(launcher) :]))
    table = FLAGS[command.launcher]
    while command.launcher == "python" and rest and _is_python_flag(rest[0]):
        rest.pop(0)
    while rest and rest[0].startswith("-"):
        word, _, value = rest.pop(0).partition("=")
        name = "module" if word == "-m" else word.lstrip("-").replace("-", "_")
        if name not in table:
            raise unknown_key(f"{' '.join(launcher)}", name, list(table))
        if value:
            command.flags[name] = value
        elif table[name].type == "boolean" and name not in VALUED:
            command.flags[name] = True
        elif rest:
            command.flags[name] = rest.pop(0)
        else:
            raise PipelineError(f"--{name}: has no value", hint=HINT)
    if not rest:
        raise PipelineError(f"--command: no script after {' '.join(launcher)}", hint=HINT)
    command.script = rest.pop(0)
    if len(rest) == 1 and Path(rest[0]).suffix in (".json", ".yaml", ".yml"):
        check_script(command.script, rest[0])
        command.arguments_file = rest[0]
    else:
        command.arguments = _arguments(rest)
    return command


def _is_python_flag(word: str) -> bool:
    return word == "-m" or (word[:1] == "-" and word != "-" and set(word[1:]) <= PYTHON_FLAGS)


def _arguments(words: list[str]) -> dict[str, Any]:
    """Parse `--name value`, `--name=value`, and a name alone, which means true."""
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
    """Return how many processes a launcher other than accelerate's starts; None if not given.

    Raises:
        PipelineError: the number depends on the machine.
    """
    if command.launcher == "python":
        return 1, "plain python starts one process"
    flag = "nproc_per_node" if command.launcher == "torchrun" else "num_gpus"
    given = command.flags.get(flag)
    if given is None and flag == "num_gpus":
        return None, "deepspeed starts one for every GPU"
    if given is None:
        return 1, "torchrun's default of --nproc_per_node"
    if not str(given).isdigit() or int(given) < 1:
        raise PipelineError(f"--{flag} is {given!r}", hint="give the number of GPUs of one machine")
    return int(given), f"--{flag} {given}"


def port(given: Any) -> int | None:
    """Return a port; None for a placeholder in a guide, as in --master_port=xxx."""
    return int(given) if str(given).isdigit() and 0 < int(given) < 65536 else None


@dataclass(frozen=True)
class Marks:
    """What a program's commands have and those of no other program."""

    keys: frozenset[str] = frozenset()
    """Flags of its scripts."""
    scripts: str = "(?!)"
    """A regular expression of its scripts' names without folders, or of its modules."""
    commands: str = "(?!)"
    """A regular expression of its own commands."""


def _marks(rows: Mapping[str, Any]) -> dict[str, Marks]:
    return {
        name: Marks(**{**row, "keys": frozenset(row.get("keys", ()))}) for name, row in rows.items()
    }


SUPPORTED = _marks(PROGRAMS["supported"])
"""The programs whose arguments are read; diffusers' examples are read by their scripts' names."""
UNSUPPORTED = _marks(PROGRAMS["unsupported"])
"""Programs that are refused by their names."""
ADVICE = (
    "write its values into `zerotrain new`'s file; `launch import` reads its accelerate or "
    "DeepSpeed file, and the command without the script's flags"
)


def find_program(script: str, arguments: Iterable[str]) -> str | None:
    """Return which of SUPPORTED a script belongs to; None if it has no mark of any.

    Raises:
        PipelineError: it belongs to a program that is not read, or has marks of several.
    """
    check_script(script)
    given = set(arguments)
    for name, marks in UNSUPPORTED.items():
        if marks.keys & given:
            raise refused_program(script, name)
    found = {name: sorted(marks.keys & given) for name, marks in SUPPORTED.items()}
    found = {name: keys for name, keys in found.items() if keys}
    if len(found) > 1:
        flags = " and ".join(f"--{keys[0]}" for keys in found.values())
        raise PipelineError(
            f"{script}: {flags} belong to different programs", hint="paste a command of one program"
        )
    return next(iter(found), None)


def check_script(script: str, file: str = "") -> None:
    """Check that a script is of no program that is not read.

    Args:
        script: Its path or module.
        file: What follows it, if that is one file.

    Raises:
        PipelineError: it is.
    """
    for name, marks in UNSUPPORTED.items():
        if re.fullmatch(marks.scripts, f"{script.rpartition('/')[2]} {file}".rstrip()):
            raise refused_program(f"{script} {file}".rstrip(), name)


def check_command(words: Sequence[str]) -> None:
    """Refuse the commands of programs that are not read.

    Args:
        words: The words of the command, whose first is the program's or python's.

    Raises:
        PipelineError: it is one of theirs.
    """
    for name, marks in UNSUPPORTED.items():
        if re.fullmatch(marks.commands, words[0].rpartition("/")[2]):
            raise refused_program(" ".join(words[:2]), name)


def refused_program(command: str, name: str) -> PipelineError:
    """Return the error for a command of a program that is not read."""
    return PipelineError(f"{command}: a command of {name}, which is not read", hint=ADVICE)


def unknown_script(script: str) -> PipelineError:
    """Return the error for a script with arguments that no program is recognised by."""
    known = ", ".join(f"--{min(marks.keys)}" for marks in SUPPORTED.values())
    return PipelineError(
        f"{script}: not a script that is read: diffusers' examples are known by their names, other "
        f"programs by flags such as {known}",
        hint=ADVICE,
    )
