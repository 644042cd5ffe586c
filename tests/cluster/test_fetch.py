"""fetch: a model of the hub is found by its name in the fetched folder, without a network."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError
from PIL import Image
from pyarrow import parquet
from tests.builders.refusals import refused
from tests.builders.runs import make_run
from tests.builders.settings import write_settings

from zerotrain.config.data import DataConfig
from zerotrain.config.read import parse_config, read_config
from zerotrain.data.hub_datasets import hub_rows
from zerotrain.errors import PipelineError
from zerotrain.graph import fetch as fetching
from zerotrain.models.base_places import BaseFiles
from zerotrain.models.families import autoencoders
from zerotrain.models.hub import ModelLocation, open_location
from zerotrain.stages.build_base import BuildSettings, build_base
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
        if name and not (self.folder / name).is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            return self.end_headers()
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
    monkeypatch.setattr(autoencoders, "VAE_STEPS", 2)
    (tmp_path / "images").mkdir()
    for name in ("red", "blue"):
        Image.new("RGB", (40, 24), name).save(tmp_path / "images" / f"{name}.png")
        (tmp_path / "images" / f"{name}.txt").write_text(f"a {name} house")
    raw = make_run(
        run="digits",
        data={"images": str(tmp_path / "images"), "num_workers": 0},
        train={"resolution": 16},
        phases=[{"name": "only", "until": 1}],
    )
    config = parse_config(raw, "test.yaml")
    prepare_dataset(config.data, tmp_path / "dataset")
    build_base(BuildSettings.of(config), tmp_path / "dataset", tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    raw["base"] = REPO
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with served(tmp_path / "model") as (address, asked):
        yield address, asked


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub whose one repository is this folder, and what it was asked."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder, asked))
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


@pytest.mark.soak
def test_a_fetched_model_needs_no_hub(hub, tmp_path):
    """Also where no network can be taken from a process (see test_a_run_needs_no_network)."""
    address, asked = hub
    told = run(tmp_path, address, "zerotrain fetch config.json --to shared")
    assert f"hub model {REPO}" in told, told
    asked.clear()
    run(tmp_path, address, "zerotrain fetch config.json --to shared")
    assert [line for line in asked if line.startswith("GET") and "/resolve/" in line] == []
    run_config = read_config(tmp_path / "config.json")
    file = write_settings(tmp_path / "settings.json", "build_base", run_config)
    build = f"zerotrain build_base --settings {file} --output base"
    asked.clear()
    told = run(tmp_path, "http://127.0.0.1:9", f"source shared/env.sh; {build}")
    assert (tmp_path / "base/manifest.json").is_file(), told
    assert json.loads((tmp_path / "base/manifest.json").read_text())["content"]["commit"] == COMMIT
    assert asked == []


def test_without_fetch_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node that reaches no hub, of a model that no cache holds."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    error = refused(open_location, REPO, None)
    assert error.what.startswith(f"base: there is no folder {REPO}, the hub cannot be reached (")
    assert "run `zerotrain fetch CONFIG` on the login node" in error.hint


def write_rows(folder: Path) -> dict[str, Any]:
    """Text, and a run on it."""
    rows = "".join(json.dumps({"ask": f"{n}?", "say": f"{n}!"}) + "\n" for n in range(20))
    (folder / "train.jsonl").write_text(rows)
    columns = {"prompt_column": "ask", "response_column": "say"}
    return {
        "family": "causal_lm",
        "data": {"source": "text", **columns},
        "train": {"max_length": 16},
    }


def write_images(folder: Path) -> dict[str, Any]:
    """Images, and a run on them."""
    images = []
    for name in ("red", "green", "blue"):
        stream = io.BytesIO()
        Image.new("RGB", (12, 10), name).save(stream, "PNG")
        images.append({"bytes": stream.getvalue(), "path": None})
    table = pyarrow.table({"image": images, "text": ["a", "b", "c"]})
    parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    return {"data": {"source": "huggingface"}, "train": {"resolution": 8}}


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(write_rows, marks=pytest.mark.slow),
        pytest.param(write_images, marks=pytest.mark.soak),
    ],
)
def test_a_fetched_dataset_needs_no_hub(
    write: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    """Of the hub, prepared from what was fetched, with the hub not to be reached."""
    (tmp_path / "words").mkdir()
    raw = make_run(
        run="words",
        phases=[{"name": "only", "until": 1, "launch": "torch"}],
        **write(tmp_path / "words"),
    )
    raw["data"]["path"] = "owner/words"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    run_config = read_config(tmp_path / "config.json")
    file = write_settings(tmp_path / "settings.json", "prepare_dataset", run_config)
    prepare = f"zerotrain prepare_dataset --settings {file} --output dataset"
    with served(tmp_path / "words") as (address, asked):
        told = run(tmp_path, address, "zerotrain fetch config.json --to shared")
        assert "dataset owner/words, split train" in told, (told, asked)
    told = run(tmp_path, "http://127.0.0.1:9", f"source shared/env.sh; {prepare}")
    assert (tmp_path / "dataset/manifest.json").is_file(), told


def test_a_connection_that_breaks_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client has errors of its own, which are no OSError."""

    def load_dataset(*_: object, **__: object) -> None:
        raise HTTPError("Server disconnected")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = DataConfig(source="text", path="owner/words", prompt_column="ask", response_column="say")
    error = refused(hub_rows, data)
    assert error.what == "data.path: owner/words, split train: Server disconnected"
    assert "run `zerotrain fetch CONFIG` on the login node" in error.hint


