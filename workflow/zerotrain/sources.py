"""Which source files a module depends on, found by reading its imports, without importing it.

Snakemake takes a listing of these files as an input of a rule (zerotrain.source_listing), so that
an edit reruns what depends on it; training puts their digest into its fingerprint. No list is kept
by hand.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent
TYPES_ONLY = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def source_files(*modules: str) -> list[str]:
    """The files of the named zerotrain modules and of all they import, sorted.

    Args:
        modules: Dotted names such as ``zerotrain.stages.evaluate``. A module that is chosen at run
            time (a model family) is named here beside the one that chooses it.

    Returns:
        Paths relative to the working directory where possible.
    """
    return [_shown(path) for path in sorted(_closure(modules))]


def source_digest(*modules: str) -> str:
    """Digest of the code of these modules and of all they import; comments and docstrings aside."""
    return _digest(_closure(modules))


def code_digest(*names: str) -> str:
    """Digest of the code of these modules alone, or of `module:Class`; comments, docstrings aside.

    A class counts with what it says itself. It may use what its module imports, but nothing else
    that stands there, which would go unnoticed.
    """
    total = hashlib.sha256()
    for name in sorted(names):
        module, _, inside = name.partition(":")
        path = _files_of(module, must_exist=True)[-1]
        total.update(path.relative_to(PACKAGE).as_posix().encode())
        total.update(_code(path, inside).encode())
    return total.hexdigest()


def _digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.relative_to(PACKAGE).as_posix().encode())
        total.update(_code(path).encode())
    return total.hexdigest()


def _closure(modules: Iterable[str]) -> set[Path]:
    found: set[Path] = set()
    waiting = [path for name in modules for path in _files_of(name, must_exist=True)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting.extend(_imports(path))
    return found


def _files_of(name: str, *, must_exist: bool = False) -> list[Path]:
    """A module's file and the __init__ files of the packages above it."""
    parts = name.split(".")[1:]
    files = [
        init
        for depth in range(len(parts) + 1)
        if (init := PACKAGE.joinpath(*parts[:depth], "__init__.py")).is_file()
    ]
    module = PACKAGE.joinpath(*parts).with_suffix(".py") if parts else PACKAGE / "__init__.py"
    if module.is_file():
        files.append(module)
    elif must_exist and not PACKAGE.joinpath(*parts, "__init__.py").is_file():
        raise ModuleNotFoundError(name)
    return files


@cache
def _imports(path: Path) -> tuple[Path, ...]:
    names: set[str] = set()
    for node in _walk(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    ours = (name for name in names if name == "zerotrain" or name.startswith("zerotrain."))
    return tuple(file for name in ours for file in _files_of(name))


def _walk(statements: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """All statements that run, also within others: an `if TYPE_CHECKING` block does not."""
    for one in statements:
        if isinstance(one, ast.If) and ast.unparse(one.test) in TYPES_ONLY:
            yield from _walk(one.orelse)
            continue
        yield one
        for inner in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from _walk(getattr(one, inner, ()))


@cache
def _code(path: Path, name: str = "") -> str:
    """The code of a file, or of one class in it."""
    tree = _without_docstrings(path)
    if not name:
        return ast.dump(tree)
    defined = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    used = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
    if others := used & (defined.keys() | assigned):
        raise ValueError(f"{path}: {name} uses {', '.join(sorted(others))} of its own module")
    return ast.dump(defined[name])


def _without_docstrings(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        node.body = [  # type: ignore[attr-defined]
            item
            for item in body
            if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
        ]
    return tree


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
