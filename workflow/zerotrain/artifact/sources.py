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
        path = PACKAGE / _must_exist(module)[-1]
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


def _digest(names: Iterable[str]) -> str:
    total = hashlib.sha256()
    for name in _sorted(names):
        total.update(f"{file_code_sha256(PACKAGE / name)}  {name}\n".encode())
    return total.hexdigest()


def _training_closure(family: str) -> set[str]:
    roots = ["zerotrain.training.rank", f"zerotrain.models.families.{family}"]
    return _closure(roots, WITHOUT_EFFECT)


def _closure(modules: Iterable[str], without: tuple[str, ...] = ()) -> set[str]:
    """Return the files of modules and of all they import, by their names in the package.

    Args:
        modules: Dotted names.
        without: Beginnings of names: these, and what only they import, are left out.
    """
    found: set[str] = set()
    waiting = [name for module in modules for name in _must_exist(module)]
    while waiting:
        name = waiting.pop()
        if name not in found and not name.startswith(without):
            found.add(name)
            waiting.extend(_imports(PACKAGE, name))
    return found | {table for name in found for table in _tables(name)}


def _tables(name: str) -> Iterable[str]:
    """List a module's tables and templates, named after it, or a package's, named otherwise."""
    modules = _names_in(PACKAGE)
    for table in _tables_in(PACKAGE).get(name.rpartition("/")[0], ()):
        module = f"{table.partition('.')[0]}.py"
        if module not in modules if name.endswith("__init__.py") else module == name:
            yield table


def _must_exist(module: str) -> tuple[str, ...]:
    """Return the files of a module that has one of its own, which is the last."""
    files = _files_of(PACKAGE, module)
    if files == _files_of(PACKAGE, module.rpartition(".")[0]):
        raise ModuleNotFoundError(module)
    return files


@cache
def _files_of(package: Path, module: str) -> tuple[str, ...]:
    """List a module's file, if it has one, after those of the packages above it."""
    if not module:
        return ()
    above, _, _ = module.rpartition(".")
    inside = module.replace(".", "/").partition("/")[2]
    names = (f"{inside}/__init__.py", f"{inside}.py") if inside else ("__init__.py",)
    known = _names_in(package)
    return (*_files_of(package, above), *(name for name in names if name in known))


@cache
def _names_in(package: Path) -> frozenset[str]:
    """Return all modules, tables and templates: one walk is faster than to look for each."""
    return frozenset(
        os.path.join(folder, name)[len(str(package)) + 1 :]
        for folder, _, names in os.walk(package)
        for name in names
        if name.endswith((".py", ".toml", ".j2"))
    )


@cache
def _tables_in(package: Path) -> dict[str, list[str]]:
    """Return the tables and templates of each folder."""
    found: dict[str, list[str]] = {}
    for name in _names_in(package):
        if not name.endswith(".py"):
            found.setdefault(name.rpartition("/")[0], []).append(name)
    return found


@cache
def _imports(package: Path, name: str) -> tuple[str, ...]:
    content = (package / name).read_bytes()
    of_bytes = hashlib.sha256(content).hexdigest()
    if of_bytes not in READ.imports:
        READ.imports[of_bytes] = sorted(_imported_names(ast.parse(content)))
    files = {file for module in READ.imports[of_bytes] for file in _files_of(package, module)}
    left_out = NOT_FOLLOWED.get(name)
    return tuple(one for one in files if not (left_out and one.startswith(left_out)))


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


def _shown(names: Iterable[str]) -> list[str]:
    """Return the paths of files, relative to the working directory if they are below it."""
    here = os.path.join(Path.cwd(), "")
    return [os.path.join(PACKAGE, name).removeprefix(here) for name in _sorted(names)]


def _sorted(names: Iterable[str]) -> list[str]:
    """Sort as paths: a folder's files are next to one another."""
    return sorted(names, key=lambda name: name.split("/"))
