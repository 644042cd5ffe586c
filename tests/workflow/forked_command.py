"""Stands in for `snakemake`, `dvc`, `python` or `zerotrain` in a copy of the project: a fork of the
command server does the same. Without a server, and for any other module, the command itself does
it, for `zerotrain` the fake."""

import json
import os
import signal
import socket
import sys

MODULES = ("snakemake", "zerotrain")
FAKE = "fake_zerotrain.py"


def main():
    name = os.path.basename(sys.argv[0])
    words = [name, *sys.argv[1:]]
    server = os.environ.get("COMMAND_SERVER")
    if not server and name == "zerotrain":
        os.execv(sys.executable, [sys.executable, FAKE, *sys.argv[1:]])
    if not server or (name == "python" and (words[1:2] != ["-m"] or words[2] not in MODULES)):
        real = os.path.join(os.path.dirname(sys.executable), name)
        os.execv(real, [real, *sys.argv[1:]])
    request = {"folder": os.getcwd(), "words": words, "environment": dict(os.environ)}
    content = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    socket.send_fds(connection, [b"%16d" % len(content)], [0, 1, 2])
    connection.sendall(content)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    code = int(connection.recv(16))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
