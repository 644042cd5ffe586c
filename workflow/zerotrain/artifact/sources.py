"""The source files that a module depends on, found by reading its imports, without importing it.

Their digest is a parameter of jobs (zerotrain.pipeline.graph.code), so that an edit reruns the jobs
that depend on it. A training records the digest of the files that decide its numbers; exceptions
are listed in zerotrain.artifact.declared_code. Digests are of tokens
(zerotrain.artifact.code_tokens): they are the same in every version of Python, and after edits of
comments, docstrings or layout.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from zerotrain.artifact.code_tokens import code_text
from zerotrain.artifact.declared_code import NOT_FOLLOWED, WITHOUT_EFFECT

PACKAGE = Path(__file__).parents[1]


@dataclass
class ReadSources:
    """What was read from sources, by the digest of a file's bytes."""

    tokens: dict[str, str] = field(default_factory=dict)
    """The digest of the tokens."""
    imports: dict[str, list[str]] = field(default_factory=dict)
    """The modules of this package that are imported."""


READ = ReadSources()
"""Of this process. Whoever stores it saves later processes half a second."""


def source_files(*modules: str) -> list[str]:
    """List the files of the given zerotrain modules and of all they import, sorted.

    Args:
        modules: Dotted names such as ``zerotrain.stages.evaluate``. A module that is selected at
            run time (a model family) is passed together with the module that selects it.

    Returns:
        Paths relative to the working directory where possible.
    """
    return _shown(_closure(modules))


def training_files(family: str) -> list[str]:
    """Return the files that decide the numbers of a family's training, like `source_files`.

    Args:
        family: The name of a model family.
    """
    return _shown(_training_closure(family))


def declared_file(name: str) -> str:
    """Return the file of a module, or of the module of `module:Class`."""
    return _shown(_must_exist(name.partition(":")[0])[-1:])[0]


def source_digest(*modules: str) -> str:
    """Return the digest of the code of these modules and of all they import."""
    return _digest(_closure(modules))


def training_digest(family: str) -> str:
    """Return the digest of the code that decides the numbers of a family's training.

    Args:
        family: The name of a model family.
    """
    return _digest(_training_closure(family))


def code_digest(*names: str) -> str:
    """Return the digest of the code of only these modules, or of `module:Class`, wherever they are.

    For a class only its own text counts. It may use its module's imports, but no other definitions
    of the module, as changes of those would go unnoticed.
    """
    found = []
    for name in names:
        module, _, inside = name.partition(":")
        path = _must_exist(module)[-1]
        found.append(_text_sha256(_code(path, inside)) if inside else file_code_sha256(path))
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


def file_code_sha256(path: Path) -> str:
    """Return the digest of the tokens of a source or rule file; of its bytes if it has none."""
    content = path.read_bytes()
    of_bytes = hashlib.sha256(content).hexdigest()
    if of_bytes not in READ.tokens:
        try:
            found = _text_sha256(code_text(_decoded(content)))
        except (SyntaxError, UnicodeDecodeError):
            found = of_bytes
        READ.tokens[of_bytes] = found
    return READ.tokens[of_bytes]


def _text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _decoded(content: bytes) -> str:
    return content.decode("utf-8").replace("\r\n", "\n")


def _digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(f"{file_code_sha256(path)}  {_name_of(path)}\n".encode())
    return total.hexdigest()


def _training_closure(family: str) -> set[Path]:
    roots = ["zerotrain.training.rank", f"zerotrain.models.families.{family}"]
    return _closure(roots, WITHOUT_EFFECT)


def _closure(modules: Iterable[str], without: tuple[str, ...] = ()) -> set[Path]:
    """Return modules and all they import, except for listed ones and what only they import."""
    found: set[Path] = set()
    waiting = [path for name in modules for path in _must_exist(name)]
    while waiting:
        path = waiting.pop()
        if path not in found and not _name_of(path).startswith(without):
            found.add(path)
            waiting.extend(_imports(path))
    return found | {table for path in found for table in _tables(path)}


