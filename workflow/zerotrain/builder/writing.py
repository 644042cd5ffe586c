"""Writing a configuration of the project: a diff first, and on confirmation a backup and the file.

What is written is exactly what the diff showed: a confirmation names the digests of the file that
was compared and of the new text, and is refused once either is another.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact import create
from zerotrain.artifact.documents import check_object, parse_yaml, read_bytes, read_text
from zerotrain.artifact.documents.files import decode
from zerotrain.artifact.layout import CONFIGS
from zerotrain.builder.places import check_launch_files, configuration_file
from zerotrain.config.read import parse_config
from zerotrain.config.replace import check_replaceable, replace_file
from zerotrain.config.update import update_text
from zerotrain.errors import PipelineError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")
MOST_BYTES = 256 * 1024
CONTEXT = 3
"""Unchanged lines around each change, as `diff -u` shows them."""
BACKUPS = 1000
KINDS = {"@": "place", "+": "added", "-": "removed", " ": "same"}


@dataclass(frozen=True)
class DiffLine:
    """A line of a unified diff.

    Attributes:
        kind: place, added, removed or same: its class in the page.
        text: The line, with its sign.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Proposal:
    """A change of a configuration file that waits for its confirmation."""

    file: Path
    former: bytes | None
    """The file's bytes that were compared; None if there is no such file."""
    text: str
    """Its new text."""

    @property
    def digest(self) -> str:
        """Return what the confirmation has to name: a digest of both texts."""
        former = b"absent" if self.former is None else hashlib.sha256(self.former).digest()
        return hashlib.sha256(former + self.text.encode()).hexdigest()

    @property
    def changes(self) -> bool:
        """Return whether the file would have other bytes."""
        return self.former != self.text.encode()

    def diff(self) -> list[DiffLine]:
        """Return the unified diff, without its two lines of names."""
        before = (self.former or b"").decode(errors="replace").splitlines()
        lines = difflib.unified_diff(before, self.text.splitlines(), lineterm="", n=CONTEXT)
        return [DiffLine(KINDS[line[:1]], line) for line in list(lines)[2:]]


@dataclass(frozen=True)
class Written:
    """What a confirmed proposal has done."""

    file: Path
    backup: Path | None
    """The copy of the former file; None if there was none."""


def propose(name: str, text: str, start: str = "") -> Proposal:
    """Compare a configuration with the file that is to hold it.

    A new file gets the text as it is. An existing one keeps its comments, its order and the bytes
    of all values that stay.

    Args:
        name: The file's name in config/, with or without .yaml.
        text: The configuration.
        start: Path of the configuration that it began with, whose comments a new file gets.

    Raises:
        PipelineError: the name is no name, the configuration is invalid or names a launch file
            outside of the project, or the file cannot be changed by a program.
    """
    file = config_file(name)
    values = read_values(text, str(file))
    check_launch_files(values)
    parse_config(values, str(file))
    if not file.exists():
        return Proposal(file, None, with_comments_of(start, text, values))
    former = read_bytes(file, hint="write to another name")
    before = decode(former, file, "write to another name")
    parse_yaml(before, file, hint="write to another name")
    return Proposal(file, former, update_text(before, values, str(file)))


def confirm(name: str, text: str, digest: str, start: str = "") -> Written:
    """Write a proposal, if the file and the new text are those that were shown.

    Args:
        name: As in `propose`.
        text: As in `propose`.
        digest: The digest of the proposal that was shown.
        start: As in `propose`.

    Raises:
        PipelineError: the file was saved since, is read-only, or the proposal is another.
    """
    proposal = propose(name, text, start)
    file = proposal.file
    if proposal.digest != digest:
        raise _changed(file)
    if proposal.former is None:
        try:
            file.parent.mkdir(exist_ok=True)
            create(file, proposal.text)
        except FileExistsError as error:
            raise _changed(file) from error
        return Written(file, None)
    check_replaceable(file)
    backup = _back_up(file, proposal.former)
    if not replace_file(file, proposal.former, proposal.text.encode()):
        backup.unlink()
        raise _changed(file)
    return Written(file, backup)


def with_comments_of(start: str, text: str, values: dict[str, Any]) -> str:
    """Return a new file's text: that of the configuration that it began with, with its values.

    Args:
        start: Path of that configuration; empty without one.
        text: The text to take without one, or where no program can change it.
        values: What the new file has to mean.
    """
    text = text if text.endswith("\n") else f"{text}\n"
    if not start:
        return text
    try:
        before = read_text(configuration_file(start))
        parse_yaml(before, start)
        return update_text(before, values, start)
    except (PipelineError, OSError):
        return text


def config_file(name: str) -> Path:
    """Return the file of config/ with a name.

    Raises:
        PipelineError: it is no name of a file, or the file is a link out of the project.
    """
    stem = check_name(name.removeprefix(f"{CONFIGS}/").removesuffix(".yaml"), "configuration")
    file = CONFIGS / f"{stem}.yaml"
    if not file.resolve().is_relative_to(Path.cwd().resolve()):
        raise PipelineError(
            f"{file}: a link that leads out of the project, to {file.resolve()}",
            hint="the page writes only files of the project: choose another name",
        )
    return file


def check_name(name: str, what: str) -> str:
    """Check that a name can be a file's.

    Args:
        name: The name, without an ending.
        what: What it names, for the message.

    Raises:
        PipelineError: it has other characters, or is too long.
    """
    if not NAME.fullmatch(name):
        raise PipelineError(
            f"{name[:100]!r} cannot name a {what}" if name else f"the {what} has no name",
            hint="use letters, digits, -, _ and ., starting with a letter or digit; at most 80",
        )
    return name


def read_values(text: str, source: str) -> dict[str, Any]:
    """Read the values of a configuration's text.

    Raises:
        PipelineError: it is too large, no YAML, or holds no keys.
    """
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise PipelineError(
            f"{source}: more than {MOST_BYTES // 1024} KiB",
            hint="a configuration is far smaller; name data in files of its own",
        )
    found = parse_yaml(text, source, hint="correct that place of the text")
    return check_object(found, source, hint="start from a recipe of config/")


def _back_up(file: Path, content: bytes) -> Path:
    """Copy the former bytes to a free name next to the file: NAME.yaml.bak, NAME.yaml.bak2, ..."""
    for number in range(1, BACKUPS):
        backup = file.with_name(f"{file.name}.bak{number if number > 1 else ''}")
        try:
            create(backup, content.decode())
        except FileExistsError:
            continue
        return backup
    raise PipelineError(f"{file}: has {BACKUPS - 1} backups", hint=f"remove old ones: {file}.bak*")


def _changed(file: Path) -> PipelineError:
    return PipelineError(
        f"{file}: was saved by another program since the diff was shown; nothing was written",
        hint="look at the new diff, and confirm that",
    )
