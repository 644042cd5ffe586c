"""fetch: a model of the hub is found by its name in the fetched folder, without a network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from zerotrain.config import parse_config
from zerotrain.families import nano as nano_parts
from zerotrain.stages.build_base import build_base
from zerotrain.stages.prepare_dataset import prepare_dataset

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "owner/nano"


class Hub(BaseHTTPRequestHandler):
    """The few addresses of a hub that a download asks for."""

    def __init__(self, folder: Path, asked: list[str], *arguments: object) -> None:
        self.folder, self.asked = folder, asked
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        name = path.partition("/resolve/")[2].partition("/")[2]
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        if name:
            body = (self.folder / name).read_bytes()
        elif "/tree/" in path:
            names = [(file.relative_to(self.folder).as_posix(), file) for file in files]
            body = json.dumps(
                [
                    {"type": "file", "path": n, "size": f.stat().st_size, "oid": digest(f)}
                    for n, f in names
                ]
            ).encode()
        else:
            siblings = [{"rfilename": f.relative_to(self.folder).as_posix()} for f in files]
            body = json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub that holds a nano model, and what it was asked."""
    monkeypatch.setattr(nano_parts, "VAE_STEPS", 2)
    (tmp_path / "images").mkdir()
    for name in ("red", "blue"):
        Image.new("RGB", (40, 24), name).save(tmp_path / "images" / f"{name}.png")
        (tmp_path / "images" / f"{name}.txt").write_text(f"a {name} house")
    raw = {
        "run": "digits",
        "base": "nano",
        "data": {"images": str(tmp_path / "images"), "num_workers": 0},
        "train": {"resolution": 16},
        "phases": [{"name": "only", "until": 1}],
    }
    config = parse_config(raw, "test.yaml")
    prepare_dataset(config.data, tmp_path / "dataset")
    build_base(config, tmp_path / "dataset", tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    raw["base"] = REPO
    (tmp_path / "config.json").write_text(json.dumps(raw))
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, tmp_path / "model", asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def run(folder: Path, address: str, words: str) -> str:
    env = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        ["bash", "-ec", words.replace("zerotrain", f"{sys.executable} -m zerotrain")],
        cwd=folder, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_fetched_model_needs_no_hub(hub, tmp_path):
    """Fetched once, twice without a file, then built from with the hub not to be reached."""
    address, asked = hub
    told = run(tmp_path, address, "zerotrain fetch config.json --to shared")
    assert f"hub model {REPO}" in told, told
    asked.clear()
    run(tmp_path, address, "zerotrain fetch config.json --to shared")
    assert [line for line in asked if line.startswith("GET") and "/resolve/" in line] == []
    build = "zerotrain build_base --config config.json --output base"
    asked.clear()
    told = run(tmp_path, "http://127.0.0.1:9", f"source shared/env.sh; {build}")
    assert (tmp_path / "base/manifest.json").is_file(), told
    assert json.loads((tmp_path / "base/manifest.json").read_text())["content"]["commit"] == COMMIT
    assert asked == []


@pytest.mark.slow
def test_without_fetch_the_command_is_named(hub, tmp_path):
    build = "HF_HUB_OFFLINE=1 HF_HUB_CACHE=$PWD/none zerotrain build_base"
    told = run(tmp_path, hub[0], f"{build} --config config.json --output base")
    assert "zerotrain fetch CONFIG" in told
    assert "Traceback" not in told


NO_NETWORK = ["unshare", "--map-root-user", "--net", "bash", "-ec"]
"""A shell in which no other machine can be reached; gloo and torchrun want the loopback."""
TRAINED = "results/digits/only/weights/manifest.json"


def without_network(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """What a command says in a job whose node has no network, in the environment of jobs."""
    begun = f"ip link set lo up; . profiles/slurm/job-environment.sh; {words}"
    env = {**os.environ, "PYTHONPATH": str(folder / "workflow"), "HF_HOME": str(folder / "home")}
    return subprocess.run(
        [*NO_NETWORK, begun], cwd=folder, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=600,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_needs_no_network(
    hub: tuple[str, list[str]], tmp_path: Path, private_project: Callable[[str], Path]
) -> None:
    """Base, dataset, cache, training and weights of a model of the hub; without fetch a sentence
    that names it."""
    if not shutil.which("ip") or subprocess.call([*NO_NETWORK, "ip link set lo up"]):
        pytest.skip("needs the right to a network of its own (`unshare --net`), and iproute2's ip")
    project = private_project("project")
    shutil.copy(tmp_path / "config.json", project / "config" / "offline.json")
    reached = without_network(
        project, f"exec 3<>/dev/tcp/{hub[0].removeprefix('http://').replace(':', '/')}"
    )
    assert "Connection refused" in reached.stdout
    snakemake = f"{sys.executable} -m snakemake --cores 2 --configfile config/offline.json -- "
    refused = without_network(project, snakemake + TRAINED)
    assert refused.returncode != 0
    assert "run `zerotrain fetch CONFIG` on the login node" in refused.stdout
    assert "Traceback" not in refused.stdout
    run(project, hub[0], "zerotrain fetch config/offline.json")
    done = without_network(project, snakemake + TRAINED)
    assert done.returncode == 0, done.stdout[-5000:]
    assert (project / TRAINED).is_file()
