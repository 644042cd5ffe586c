"""Writing a configuration of the project: a diff first, and on confirmation a backup and the file.

What is written is exactly what the diff showed: a confirmation names the digests of the file that
was compared and of the new text, and is refused once either is another.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from zerotrain.artifact import create, write_whole
from zerotrain.artifact.documents import check_object, parse_yaml
from zerotrain.artifact.layout import CONFIGS, run_of
from zerotrain.artifact.whole_file import check_replaceable
from zerotrain.builder.pages import page
from zerotrain.config.read import LAUNCH_FILES, parse_config
from zerotrain.config.runs import train_command
from zerotrain.config.text import ConfigText, FileChangedError
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_to_read

EDITORS_LINE = "# yaml-language-server:"


def configuration_file(text: str) -> Path:
    """Return the configuration that a request names, as a path relative to the project.

    Raises:
        PipelineError: it is outside of config/, no .yaml file, or not there.
    """
    root = CONFIGS.resolve()
    try:
        path = Path(text).resolve()
        inside = path.is_relative_to(root) and path.suffix in (".yaml", ".yml") and path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a null byte
        inside = False
    if not inside:
        raise PipelineError(
            f"{text!r}: it is no configuration of {CONFIGS}/",
            hint="choose one of the list on the start page",
        )
    return CONFIGS / path.relative_to(root)


def comment_at_top(text: str) -> str:
    """Return the comment at the top of a configuration as one line, without that for editors."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    texts = (line.lstrip("# ") for line in lines if not line.startswith(EDITORS_LINE))
    return " ".join(texts).strip()


def check_launch_files(raw: Mapping[str, Any]) -> None:
    """Check that the launch files which a configuration names are in the project: they are read.

    Raises:
        PipelineError: one is outside of it.
    """
    phases = raw.get("phases")
    for section in (raw, *(phases if isinstance(phases, list) else ())):
        launch = section.get("launch") if isinstance(section, dict) else None
        name = launch.get("preset") if isinstance(launch, dict) else launch
        if not isinstance(name, str) or not name.endswith(LAUNCH_FILES):
            continue
        try:
            inside = Path(name).resolve().is_relative_to(Path.cwd().resolve())
        except (OSError, ValueError):
            inside = False
        if not inside:
            raise PipelineError(
                f"launch: {name!r} is not in the project's folder",
                hint="copy the file into the project, or choose a preset",
            )


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
    """Keep a configuration to start from under a name.

    It need not be valid. It is in a folder of its own, which no command takes for one of runs.

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


async def show_diff(request: Request) -> Response:
    """Answer with the diff of a configuration file; nothing is written."""
    form = await _form(request)
    name, text = _field(form, "name"), _field(form, "text")
    proposal = propose(name, text)
    values = {"proposal": proposal, "name": name, "text": text, "lines": proposal.diff()}
    return page("write", values)


async def write(request: Request) -> Response:
    """Write what was shown, and answer with where it is."""
    form = await _form(request)
    name, text, digest = (_field(form, key) for key in ("name", "text", "digest"))
    done = confirm(name, text, digest)
    values = {"done": done, "run": run_of(done.file), "command": train_command(done.file)}
    return page("written", values)


def show_templates(_: Request) -> Response:
    """Answer with the saved templates."""
    return page("saved", {"templates": list_templates(), "folder": FOLDER}, here="/templates")


async def save(request: Request) -> Response:
    """Save a template, and show the list."""
    form = await _form(request)
    name, text = _field(form, "name"), _field(form, "text")
    save_template(name, text, replace="replace" in form)
    return RedirectResponse("/templates", 303)


async def delete(request: Request) -> Response:
    """Delete a template, and show the list."""
    delete_template(_field(await _form(request), "name"))
    return RedirectResponse("/templates", 303)


async def _form(request: Request) -> FormData:
    return await request.form(max_files=0, max_fields=10, max_part_size=MOST_BYTES + 1)


def _field(form: FormData, name: str) -> str:
    value = form.get(name, "")
    # A browser ends each line of a text with CRLF.
    return value.replace("\r\n", "\n") if isinstance(value, str) else ""


routes = [
    Route("/write", show_diff, methods=["POST"]),
    Route("/write/confirm", write, methods=["POST"]),
    Route("/templates", show_templates),
    Route("/templates", save, methods=["POST"]),
    Route("/templates/delete", delete, methods=["POST"]),
]
