"""Runs `snakemake` command lines in forks of a process that has imported it once.

Each line on stdin is a request, answered by a line with the exit code. The project and its package
are read anew by every fork.
"""

import json
import os
import sys
from pathlib import Path

import pydantic  # noqa: F401  what the project's package imports, itself not
import ruamel.yaml  # noqa: F401
from snakemake.cli import main


def run(folder, words, environment, output):
    """Be the snakemake command."""
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = True
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = [str(Path(sys.executable).with_name("snakemake")), *words]
    main()


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
