"""Runs `snakemake`, `dvc`, `python -m zerotrain` and the fake `zerotrain` in forks of a process
that has imported their libraries once.

    python command_server.py SOCKET

A client (forked_command.py) connects to the socket and sends what to run with its three streams. It
gets the exit code, may send signals for the command, and takes the command with it where it dies.
The project and its package are read again by every fork.
"""

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
from pathlib import Path

# What the commands import when they run, the package of the project excepted.
import dulwich.repo  # noqa: F401
import dvc.cli.parser
import dvc.repo.open_repo
import dvc_data.hashfile.db.local  # noqa: F401
import dvc_render  # noqa: F401
import flufl.lock  # noqa: F401
import jinja2  # noqa: F401
import pyarrow  # noqa: F401
import pydantic  # noqa: F401
import ruamel.yaml  # noqa: F401
import scmrepo.git  # noqa: F401
import smart_open  # noqa: F401
import snakemake.cli
import typer  # noqa: F401
import yte  # noqa: F401

FAKE = Path(__file__).with_name("fake_zerotrain.py")

snakemake.cli.get_argument_parser()  # imports the plugins
gc.freeze()  # or each fork copies all pages as it collects


def run(folder, words, environment):
    """Be the command."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = True
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    real = sys.executable
    # What the command starts with its own Python is a fork, too.
    sys.executable = str(Path(sys.argv[1]).with_name("python"))
    if words[0] == "zerotrain":
        sys.argv = words
        runpy.run_path(str(FAKE), run_name="__main__")
        return
    if words[:2] == ["python", "-m"]:
        module, *words = words[2:]
    else:
        module, *words = words
    if module == "zerotrain":
        sys.argv = ["zerotrain", *words]
        runpy.run_module("zerotrain", run_name="__main__", alter_sys=True)
    else:
        sys.argv = [str(Path(real).with_name(module)), *words]
        sys.exit({"snakemake": snakemake.cli.main, "dvc": dvc.cli.main}[module]())


def follow(client, child):
    """Pass a client's signals on to the command; end the command with the client."""
    with contextlib.suppress(OSError):
        while received := client.recv(1):
            os.kill(child, received[0])
        os.kill(child, signal.SIGKILL)


def serve(client):
    """Run a client's command and send its exit code."""
    content, streams, _, _ = socket.recv_fds(client, 16, 3)
    size = int(content)
    request = json.loads(client.makefile("rb").read(size))
    child = os.fork()
    if child == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        client.close()
        sys.exit(run(**request))
    threading.Thread(target=follow, args=(client, child), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    client.sendall(str(code).encode())


def main(path):
    """Answer clients until stdin ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            if os.fork() == 0:
                listener.close()
                serve(client)
            os._exit(0)
        os.wait()
        client.close()


main(sys.argv[1])
