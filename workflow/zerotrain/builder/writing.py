"""Writing a configuration of the project: a diff first, and on confirmation a backup and the file.

What is written is exactly what the diff showed: a confirmation names the digests of the file that
was compared and of the new text, and is refused once either is another.
"""

from __future__ import annotations

import copy
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact import create
from zerotrain.artifact.documents import check_object, parse_yaml
from zerotrain.artifact.layout import CONFIGS
from zerotrain.artifact.whole_file import check_replaceable
from zerotrain.builder.places import check_launch_files
from zerotrain.config.read import parse_config
from zerotrain.config.text import ConfigText, FileChangedError
from zerotrain.errors import PipelineError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")
MOST_BYTES = 256 * 1024
BACKUPS = 1000


@dataclass(frozen=True)
class Proposal:
    """A change of a configuration file that waits for its confirmation."""

    file: Path
    edited: ConfigText

    @property
    def digest(self) -> str:
        """Return what the confirmation has to name: a digest of both texts."""
        texts = repr((self.edited.former, self.edited.text))
        return hashlib.sha256(texts.encode(errors="backslashreplace")).hexdigest()

    @property
    def changes(self) -> bool:
        """Return whether the file would have another text."""
        return self.edited.former != self.edited.text

    def diff(self) -> list[str]:
        """Return the unified diff, without its two lines of names."""
        return self.edited.diff()[2:]


@dataclass(frozen=True)
class Written:
    """What a confirmed proposal has done."""

    file: Path
    backup: Path | None
    """The copy of the former file; None if there was none."""


def propose(name: str, text: str) -> Proposal:
    """Compare a configuration with the file that is to hold it.

    A new file gets the text as it is. An existing one keeps its comments, its order and the bytes
    of all values that stay.

    Args:
        name: The file's name in config/, with or without .yaml.
        text: The configuration.

    Raises:
        PipelineError: the name is no name, the configuration is invalid or names a launch file
            outside of the project, or the file cannot be changed by a program.
    """
    file = config_file(name)
    values = read_values(text, str(file))
    check_launch_files(values)
    parse_config(copy.deepcopy(values), str(file))
    if not file.exists():
        return Proposal(file, ConfigText(with_last_line(text), file, is_new=True))
    return Proposal(file, ConfigText.read(file, hint="write to another name").update(values))


def confirm(name: str, text: str, digest: str) -> Written:
    """Write a proposal, if the file and the new text are those that were shown.

    Args:
        name: As in `propose`.
        text: As in `propose`.
        digest: The digest of the proposal that was shown.

    Raises:
        PipelineError: the file was saved since, is read-only, or the proposal is another.
    """
    proposal = propose(name, text)
    file, former = proposal.file, proposal.edited.former
    if proposal.digest != digest:
        raise FileChangedError(file)
    if former is None:
        proposal.edited.save(file)
        return Written(file, None)
    check_replaceable(file)
    backup = _back_up(file, former)
    try:
        proposal.edited.save(file)
    except FileChangedError:
        backup.unlink()
        raise
    return Written(file, backup)


def with_last_line(text: str) -> str:
    """Return a text whose last line is ended."""
    return text if text.endswith("\n") else f"{text}\n"


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


def _back_up(file: Path, former: str) -> Path:
    """Copy the former text to a free name next to the file: NAME.yaml.bak, NAME.yaml.bak2, ..."""
    for number in range(1, BACKUPS):
        backup = file.with_name(f"{file.name}.bak{number if number > 1 else ''}")
        try:
            create(backup, former)
        except FileExistsError:
            continue
        return backup
    raise PipelineError(f"{file}: has {BACKUPS - 1} backups", hint=f"remove old ones: {file}.bak*")