def configured(folder: Path) -> list[Path]:
    """The configuration of a run whose base is on the hub."""
    raw = {"run": "one", "base": REPO, "data": {"images": "images"}}
    (folder / "config.json").write_text(
        json.dumps({**raw, "phases": [{"name": "only", "until": 1, "launch": "torch"}]})
    )
    return [folder / "config.json"]


def test_nothing_is_downloaded_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are known before; a job finds no env.sh to source."""
    asked: list[str] = []

    class Large(ModelLocation):
        def missing(self, names: Iterable[str], revision: str) -> dict[str, int]:
            return dict.fromkeys(names, 10**15)

        def fetch(self, names: Iterable[str], revision: str | None = None) -> Path:
            asked.extend(names)
            return tmp_path

    place = Large(REPO, ("model",), repo=REPO)
    monkeypatch.setattr(
        fetching, "base_files", lambda *_: BaseFiles(REPO, [(place, {"model": "model"})], [])
    )
    with pytest.raises(PipelineError, match="are free, the models that are missing take 1000000"):
        list(fetching.fetch(configured(tmp_path), tmp_path / "shared"))
    assert asked == []
    assert not (tmp_path / "shared" / "env.sh").exists()


def test_a_file_system_without_locks_is_fetched_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As some clusters' shared ones are; what another fetch may be downloading is left alone."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    begun = tmp_path / "fetched/hub/begun.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_text("")
    files = configured(tmp_path)
    raw = {**json.loads(files[0].read_text()), "base": "nano"}
    files[0].write_text(json.dumps(raw))
    fetch = partial(fetching.fetch, files, tmp_path / "fetched")
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        assert "jobs source" in [*fetch()][-1]
    assert begun.exists()
    assert "jobs source" in [*fetch()][-1]
    assert not begun.exists()


def test_packages_are_fetched_once_and_again_for_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete once the download has ended well; a failed one is a sentence."""
    calls: list[list[str]] = []
    codes = iter([1, 0, 0])

    def call(words: list[str]) -> int:
        calls.append(words)
        (tmp_path / "wheels" / "one.whl").write_bytes(b"1")
        return next(codes)

    setup = tmp_path / "envs" / "setup.py"
    setup.parent.mkdir()
    (setup.parent / "constraints.txt").write_text("torch==1")
    monkeypatch.setattr(fetching, "SET_UP", setup)
    monkeypatch.setattr(subprocess, "call", call)
    with pytest.raises(PipelineError, match="the pinned packages were not downloaded"):
        list(fetching._wheels(tmp_path / "wheels"))
    for _ in range(2):
        (said,) = fetching._wheels(tmp_path / "wheels")
        assert said.startswith("1 packages, ")
        assert f"PIP_NO_INDEX=1 PIP_FIND_LINKS={tmp_path / 'wheels'} make setup" in said
    assert calls == [[sys.executable, str(setup), "--download", str(tmp_path / "wheels")]] * 2
    (setup.parent / "constraints.txt").write_text("torch==2")
    list(fetching._wheels(tmp_path / "wheels"))
    assert len(calls) == 3


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
    """Base, dataset, cache, training and weights of a model of the hub, fetched once, twice without
    a file; without fetch a sentence that names it."""
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
    told = run(project, hub[0], "zerotrain fetch config/offline.json")
    assert f"hub model {REPO}" in told, told
    hub[1].clear()
    run(project, hub[0], "zerotrain fetch config/offline.json")
    assert [line for line in hub[1] if line.startswith("GET") and "/resolve/" in line] == []
    done = without_network(project, snakemake + TRAINED)
    assert done.returncode == 0, done.stdout[-5000:]
    assert (project / TRAINED).is_file()
    base = json.loads((project / "results/digits/base/manifest.json").read_text())
    assert base["content"]["commit"] == COMMIT
