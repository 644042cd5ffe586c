"""Configurations that a user keeps to start from: files of config/templates.

A template need not be valid: what is not finished is kept, too. config/ has the runs, so a
template is in a folder of its own, which no command takes for a run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from zerotrain.artifact import create, write_whole
from zerotrain.artifact.layout import CONFIGS
from zerotrain.builder.places import comment_at_top
from zerotrain.builder.writing import check_name, read_values, with_last_line
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_to_read

FOLDER = CONFIGS / "templates"
MOST = 500
MOST_READ = 4096
"""Bytes of a template that are read for its card."""


@dataclass(frozen=True)
class Template:
    """A saved configuration."""

    name: str
    file: Path
    saved: datetime
    about: str
    """The comment at its top, or nothing."""


def list_templates() -> list[Template]:
    """List the templates by name; only regular files with a checked name count."""
    found = []
    for file in sorted(FOLDER.glob("*.yaml")):
        try:
            check_name(file.stem, "template")
            with open_to_read(file) as stream:
                saved = datetime.fromtimestamp(os.fstat(stream.fileno()).st_mtime)
                text = stream.read(MOST_READ).decode(errors="replace")
        except (OSError, PipelineError):
            continue
        found.append(Template(file.stem, file, saved, comment_at_top(text)))
    return found


def save_template(name: str, text: str, *, replace: bool = False) -> Template:
    """Keep a configuration under a name.

    Args:
        name: Without an ending.
        text: The configuration, which may be incomplete.
        replace: Whether a template of the name may be replaced.

    Raises:
        PipelineError: the name is no name or is taken, the text holds no keys, or there are too
            many.
    """
    file = _file(name)
    read_values(text, name)
    text = with_last_line(text)
    if replace and file.is_file():
        write_whole(file, text)
    elif len(os.listdir(FOLDER) if FOLDER.is_dir() else []) >= MOST:
        raise PipelineError(f"{FOLDER} has {MOST} files", hint="delete templates that are not used")
    else:
        FOLDER.mkdir(parents=True, exist_ok=True)
        try:
            create(file, text)
        except FileExistsError as error:
            raise PipelineError(
                f"there is a template {name} already",
                hint="choose another name, or tick that it is replaced",
            ) from error
    return next(one for one in list_templates() if one.name == name)


def delete_template(name: str) -> None:
    """Delete a template.

    Raises:
        PipelineError: it does not exist.
    """
    _known(name).unlink(missing_ok=True)


def _file(name: str) -> Path:
    file = FOLDER / f"{check_name(name, 'template')}.yaml"
    if file.is_symlink() or not FOLDER.resolve().is_relative_to(Path.cwd().resolve()):
        raise PipelineError(
            f"{file}: a link, which the page does not follow", hint="choose another name"
        )
    return file


def _known(name: str) -> Path:
    file = _file(name)
    if not file.is_file():
        raise PipelineError(f"there is no template {name}", hint="the page lists those there are")
    return file
