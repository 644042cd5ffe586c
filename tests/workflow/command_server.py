"""Runs `snakemake`, `dvc` and `python -m zerotrain` in forks of a process that has imported their
libraries once.

Each line on stdin is a request, answered by a line with the exit code. The project and its package
are read again by every fork.
"""

import gc
import json
import os
import runpy
import signal
import sys
from pathlib import Path

# What the commands import when they run, the package of the project excepted.
import dulwich.repo  # noqa: F401
import dvc.cli.parser
import dvc.repo.open_repo
import dvc_data.hashfile.db.local  # noqa: F401
import dvc_render  # noqa: F401
import flufl.lock  # noqa: F401
import jinja2  # noqa: F401
import pydantic  # noqa: F401
import ruamel.yaml  # noqa: F401
import scmrepo.git  # noqa: F401
import smart_open  # noqa: F401
import snakemake.cli
import typer  # noqa: F401
import yte  # noqa: F401

snakemake.cli.get_argument_parser()  # imports the plugins
gc.freeze()  # or each fork copies all pages as it collects


def run(folder, words, environment, output, seconds):
    """Be the command."""
    signal.alarm(seconds)
    nothing = os.open(os.devnull, os.O_RDONLY)
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nothing, 0)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = True
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    if words[:3] == ["python", "-m", "zerotrain"]:
        sys.argv = ["zerotrain", *words[3:]]
        runpy.run_module("zerotrain", run_name="__main__", alter_sys=True)
    else:
        sys.argv = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
        sys.exit({"snakemake": snakemake.cli.main, "dvc": dvc.cli.main}[words[0]]())


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
