"""Exported weights of a small SDXL, whole and with an adapter."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import StableDiffusionXLPipeline
from safetensors import safe_open
from safetensors.torch import load_file
from tests.builders.adapters import make_adapted, write_adapter
from tests.builders.commands import run_zerotrain
from tests.builders.images import build_nano
from tests.formats.commands import code_of, run_command
from tests.formats.languages import Language, exported

from zerotrain import artifact
from zerotrain.config.families import LANGUAGE_MODELS
from zerotrain.export.formats import FORMATS as ALL_FORMATS
from zerotrain.models.families.autoencoders import AUTOENCODERS
from zerotrain.models.families.sdxl import FAMILY

LAYERS = ("to_q", "to_out.0", "proj_in", "ff.net.0.proj", "ff.net.2", "conv1", "conv_shortcut")
"""Kinds of layers that formats name differently; the last two are convolutions."""
ADAPTER = {"rank": 4, "alpha": 6.0, "target_modules": LAYERS}


def build_base(folder: Path) -> None:
    """A nano model with attention in its autoencoder; its numbers are all random."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AUTOENCODERS["AutoencoderKL"], "mid_block_add_attention", True)
        build_nano("sdxl", folder)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats") / "base"
    with artifact.publish(folder, "base") as draft:
        build_base(draft.folder)
        draft.content = {"family": "sdxl", "base": "nano", "commit": None, "parts": {}}
    return folder


def published(base: Path, folder: Path, adapter: Path | None = None, family: str = "sdxl") -> Path:
    """A weights folder as an export publishes it; the trained part is the base's."""
    made_by = {"run": "houses", "phase": "only", "dtype": "fp32"}
    parents = {"base": artifact.read(base, "base")}
    with artifact.publish(folder, "weights", parents=parents, made_by=made_by) as draft:
        shutil.copytree(base, draft.folder, dirs_exist_ok=True)
        (draft.folder / "manifest.json").unlink()
        if adapter is not None:
            shutil.copytree(adapter, draft.folder, dirs_exist_ok=True)
        draft.content = {"family": family, "step": 12, "dtype": "fp32"}
    return folder


@pytest.fixture(scope="session")
def whole(base: Path) -> Path:
    """Weights of a training of the whole model."""
    return published(base, base.parent / "whole")


@pytest.fixture(scope="session")
def lora(base: Path) -> Path:
    """Weights of a LoRA whose alpha is not its rank."""
    unet = make_adapted(base, **ADAPTER)
    write_adapter(base, unet, base.parent / "adapter", **ADAPTER)
    return published(base, base.parent / "lora", base.parent / "adapter")


@pytest.fixture(scope="session")
def trained(lora: Path) -> torch.nn.Module:
    """The U-Net that was trained, with its adapter."""
    return FAMILY.load_trained(lora)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors_below(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.fixture(scope="session", params=LANGUAGE_MODELS)
def language(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Language:
    """Base and weights of a language model."""
    return exported(request.param, tmp_path_factory.mktemp(request.param))


FORMATS = {name: form for name, form in ALL_FORMATS.items() if form.modality != "text"}
OF_ADAPTERS = [name for name, form in FORMATS.items() if form.adapter]
OF_WHOLE = [name for name, form in FORMATS.items() if not form.adapter]


def pipeline_of(folder: Path) -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline.from_pretrained(folder, add_watermarker=False)


def header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


REPO = "me/houses"


def publish_phase(folder: Path, base: Path, weights: Path, family: str) -> None:
    """Publish a checkpoint, and a copy of weights that leads to it and to this base."""
    with artifact.publish(folder / "checkpoint", "checkpoint") as draft:
        (draft.folder / "state.json").write_text("{}")
    parents = {
        "base": artifact.read(base, "base"),
        "checkpoint": artifact.read(folder / "checkpoint", "checkpoint"),
    }
    made_by = {"run": folder.parent.name, "phase": folder.name}
    with artifact.publish(folder / "weights", "weights", parents=parents, made_by=made_by) as draft:
        shutil.copytree(weights, draft.folder, dirs_exist_ok=True)
        (draft.folder / "manifest.json").unlink()
        draft.content = {"family": family, "step": 12, "dtype": "fp32"}


publish = partial(run_command, "publish")


def head_of(card: Path) -> dict[str, Any]:
    """The card's YAML."""
    _, head, _ = card.read_text(encoding="utf-8").split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(head)
    return found


class Hub(BaseHTTPRequestHandler):
    """What an upload asks of the hub, as its client documents it; files are kept in memory."""

    refuses = False
    created: dict[str, Any]
    files: dict[str, bytes]
    stored: dict[str, bytes]

    def answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def do_PUT(self) -> None:
        data = self.body()
        assert hashlib.sha256(data).hexdigest() == self.path.split("/")[-1]
        type(self).stored[self.path.split("/")[-1]] = data
        self.answer({})

    def do_POST(self) -> None:
        body = self.body()
        address = f"http://{self.headers['Host']}"
        if type(self).refuses:
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            type(self).created = json.loads(body)
            self.answer({"url": f"{address}/{REPO}"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path == f"/api/models/{REPO}/preupload/main":
            self.answer(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if file["path"].endswith("tensors") else "regular",
                            "shouldIgnore": False,
                        }
                        for file in json.loads(body)["files"]
                    ]
                }
            )
        elif self.path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = [
                {**o, "actions": {"upload": {"href": f"{address}/put/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif self.path == f"/api/models/{REPO}/commit/main":
            self.commit([json.loads(line) for line in body.splitlines()])
            self.answer({"commitUrl": f"{address}/{REPO}/commit/1", "commitOid": "1"})
        else:
            self.answer({"error": self.path}, 404)

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                type(self).files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                type(self).files[value["path"]] = type(self).stored[value["oid"]]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], str]]:
    """A hub of one repository, and its address."""
    kept = type("Kept", (Hub,), {"created": {}, "files": {}, "stored": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kept)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield kept, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def upload(address: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does whose HF_ENDPOINT is the stand-in."""
    hub_of = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    return run_zerotrain("publish", *words, **hub_of, HF_HUB_DISABLE_TELEMETRY="1")


def run_card(out: Path, base: Path) -> dict[str, Any]:
    """What the code of a folder's card defines, with the folder in place of the hub's copy."""
    code = code_of((out.with_name(f"{out.name}-card") / "README.md").read_text())
    code = code.replace("BASE", str(base)).replace(f'snapshot_download("{REPO}")', repr(str(out)))
    file = f'hf_hub_download("{REPO}", "model.safetensors")'
    code = code.replace(file, repr(str(out / "model.safetensors")))
    scope: dict[str, Any] = {}
    exec(code.replace(REPO, str(out)), scope)
    return scope