def _tables(path: Path) -> Iterable[Path]:
    """List a module's tables and templates, named after it, or a package's, named otherwise."""
    package = path.name == "__init__.py"
    for table in _tables_in(path.parent):
        module = table.with_name(f"{table.name.partition('.')[0]}.py")
        if not module.exists() if package else module == path:
            yield table


@cache
def _tables_in(folder: Path) -> tuple[Path, ...]:
    return tuple(one for kind in ("*.toml", "*.j2") for one in folder.glob(kind))


@cache
def _name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _must_exist(module: str) -> tuple[Path, ...]:
    """Return the files of a module that has one of its own, which is the last."""
    files = _files_of(PACKAGE, module)
    if files == _files_of(PACKAGE, module.rpartition(".")[0]):
        raise ModuleNotFoundError(module)
    return files


@cache
def _files_of(package: Path, module: str) -> tuple[Path, ...]:
    """List a module's file, if it has one, after those of the packages above it."""
    if not module:
        return ()
    above, _, _ = module.rpartition(".")
    inside = module.replace(".", "/").partition("/")[2]
    names = (f"{inside}/__init__.py", f"{inside}.py") if inside else ("__init__.py",)
    files = _files_in(package)
    return (*_files_of(package, above), *(files[name] for name in names if name in files))


@cache
def _files_in(package: Path) -> dict[str, Path]:
    """Return all sources of the package by their names in it: faster than to look for each."""
    found = {}
    for folder, folders, names in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        inside = folder[len(str(package)) + 1 :]
        sources = [name for name in names if name.endswith(".py")]
        found |= {os.path.join(inside, name): Path(folder, name) for name in sources}
    return found


@cache
def _imports(path: Path) -> tuple[Path, ...]:
    content = path.read_bytes()
    of_bytes = hashlib.sha256(content).hexdigest()
    if of_bytes not in READ.imports:
        READ.imports[of_bytes] = sorted(_imported_names(ast.parse(content)))
    files = {file for name in READ.imports[of_bytes] for file in _files_of(PACKAGE, name)}
    left_out = NOT_FOLLOWED.get(_name_of(path))
    return tuple(one for one in files if not (left_out and _name_of(one).startswith(left_out)))


def _imported_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in _walk(tree.body):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in names if name == "zerotrain" or name.startswith("zerotrain.")}


def _walk(statements: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """Yield all statements that run, including nested ones, but no `if TYPE_CHECKING` blocks."""
    for one in statements:
        if isinstance(one, ast.If) and _is_types_only(one.test):
            yield from _walk(one.orelse)
            continue
        yield one
        for inner in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from _walk(getattr(one, inner, ()))


def _is_types_only(test: ast.expr) -> bool:
    """Return whether the test of an `if` is TYPE_CHECKING or typing.TYPE_CHECKING."""
    if isinstance(test, ast.Attribute):
        return ast.unparse(test) == "typing.TYPE_CHECKING"
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


@cache
def _code(path: Path, name: str) -> str:
    """Return the code of one class in a file."""
    text = _decoded(path.read_bytes())
    tree = ast.parse(text)
    defined = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    chosen = defined[name]
    used = {node.id for node in ast.walk(chosen) if isinstance(node, ast.Name)}
    if others := used & (defined.keys() | assigned):
        raise ValueError(f"{path}: {name} uses {', '.join(sorted(others))} of its own module")
    first = min([chosen.lineno, *(one.lineno for one in chosen.decorator_list)])
    return code_text("\n".join(text.split("\n")[first - 1 : chosen.end_lineno]) + "\n")


def _shown(paths: Iterable[Path]) -> list[str]:
    """Return sorted paths, relative to the working directory if they are below it."""
    here = os.path.join(Path.cwd(), "")
    return [str(path).removeprefix(here) for path in sorted(paths)]
