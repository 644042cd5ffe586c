"""Small files that would take all memory or never end."""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.hostile.foreign_readers import FOREIGN_READERS

from zerotrain.config.trained_part import check_pattern_matches
from zerotrain.errors import PipelineError
from zerotrain.machine.confined import Confined, RaisedError
from zerotrain.models.pretrained import MOST_LAYERS, check_sizes, from_config, from_pretrained
from zerotrain.state.external import pickles


def write_pickle(path: Path, content: bytes, *, compression: int = zipfile.ZIP_STORED) -> None:
    """Write a torch.save file with a pickle of our own."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")


MEASURE = """
import re, sys
from pathlib import Path
from zerotrain.data.decode import decode
from zerotrain.data.folder import FolderSource
from zerotrain.config.data import DataConfig
from zerotrain.errors import PipelineError
from zerotrain.data.source import BadImageError
folder, said = Path(sys.argv[1]), ""
try:
    if folder.is_file():
        decode(folder.read_bytes())
    else:
        for entry in FolderSource(DataConfig(images=str(folder))).found():
            said = entry.reason or ""
except (BadImageError, PipelineError) as error:
    said = str(error).replace("\\n", " ")
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(int(peak[1]) * 1024, said)
"""


def measure(path: Path) -> tuple[int, str]:
    """Read an image, or list a folder, in a process of its own; most memory, and the refusal."""
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    peak, _, said = done.stdout.strip().partition(" ")
    return int(peak), said


def write_png(path: Path, side: int, kind: int, channels: int, stored: int) -> None:
    """Write a square of 16-bit zeros, of which so many rows are stored, in a thousandth."""
    packer = zlib.compressobj(1)
    row = bytes(1 + 2 * channels * side)
    rows = b"".join(packer.compress(row) for _ in range(stored)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 16, kind, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")]
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in chunks
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "channels", "said"),
    [(0, 1, ""), (6, 4, "its 13000 x 13000 pixels would take 1,352,000,000 bytes of memory")],
)
def test_an_image_of_a_megabyte_takes_no_gigabyte(
    kind: int, channels: int, said: str, tmp_path: Path
) -> None:
    """Grey of 16 bits is decoded within the limit; with alpha it is refused by its header."""
    write_png(tmp_path / "one.png", 13_000, kind, channels, stored=1 if said else 13_000)
    assert (tmp_path / "one.png").stat().st_size < 2_000_000
    peak, refused = measure(tmp_path / "one.png")
    assert peak < 2**30
    assert refused.startswith(said)
    assert bool(said) == bool(refused)


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "quoted.csv"])
def test_captions_of_600_megabytes_are_one_sentence(name: str, tmp_path: Path) -> None:
    """Tables whose first line does not end, and a cell whose quote does not."""
    Image.new("RGB", (1, 1)).save(tmp_path / "one.png")
    quoted = name == "quoted.csv"
    file = tmp_path / name.replace("quoted", "metadata")
    with file.open("wb") as stream:
        if quoted:
            stream.write(b'file_name,text\none.png,"' + (b"a" * 2**20 + b"\n") * 20)
        stream.truncate(600 * 10**6)
    peak, said = measure(tmp_path)
    assert peak < 2**28
    expected = {
        "quoted.csv": f"ERROR: {file}, row that begins on line 2: not valid CSV (field larger than "
        "field limit (16777216))",
    }
    line = f"ERROR: {file}, line 1: has more than 16,777,216 bytes   Hint: "
    assert said.startswith(expected.get(name, line))


def test_a_text_of_an_enum_is_no_text_of_anything(tmp_path: Path) -> None:
    """The text of 24 tuples of two, each of the one before, is 16 million times `()`."""
    nested = b")" + b"2\x86" * 24  # an empty tuple; then twice what is on top, as a tuple of two
    name = b"cdeepspeed.runtime.zero.offload_config\nOffloadDeviceEnum\n"
    write_pickle(tmp_path / "one.pt", b"\x80\x02" + name + nested + b"\x85R.")
    with pytest.raises(PipelineError, match=r"one\.pt"):
        pickles.load(tmp_path / "one.pt")
    write_pickle(tmp_path / "real.pt", b"\x80\x02" + name + b"X\x03\x00\x00\x00cpu\x85R.")
    assert pickles.load(tmp_path / "real.pt") == "cpu"


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    """A megabyte of a deflated record can be a gigabyte of zeros."""
    content = pickle.dumps(b"\0" * 10**6, protocol=2)
    write_pickle(tmp_path / "one.pt", content, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(PipelineError, match=r"is compressed, .* torch\.save compresses none"):
        pickles.load(tmp_path / "one.pt")


def test_a_tensor_that_repeats_its_numbers_is_refused(tmp_path: Path) -> None:
    """A shape of 3 billion numbers, all of which are the same stored one."""
    bomb = {"module": [{"weight": torch.zeros(1).expand(3 * 10**9)}], "step": 1}
    torch.save(bomb, tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 10_000
    with pytest.raises(PipelineError, match=r"\[3000000000\] repeats its numbers"):
        pickles.load(tmp_path / "one.pt")
    tied = torch.ones(1000)
    torch.save({"a": tied, "b": tied, "c": tied.view(10, 100).t()}, tmp_path / "tied.pt")
    assert torch.equal(pickles.load(tmp_path / "tied.pt")["c"], tied.view(10, 100).t())


@pytest.mark.parametrize(
    "config",
    [
        {"layers_per_block": 10**7},
        {"text_config": {"num_hidden_layers": 10**7}},
        {"transformer_layers_per_block": [1, [2, 10**7]]},
    ],
)
def test_a_model_of_millions_of_layers_is_not_built(config: dict, tmp_path: Path) -> None:
    """Each layer takes memory and time even where no number of it is stored."""
    from diffusers import UNet2DConditionModel

    with pytest.raises(PipelineError, match=f"is 10000000, and .* at most {MOST_LAYERS:,} layers"):
        from_config(UNet2DConditionModel, config)
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PipelineError, match=r"unet/config\.json: "):
        from_pretrained(UNet2DConditionModel, tmp_path)
    with pytest.raises(PipelineError, match=r"unet/config\.json: "):
        from_pretrained(UNet2DConditionModel, tmp_path / "unet")


def test_a_schedule_of_millions_of_timesteps_is_not_built(tmp_path: Path) -> None:
    """Its tables take the memory when they are computed, before anything can be compared."""
    from diffusers import DDPMScheduler

    file = tmp_path / "scheduler_config.json"
    file.write_text(json.dumps({"num_train_timesteps": 10**9}))
    with pytest.raises(PipelineError, match=r"scheduler_config\.json: .* at most 1,000,000 time"):
        from_pretrained(DDPMScheduler, tmp_path)


def test_a_model_larger_than_the_memory_names_its_folder(tmp_path: Path) -> None:
    """36 TiB in one tensor: no machine gives them, whatever else its sentence could blame."""
    FOREIGN_READERS["base"].write(tmp_path)
    file = tmp_path / "config.json"
    wide = {"hidden_size": 2**41, "num_attention_heads": 2**38}
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | wide))
    with pytest.raises(PipelineError, match="describes a model that does not fit the memory") as e:
        FOREIGN_READERS["base"].read(tmp_path, file)
    assert str(tmp_path) in e.value.what


def test_shipped_models_are_not_too_large() -> None:
    """No architecture of config/models is near the limits."""
    files = list(Path("config/models").rglob("*.json"))
    assert files
    for file in files:
        check_sizes(json.loads(file.read_text(encoding="utf-8")), file)


def test_a_catastrophic_pattern_is_one_sentence() -> None:
    """2^60 ways to split a name; the second name is not tried."""
    with pytest.raises(PipelineError, match=r"takes longer than 1 s.*\n.*repetition"):
        check_pattern_matches("frozen_parameters", r"(a|aa)+$", ["a" * 60 + "b", "c"])
    check_pattern_matches("frozen_parameters", r"^blocks\.(\d+)\.", ["blocks.1.weight"])


@pytest.mark.parametrize(
    ("template", "limit", "turns"),
    [
        (f"{'{% for a in range(99999) %}' * 2}{'{% endfor %}' * 2}", "0.5 s", 3),
        ("{{ 'a' * 2 ** 33 }}", "1 GiB of memory", 1),
    ],
)
def test_a_chat_template_ends(
    template: str, limit: str, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither loops in loops nor a text of 8 GiB is a reason to wait or to be killed, also where a
    template does so only once conversations are longer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from zerotrain.data.conversation import Message
    from zerotrain.models.families import tokenizer_process, tokens

    shorter = lambda call, what: Confined(call, what, seconds=0.5)  # noqa: E731
    monkeypatch.setattr(tokenizer_process, "Confined", shorter)
    monkeypatch.setattr(tokenizer_process, "_PROCESSES", {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    tokenizer.chat_template = f"{{% if messages | length >= {turns} %}}{template}{{% endif %}}"
    if turns == 3:
        assert tokens.causal_prompt(tokenizer, [Message("user", "hello")]) == []
    talk = [Message("user", "hello"), Message("system", "be brief"), Message("user", "hello")]
    for _ in range(2):
        with pytest.raises(PipelineError, match=f"chat template takes more than {limit}"):
            tokens.causal_prompt(tokenizer, talk)


def test_a_confined_call_returns_or_raises() -> None:
    """Its text, or that of its error; then it is called again, here and in a fork of this process,
    and ends with it."""
    called = Confined(lambda text: {"a": "b", "\ud800": "\udfff"}[text] * 10**6, "call")
    assert called("a") == "b" * 10**6
    with pytest.raises(RaisedError, match="'c'"):
        called("c")
    assert called("\ud800")[0] == "\udfff"
    child = os.fork()
    if child == 0:
        os._exit(0 if called("a") == "b" * 10**6 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert called("a") == "b" * 10**6
    called.close()
    assert called("a") == "b" * 10**6
    called.close()


def test_a_call_that_crashes_is_not_reported_as_large() -> None:
    """The process has ended; the next call has a new one."""
    called = Confined(lambda text: text if text else os.abort(), "call")
    with pytest.raises(PipelineError, match=r"the call ended its process \(exit code -6\)"):
        called("")
    assert called("a") == "a"
    called.close()


def test_a_call_that_is_left_answers_no_other() -> None:
    """A signal whose handler raises; the next call gets its own answer."""
    called = Confined(lambda text: time.sleep(float(text)) or text, "call")

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        called("1")
    signal.signal(signal.SIGALRM, before)
    assert called("0") == "0"
    called.close()
