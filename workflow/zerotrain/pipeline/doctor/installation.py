"""Versions, compiled ops, and the tools that build them."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zerotrain.artifact.sources import PACKAGE
from zerotrain.machine import compiled_ops
from zerotrain.machine.detect import TorchBuild

PACKAGES = (
    "deepspeed", "accelerate", "diffusers", "transformers", "peft", "safetensors", "snakemake",
    "dvc",
)  # fmt: skip


def versions(build: TorchBuild | None) -> dict[str, Any]:
    """Return the versions of the program, of Python and of the main dependencies."""
    return {
        "zerotrain": " ".join(filter(None, [_version("zerotrain"), _commit()])),
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": f"{build.version}, built for {build.target}" if build else None,
        **{name: _version(name) for name in PACKAGES},
    }


def ops() -> dict[str, Any]:
    """Return DeepSpeed's compiled ops, and the tools that build them."""
    folder, built = None, {}
    with contextlib.suppress(PackageNotFoundError):  # torch or DeepSpeed is missing
        folder, built = str(compiled_ops.ops_folder()), compiled_ops.built_ops()
    compiler = compiled_ops.compiler()
    return {
        "folder": folder,
        "built": built,
        "compiler": _first_line([compiler, "--version"]) if compiler else None,
        "ninja": _ninja(),
        "libaio_headers": has_libaio(),
        "nvcc": _nvcc(),
    }


def has_libaio() -> bool:
    """Return whether the compiler finds libaio's header, which the NVMe offload op includes."""
    compiler = compiled_ops.compiler()
    if compiler is None:
        return False
    command = [*compiler.split(), "-E", "-x", "c++", "-"]
    ended = subprocess.run(command, input=b"#include <libaio.h>\n", capture_output=True)
    return ended.returncode == 0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Return the commit of the package's checkout; empty for an installed package."""
    git = ["git", "-C", str(PACKAGE)]
    tracked = _output([*git, "ls-files", "--error-unmatch", "__init__.py"])
    if not tracked:
        return ""
    changed = ", with changes" if _output([*git, "status", "--porcelain", "-uno", "."]) else ""
    return f"(commit {_output([*git, 'rev-parse', '--short=12', 'HEAD'])}{changed})"


def _ninja() -> str | None:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    found = shutil.which("ninja", path=path)
    return _first_line([found, "--version"]) if found else None


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    if found is None:
        return None
    return next(
        (line for line in _output([found, "--version"]).splitlines() if "release" in line), ""
    )


def _first_line(command: list[str]) -> str:
    return next(iter(_output(command).splitlines()), "does not answer")


def _output(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if ended.returncode else ended.stdout.strip()
