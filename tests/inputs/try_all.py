"""`python -m tests.inputs.try_all`: what becomes of each input of this folder, a line each.

They are files as people and other programs wrote them, of which each once ended in a wrong result
without a word, or in a message that did not help.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import LeftOut
from zerotrain.config.data import DataConfig
from zerotrain.data.conversation import Conversation
from zerotrain.data.dataset import read_dataset
from zerotrain.data.open import open_source
from zerotrain.data.text import read_conversations_of
from zerotrain.errors import PipelineError
from zerotrain.importers.command_line import import_command
from zerotrain.importers.files import reading_only
from zerotrain.importers.reading import ImportOptions, import_file
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.state.external import open_external
from zerotrain.state.external.adapter_files import check_all_used
from zerotrain.state.external.layer_scales import SCALES, to_one_rank

INPUTS = Path(__file__).parent
LAYERS = {"19-lora-with-ranks-by-layer": ["attn.to_q", "ff.proj"]}
"""The layers that a run trains, of an input for one that trains more than the first."""
RUN = {"r": 2, "lora_alpha": 4, "peft_type": "LORA"}
TOLD = ("changed", "no-op", "left out")
"""Outcomes of keys that do not become ours as they are."""


def read_settings(path: Path) -> Iterator[str]:
    """Import a launch file or a command."""
    options = ImportOptions(precision="bf16")
    script = path / "start.sh" if path.is_dir() else path
    with reading_only(path if path.is_dir() else INPUTS), contextlib.chdir(script.parent):
        if script.suffix == ".sh":
            found = import_command(script.read_text(encoding="utf-8"), options)
        else:
            found = import_file(Path(script.name), options)
    yield json.dumps(found.values, sort_keys=True)
    for note in found.notes:
        if note.outcome in TOLD:
            yield f"{note.outcome} {note.key}: {note.reason}"


def read_rows(path: Path) -> Iterator[str]:
    """Read conversations."""
    left_out = LeftOut()
    for one in read_conversations_of(DataConfig(source="text", path=str(path)), left_out):
        if isinstance(one, Conversation):
            yield " / ".join(map(_turn, one.messages))
        else:
            yield f"bad: {one.reason}"
    yield from left_out.lines()


def _turn(message: Any) -> str:
    text = f"{message.role}: {message.content or message.keys}"
    if message.content and message.keys not in ("", "{}"):
        text += f" {message.keys}"
    return text if message.learned or message.role != "assistant" else f"{text} (not learned)"


def read_images(path: Path) -> Iterator[str]:
    """Prepare a dataset of images, and show the first pixel of each."""
    kind = "webdataset" if any(path.glob("*.tar")) else "folder"
    data = DataConfig(source=kind, images=str(path), num_workers=0, max_bad_samples=9)
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        with contextlib.redirect_stdout(io.StringIO()):
            prepare_dataset(data, Path(folder) / "dataset")
        for sample in read_dataset(Path(folder) / "dataset").samples:
            pixel = open_source(data).image_of(sample.file, sample.image_sha256).getpixel((0, 0))
            yield f"{sample.file} {pixel}: {' / '.join(sample.captions)}"
    yield from (line for line in said.getvalue().splitlines() if line.startswith("WARNING"))


def read_checkpoint(path: Path) -> Iterator[str]:
    """Open a checkpoint or an adapter, for a run that trains one layer of it."""
    only = [*path.glob("*.safetensors")]
    found = open_external(only[0] if only and path.name.endswith("kohya") else path)
    if found.adapter is not None:
        layers = [f"blocks.0.{layer}" for layer in LAYERS.get(path.name, ["attn.to_q"])]
        trained = {f"{one}.lora_{ab}.default.weight": [] for one in layers for ab in "AB"}
        check_all_used(found, trained)
        if SCALES in found.adapter:
            found, told = to_one_rank(found, RUN, seed=0)
            yield told
    shapes = ", ".join(f"{name} {shape}" for name, shape in found.shapes.items())
    yield f"step {found.position.step}; {shapes}"
    yield from found.lost


def choose(path: Path) -> Callable[[Path], Iterator[str]]:
    """Choose the reader of an input."""
    if path.suffix in (".jsonl", ".csv"):
        return read_rows
    if path.is_file() or (path / "start.sh").is_file():
        return read_settings
    if any(path.rglob("*.tar")) or any(path.rglob("*.png")):
        return read_images
    return read_checkpoint


def try_input(path: Path) -> str:
    """Return the line of an input."""
    try:
        told = "; ".join(choose(path)(path))
    except PipelineError as error:
        told = f"refused: {error.what} -> {error.hint}"
    told = " ".join(told.replace(f"{path}/", "").replace(str(path), path.name).split())
    return f"{path.name}: {told}"


def main() -> None:
    """Print the line of each input."""
    for path in sorted(INPUTS.glob("[0-9]*")):
        print(try_input(path))


if __name__ == "__main__":
    main()
