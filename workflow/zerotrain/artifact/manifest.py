"""A published folder, read and checked by its manifest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact.damage import MANIFEST, file_sha256, find_damage
from zerotrain.artifact.documents import DocumentError, describe_kind, read_json
from zerotrain.artifact.documents.names import find_name_error, find_text_error, quote
from zerotrain.artifact.layout import place_in_results, rebuild_hint
from zerotrain.artifact.leftovers import recover_interrupted_publish
from zerotrain.artifact.links import check_links
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import write_text

FORMAT = 1
KEYS = frozenset(("format", "kind", "content", "files", "parents", "made_by"))
"""A manifest's keys; another program's manifest shares a few of them at most."""
RECORDS = "records/"
DATASET = "dataset"
"""The kind whose content may state the identity, as its lists are in files; `zerotrain trace`
computes it from them."""
IDENTITY = "identity"
"""The key of the content that states it."""
PARTS = ("content", "files", "parents", "made_by")
SHA256 = re.compile(r"[0-9a-f]{64}")
DEPTH = 2
"""How deep below its folder a file of a model may be: in the folder of a part."""


def digest(value: Any) -> str:
    """Compute the sha256 of a JSON value in its canonical form (sorted keys, no spaces)."""
    return hashlib.sha256(_CANONICAL.encode(value).encode()).hexdigest()


def streamed_digest(value: Any) -> str:
    """Compute the `digest` of nested objects whose lists may be iterators, one item at a time."""
    found = hashlib.sha256()
    for text in _stream(value):
        found.update(text.encode())
    return found.hexdigest()


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _stream(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield "{"
        for number, name in enumerate(sorted(value)):
            yield f"{',' * bool(number)}{_CANONICAL.encode(name)}:"
            yield from _stream(value[name])
        yield "}"
    elif isinstance(value, Iterator):
        yield "["
        for number, item in enumerate(value):
            yield f"{',' * bool(number)}{_CANONICAL.encode(item)}"
        yield "]"
    else:
        yield _CANONICAL.encode(value)


def sizes_digest(place: Path) -> str:
    """Compute the digest that identifies an external folder or file: from its names and sizes."""
    root = place.parent if place.is_file() else place
    below = [place] if place.is_file() else place.rglob("*")
    files = sorted(path for path in below if path.is_file())
    return digest([[path.relative_to(root).as_posix(), path.stat().st_size] for path in files])


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value so that equal values give equal bytes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Artifact:
    """A published folder whose manifest has been read."""

    folder: Path
    kind: str
    content: dict[str, Any]
    files: dict[str, dict[str, Any]]
    parents: dict[str, dict[str, str]]
    made_by: dict[str, Any]
    recipe: dict[str, Any] | None = None
    """What its stage made it from (zerotrain.artifact.recipe); None if no rule's stage made it."""

    @property
    def identity(self) -> str:
        """Return the digest of the folder's content, which excludes its maker, time and path."""
        stated = self.content.get(IDENTITY)
        if self.kind == DATASET and isinstance(stated, str):
            return stated
        files = {n: f["sha256"] for n, f in self.files.items() if not n.startswith(RECORDS)}
        return digest({"kind": self.kind, "content": self.content, "files": files})

    def path(self, name: str) -> Path:
        """Return the path of a listed file.

        Raises:
            PipelineError: the manifest does not list it, or it is a link to another place.
        """
        if name not in self.files:
            raise PipelineError(
                f"{self.folder}: {name} is not listed in {MANIFEST}",
                hint="files that the manifest does not list are never read; build the folder again",
            )
        check_links(self.folder, name, self.kind)
        return self.folder / name

    def verify(
        self,
        sha256: Callable[[Path], str] | None = file_sha256,
        names: Iterable[str] | None = None,
    ) -> None:
        """Check that listed files exist with their sizes and sha256.

        Args:
            sha256: Computes a file's hash; None: do not compare hashes.
            names: The files to check; default: all.

        Raises:
            PipelineError: a file is missing or differs; the message names the first.
        """
        files = self.files if names is None else {name: self.files[name] for name in names}
        for name in files:
            check_links(self.folder, name, self.kind)
        for damage in find_damage(self.folder, files, sha256):
            hint = rebuild_hint(self.folder, self.kind, self.parents)
            raise PipelineError(str(damage), hint=hint)


def is_published(folder: Path) -> bool:
    """Return whether the folder has a manifest, the mark of a complete artifact."""
    return (folder / MANIFEST).is_file()


def is_described(folder: Path) -> bool:
    """Return whether the folder's manifest is from this program: others use its name as well.

    Raises:
        PipelineError: the manifest is truncated or not JSON.
    """
    if not is_published(folder):
        return False
    ours = len(KEYS & _load(folder).keys()) * 2 >= len(KEYS)
    return ours or place_in_results(folder) is not None


def kind_of(folder: Path) -> str | None:
    """Read the kind of a folder from its manifest; None if it has no manifest of this program.

    Raises:
        PipelineError: the manifest is truncated or not JSON.
    """
    return str(_load(folder).get("kind")) if is_described(folder) else None


def check_published(folder: Path, *, ours: bool = False) -> None:
    """Check that a folder that this program made has its manifest.

    Args:
        folder: Any folder; another program's needs no manifest.
        ours: Whether its content shows that this program made it, even if it was moved.

    Raises:
        PipelineError: the manifest is missing.
    """
    if (ours or place_in_results(folder)) and folder.is_dir() and not is_published(folder):
        raise PipelineError(
            f"{folder}: no {MANIFEST}, so this folder is unfinished or damaged",
            hint=rebuild_hint(folder),
        )


