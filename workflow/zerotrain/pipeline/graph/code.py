"""The code that a job's numbers depend on, as a parameter of the job: a code change reruns it.

Snakemake records the parameter, a text with a digest of tokens (zerotrain.artifact.sources), so
comments and file times rerun nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from zerotrain.artifact import code_tokens, sources, write_whole
from zerotrain.artifact.documents import read_object
from zerotrain.artifact.sources import (
    READ,
    code_digest,
    declared_file,
    file_code_sha256,
    source_files,
    training_digest,
    training_files,
)
from zerotrain.config.models import Phase
from zerotrain.config.run import RunConfig
from zerotrain.machine.disk_errors import DiskError
from zerotrain.models.encoding_code import encoding_code

FAMILIES = "zerotrain.models.families."
PLANNER = "zerotrain.launch.planner.planner"
WITHOUT_FAMILY = ("prepare_dataset", "report")
"""Rules whose stages load no model."""
READ_SOURCES = Path(".snakemake/code_digests.json")
"""What earlier calls have read from sources, which takes a second."""
RECORDED = re.compile(r"'code (kept|[0-9a-f]{64})\b")
"""The parameter as Snakemake records it."""


class Code(str):
    """The code parameter of a job: the digest of its code and the modules selected for it."""

    files: tuple[str, ...]
    """The sources whose changes rerun the job."""

    def __new__(cls, digest: str, chosen: Sequence[str] = (), files: Sequence[str] = ()) -> Code:
        """Join digest and modules into the text that Snakemake records."""
        found = super().__new__(cls, " ".join(["code", digest, *chosen]))
        found.files = tuple(files)
        return found

    @property
    def digest(self) -> str:
        """Return only the digest."""
        return self.split()[1]


KEPT = Code("kept")
"""The parameter of a job that no code change reruns."""


def job_code(rule: str, run: RunConfig, phase: Phase | None = None) -> Code:
    """Return the code that a job's numbers depend on.

    Args:
        rule: The job's rule.
        run: The job's run.
        phase: The job's phase, if it has one.
    """
    if rule == "cache_latents":
        return _encoding(run.family, run.data.has_masks)
    if rule in ("train_phase", "export_weights") and phase and phase.train.code_changes == "keep":
        return KEPT
    if rule == "train_phase":
        return _training(run.family)
    chosen = [] if rule in WITHOUT_FAMILY else [f"{FAMILIES}{run.family}"]
    if rule == "build_base":
        chosen += _builder(run)
    if rule == "render_launch":
        chosen = [PLANNER] if phase and phase.launch.preset == "auto" else []
    return _stage(rule, *chosen)


@cache
def _encoding(family: str, masks: bool) -> Code:
    """Return the code that encodes a family's samples, and scales their loss masks."""
    modules = encoding_code(family, masks=masks)
    files = [declared_file(name) for name in modules]
    with stored_reading():
        digest = _digest(map(code_digest, modules), files)
    return Code(digest, [family], files)


@cache
def _training(family: str) -> Code:
    """Return the code that decides the numbers of a family's training."""
    with stored_reading():
        return Code(training_digest(family), [family], training_files(family))


@cache
def _stage(rule: str, *chosen: str) -> Code:
    """Return the sources of a stage, of the modules selected with it, and its rule."""
    with stored_reading():
        files = [*source_files(f"zerotrain.stages.{rule}", *chosen), f"rules/{rule}.smk"]
        digests = [_file_code(file) for file in files]
    return Code(_digest(digests, files), [one.rpartition(".")[2] for one in chosen], files)


@cache
def _file_code(file: str) -> str:
    """Return the digest of a file, which several stages depend on."""
    return file_code_sha256(Path(file))


def _digest(digests: Iterable[str], files: Iterable[str]) -> str:
    lines = (f"{one}  {file}\n" for one, file in zip(digests, files, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _builder(run: RunConfig) -> list[str]:
    """Return the module that builds a preset, if the family has one."""
    builder = f"{FAMILIES}{run.family}_nano"
    return [builder] if run.is_preset and importlib.util.find_spec(builder) else []


@contextlib.contextmanager
def stored_reading() -> Iterator[None]:
    """Load what earlier calls have read from sources; store what is new at the end.

    It is discarded if the code that reads sources has changed.
    """
    modules = (code_tokens.__file__, sources.__file__)
    reader = hashlib.sha256(b"".join(Path(file).read_bytes() for file in modules)).hexdigest()
    if not READ.tokens:  # once in a process
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            found = read_object(READ_SOURCES)
            if found["reader"] == reader:
                READ.tokens.update(found["tokens"])
                READ.imports.update(found["imports"])
    before = len(READ.tokens), len(READ.imports)
    yield
    if (len(READ.tokens), len(READ.imports)) != before:
        with contextlib.suppress(DiskError):
            write_whole(READ_SOURCES, json.dumps({"reader": reader, **asdict(READ)}))


def is_code(recorded: str) -> bool:
    """Return whether a recorded parameter, as its `repr`, is a code parameter."""
    return RECORDED.match(recorded) is not None


def recorded_code(persistence: Any, output: Any) -> Code | None:
    """Read the code that made an output from Snakemake's record; None if there is no record."""
    for value in filter(is_code, persistence.params(output) or ()):
        _, digest, *chosen = value.strip("'").split()
        return Code(digest, chosen)
    return None


def is_code_changed(persistence: Any, job: Any) -> bool:
    """Return whether a job's code differs from the recorded code of its outputs."""
    code = job.params.get("code")
    if not isinstance(code, Code) or code == KEPT:
        return False
    records = [path for path in job.output if persistence.metadata(path)]
    found = [recorded_code(persistence, path) for path in records]
    return any(one is None or one.digest != code.digest for one in found)
