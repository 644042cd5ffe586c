"""`python -m tests.lint.file_access`: one place each opens, parses, writes and locks files.

Refused are parsers of documents outside of `artifact/documents/`, writers of YAML outside of
`config/`, calls that open or write a file by its path outside of `machine/regular_file.py`, kernel
locks outside of `machine/file_lock.py`, and questions about other processes outside of
`machine/processes.py`: each would have its own limits, links and tolerances. `make lint` runs this.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "workflow" / "zerotrain"
READ = "read it by zerotrain.artifact.documents"
WRITE = "write it by zerotrain.machine.regular_file, or by zerotrain.artifact.write_whole"
YAML = "edit it by zerotrain.config.text, or write it by zerotrain.config.scalar"
FUNCTIONS = {
    "fcntl.flock": "lock it by zerotrain.machine.file_lock",
    "psutil.Process": "ask zerotrain.machine.processes",
    **dict.fromkeys(("json.load", "json.loads", "tomllib.load", "tomllib.loads"), READ),
    **dict.fromkeys(("yaml.load", "yaml.safe_load", "yaml.parse", "yaml.compose"), READ),
    **dict.fromkeys(("YAML", "yaml.safe_load_all", "yaml.load_all"), READ),
    **dict.fromkeys(("yaml.dump", "yaml.safe_dump"), YAML),
    **dict.fromkeys(("yaml.dump_all", "yaml.safe_dump_all", "yaml.emit", "yaml.serialize"), YAML),
    **dict.fromkeys(("open", "io.open", "os.open", "os.fdopen"), READ),
    **dict.fromkeys(("shutil.copy", "shutil.copy2", "shutil.copyfile", "os.mkfifo"), WRITE),
}
"""Functions, by the name under which a module calls them, and what to do instead."""
METHODS = {
    **dict.fromkeys(("read_text", "read_bytes", "open", "validate_json"), READ),
    **dict.fromkeys(("write_text", "write_bytes", "touch"), WRITE),
}
"""Methods of paths and of pydantic's adapters."""
OTHER_OPEN = ("Image.open", "tarfile.open", "webbrowser.open")
"""Libraries' own, which get a stream or a path that was checked."""


@dataclass(frozen=True)
class Allowed:
    """Calls that a module may make.

    Attributes:
        calls: Names of functions and methods.
        reason: Why these read or write nothing of others.
    """

    calls: tuple[str, ...]
    reason: str


OWN = "a table or template of this package, next to the module"
KERNEL = "files of the kernel, which have no size"
PARENT = "what a process of ours says to another"
ALLOWED = {
    "artifact/documents/yaml_text.py": Allowed(
        ("yaml.parse", "yaml.load", "yaml.compose", "YAML", "tomllib.loads"), "counts values first"
    ),
    "artifact/leftovers.py": Allowed(("os.open",), "locks a folder"),
    "artifact/whole_file.py": Allowed(
        ("os.open", "read_text"), f"flushes a file that was just written; {KERNEL}"
    ),
    "cli/__init__.py": Allowed(("os.open",), "/dev/null"),
    "config/scalar.py": Allowed(("yaml.safe_dump",), "the place: texts that are not printable"),
    "data/digits.py": Allowed(("read_bytes",), "a file of this repository with a known digest"),
    "export/formats/original.py": Allowed(("tomllib.loads", "read_text"), OWN),
    "export/publish.py": Allowed(("read_text",), OWN),
    "importers/keys/__init__.py": Allowed(("tomllib.loads", "read_text"), OWN),
    "launch/files.py": Allowed(("yaml.dump",), "accelerate.yaml, which no person writes"),
    "launch/keys/__init__.py": Allowed(("tomllib.loads", "read_text"), OWN),
    "launch/planner/forecasts.py": Allowed(("json.load",), PARENT),
    "machine/child_process.py": Allowed(("read_bytes",), KERNEL),
    "machine/compiled_ops.py": Allowed(("read_text", "json.loads"), f"{KERNEL}; its own record"),
    "machine/confined.py": Allowed(("read_text", "os.open"), f"{KERNEL}; /dev/null"),
    "machine/detect.py": Allowed(("json.loads",), PARENT),
    "machine/file_lock.py": Allowed(("fcntl.flock",), "the place"),
    "machine/host.py": Allowed(("read_text",), KERNEL),
    "machine/memory_watch.py": Allowed(
        ("read_text", "write_text", "psutil.Process"), f"{KERNEL}; memory of this process"
    ),
    "machine/pid_space.py": Allowed(("read_text",), KERNEL),
    "machine/processes.py": Allowed(("psutil.Process",), "the place"),
    "machine/regular_file.py": Allowed(("os.open", "open"), "the place"),
    "machine/device.py": Allowed(("read_text",), KERNEL),
    "models/families/tokenizer_process.py": Allowed(("json.loads",), PARENT),
    "graph/checks/base.py": Allowed(("tomllib.loads", "read_text"), OWN),
    "graph/cluster/profile.py": Allowed(
        ("read_text", "yaml.safe_dump"), f"{OWN}; texts that Snakemake evaluates"
    ),
    "graph/dvc/files.py": Allowed(("yaml.dump",), "dvc.yaml, which DVC writes in this form"),
    "run/watch/command.py": Allowed(("open",), "a copy of its own standard output"),
}


def find_calls(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line and name of each refused call in a module, and what to do instead."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if isinstance(node.func, ast.Name | ast.Attribute) and name in FUNCTIONS:
            yield node.lineno, name, FUNCTIONS[name]
        elif (
            isinstance(node.func, ast.Attribute)
            and (method := node.func.attr) in METHODS
            and name not in OTHER_OPEN
        ):
            yield node.lineno, method, METHODS[method]


def check(package: Path = PACKAGE, allowed: dict[str, Allowed] = ALLOWED) -> list[str]:
    """Return a line for each refused call, and for each allowance that no call needs."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        free, used = set(allowed[name].calls if name in allowed else ()), set[str]()
        for line, call, instead in find_calls(path.read_text(encoding="utf-8")):
            used.add(call)
            if call not in free:
                found.append(f"{name}:{line}: {call}: {instead}")
        found += [f"{name}: calls no {call}: remove it from ALLOWED" for call in free - used]
    found += [f"{name}: is no module: remove it from ALLOWED" for name in allowed
              if not (package / name).is_file()]  # fmt: skip
    return found


if __name__ == "__main__":
    errors = check()
    print("\n".join(errors), file=sys.stderr)
    sys.exit(bool(errors))