def read_around(
    path: Path, kinds: Sequence[str], *, sha256: Callable[[Path], str] = file_sha256
) -> Artifact | None:
    """Read and verify the published folder that is a path, or lists it or files in it.

    Args:
        path: A folder or a file, of any origin.
        kinds: The accepted kinds.
        sha256: Computes a file's hash.

    Returns:
        The artifact, or None if no manifest describes the path: it is another program's.

    Raises:
        PipelineError: this program made it and it is incomplete, or of another kind.
    """
    if path.is_dir():
        recover_interrupted_publish(path)
        check_published(path)
        if is_described(path):
            return read(path, kinds, sha256=sha256)
    folder = find_lister(path)
    return None if folder is None else read(folder, kinds, sha256=sha256)


def find_lister(path: Path) -> Path | None:
    """Return the published folder whose manifest lists a path, or files in it.

    Raises:
        PipelineError: a manifest above the path is truncated or not JSON.
    """
    if len(path.parents) < DEPTH:
        path = path.absolute()
    for folder in list(path.parents)[:DEPTH]:
        if is_described(folder) and _lists(folder, path.relative_to(folder).as_posix()):
            return folder
    return None


def _lists(folder: Path, name: str) -> bool:
    """Return whether a folder's manifest lists a file, or files in a folder of that name."""
    files = _load(folder).get("files")
    known = files if isinstance(files, dict) else ()
    return any(one == name or one.startswith(f"{name}/") for one in known)


def read(
    folder: Path,
    kind: str | Sequence[str],
    *,
    verify: bool = True,
    sha256: Callable[[Path], str] = file_sha256,
) -> Artifact:
    """Read a published folder and check that it is complete.

    Args:
        folder: The folder.
        kind: Its kind, or the accepted kinds.
        verify: Whether to hash files; otherwise only presence and sizes are compared.
        sha256: Computes a file's hash.

    Raises:
        PipelineError: there is no manifest, it has another kind or format, or a file is missing or
            differs.
    """
    artifact = read_manifest(folder, kind)
    artifact.verify(sha256 if verify else None)
    return artifact


def read_manifest(folder: Path, kind: str | Sequence[str] | None) -> Artifact:
    """Read a folder's manifest without checking its files.

    Args:
        folder: The folder.
        kind: Its kind, or the accepted kinds; None accepts each.

    Raises:
        PipelineError: there is no manifest, or it has another kind or format.
    """
    recover_interrupted_publish(folder)
    kinds = [kind] if isinstance(kind, str) else [*(kind or ())]
    if not is_published(folder):
        raise PipelineError(
            f"{folder}: no {MANIFEST}, so this {' '.join([*kinds[:1], 'folder'])} is missing or "
            "unfinished",
            hint=rebuild_hint(folder)
            if place_in_results(folder)
            else "run `snakemake --cores all train`, which builds what is missing",
        )
    path, found = folder / MANIFEST, _load(folder)
    if found.get("format") != FORMAT or (kinds and found.get("kind") not in kinds):
        expected = f"kind {' or '.join(map(repr, kinds))}" if kinds else "any kind"
        raise PipelineError(
            f"{path}: kind {found.get('kind')!r}, format {found.get('format')!r}; "
            f"expected {expected}, format {FORMAT}",
            hint="give the folder of the right stage, or rebuild it with this version",
        )
    if wrong := find_manifest_error(found):
        raise PipelineError(
            f"{path}: {wrong}",
            hint=f"no version of this program writes that: remove {folder} if you do not know who "
            "made it",
        )
    content, files, parents, made_by = (found[part] for part in PARTS)
    return Artifact(folder, found["kind"], content, files, parents, made_by, found.get("recipe"))


def _load(folder: Path) -> dict[str, Any]:
    """Return the JSON of a manifest, empty if it is not an object."""
    try:
        found = read_json(folder / MANIFEST)
    except DocumentError as error:
        raise DocumentError(folder / MANIFEST, error.why, hint=rebuild_hint(folder)) from error
    return found if isinstance(found, dict) else {}


def find_manifest_error(found: dict[str, Any]) -> str | None:
    """Return what is wrong with a manifest's parts, as readers rely on their types and names.

    Args:
        found: The manifest's JSON.

    Returns:
        A sentence on the first error; None if there is no error.
    """
    for part in (*PARTS, *({"recipe"} & found.keys())):
        if not isinstance(found.get(part), dict):
            kind = describe_kind(found[part]) if part in found else None
            return f"{part} is {kind}, not an object" if kind else f"no {part}"
    return _find_files_error(found["files"]) or _find_parents_error(found["parents"])


def _find_files_error(files: dict[str, Any]) -> str | None:
    for name, entry in files.items():
        if error := find_name_error(name):
            return f"files: the name {quote(name)} {error}"
        if not isinstance(entry, dict) or not {"sha256", "bytes"} <= entry.keys():
            return f"files: {quote(name)} has no sha256 or no bytes"
        sha256, size = entry["sha256"], entry["bytes"]
        if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            return f"files: {quote(name)} has the sha256 {sha256!r}, not 64 hexadecimal digits"
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**63:
            return f"files: {quote(name)} has the size {size!r:.40}, not a number of bytes"
    parts = [name.split("/") for name in files]
    folders = {"/".join(names[:end]) for names in parts for end in range(1, len(names))}
    for name in files:
        if name in folders:
            return f"files: {quote(name)} is listed as a file and as a folder"
    return None


def _find_parents_error(parents: dict[str, Any]) -> str | None:
    for name, entry in parents.items():
        values = [entry.get(key) for key in ("path", "identity")] if isinstance(entry, dict) else []
        if len(values) != 2 or not all(isinstance(value, str) for value in values):
            return f"parents: {quote(name)} has no path or no identity"
        if error := find_text_error(str(values[0])):
            return f"parents: the path {quote(values[0])} {error}"
    return None
