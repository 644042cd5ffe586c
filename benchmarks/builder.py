"""The builder's page: how long a change takes, and how much a page loads.

    python benchmarks/builder.py           # from the project's root, in its environment

A server of its own process, real HTTP over the loopback, SDXL's whole U-Net on an RTX 4090. Each
request is what htmx sends when a control changes, and never the same twice: its answer has the
problems, the bars of all presets, the curve and the marked files. Goals: 200 ms for a change
(median of each kind of control), 300 KB for a page with its style and script. The last line is
JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from http.client import HTTPConnection
from urllib.parse import urlencode

from zerotrain.machine.ports import free_port

GOAL_SECONDS, GOAL_BYTES = 0.2, 300_000
CHANGES = 60
START = {
    "from": "config/sdxl-full-24gb.yaml", "machine.gpu": "RTX 4090",
    "machine.host_memory": "64 GiB",
}  # fmt: skip
KINDS: dict[str, tuple[str, Callable[[int], str]]] = {
    "learning rate": ("train.learning_rate", lambda n: f"{1 + n / 1000}e-5"),
    "bucket": (
        "launch.deepspeed.zero_optimization.reduce_bucket_size",
        lambda n: str(20_000_000 + n),
    ),
    "host memory": ("machine.host_memory", lambda n: f"{64 + n} GiB"),
    "invalid batch": ("train.global_batch_size", lambda n: f"x{n}"),
}
"""Controls that change, and their values."""


class Browser:
    """One connection with the token's cookie."""

    def __init__(self, port: int, token: str) -> None:
        self.host = f"127.0.0.1:{port}"
        self.connection = HTTPConnection(self.host, timeout=600)
        self.cookie = f"zerotrain-builder-{port}={token}"

    def ask(self, path: str, form: dict[str, str] | None = None, at: str = "") -> bytes:
        """Return the answer to a request, as a page of the server makes it."""
        headers = {"Cookie": self.cookie}
        if form is None:
            self.connection.request("GET", path, headers=headers)
        else:
            headers |= {
                "Origin": f"http://{self.host}", "HX-Request": "true", "HX-Current-URL": at,
                "Content-Type": "application/x-www-form-urlencoded",
            }  # fmt: skip
            self.connection.request("POST", path, urlencode(form), headers)
        answer = self.connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (path, answer.status, body[:300])
        return body


def main() -> None:
    """Start a server, measure, and end it."""
    port = free_port()
    command = [sys.executable, "-m", "zerotrain", "builder", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        found = None
        while found is None:
            line = server.stdout.readline()
            assert line, "the server ended"
            found = re.search(r"token=(\S+)", line)
        browser = Browser(port, found[1])
        result = measure(browser)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    print(json.dumps(result))


def measure(browser: Browser) -> dict[str, object]:
    """Return the bytes of the page, and seconds of its changes."""
    address = f"/build?{urlencode(START)}"
    begin = time.monotonic()
    while b"recommended" not in (page := browser.ask(address)):
        assert time.monotonic() - begin < 900, "the model is not traced"
        time.sleep(1)  # the first time ever, the model is traced
    files = re.findall(rb'(?:src|href)="(/static/[^"]+)"', page)
    sizes = {path.decode(): len(browser.ask(path.decode())) for path in files}
    total = len(page) + sum(sizes.values())
    print(f"page {len(page):,} B, with {len(files)} files {total:,} B (goal {GOAL_BYTES:,})")
    every: list[float] = []
    medians = {}
    for kind, (field, value) in KINDS.items():
        before, taken = START, []
        for n in range(CHANGES // len(KINDS)):
            form = {**START, field: value(n)}
            at = f"http://{browser.host}/build?{urlencode(before)}"
            start = time.perf_counter()
            browser.ask("/build", form, at)
            taken.append(time.perf_counter() - start)
            before = form
        medians[kind] = statistics.median(taken)
        every += taken
        print(f"{kind:14} {medians[kind] * 1000:6.0f} ms (worst {max(taken) * 1000:.0f})")
    median = statistics.median(every)
    print(f"{'all':14} {median * 1000:6.0f} ms (goal {GOAL_SECONDS * 1000:.0f})")
    return {
        "bytes": total, "kilobytes": total / 1000, "median_s": median,
        "slowest_median_s": max(medians.values()), "of_kinds": medians,
        "load": os.getloadavg()[0],
    }  # fmt: skip


if __name__ == "__main__":
    main()
