"""Models, adapters, tokenizers and pickles that were made to harm: each is one sentence, soon."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file
from tests.builders.refusals import refusal, refused
from tests.families.texts import build
from tests.hostile.test_bombs import write_pickle
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from zerotrain.data import table
from zerotrain.data.conversation import Message
from zerotrain.export.generate import open_language_model
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.machine.confined import Confined
from zerotrain.models import adapter_config
from zerotrain.models.base import check_model_index
from zerotrain.models.base_places import check_single_file
from zerotrain.models.families import tokenizer_process
from zerotrain.models.families.adapters import apply, apply_peft
from zerotrain.models.families.prompt_tokens import PromptTokenizer
from zerotrain.models.families.sdxl import FAMILY as SDXL
from zerotrain.models.families.tokens import causal_prompt
from zerotrain.models.sizes import model_sizes
from zerotrain.state.external import pickles


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small language model."""
    return build("causal_lm", tmp_path_factory.mktemp("answering"))


@pytest.fixture
def model(answering: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(answering, tmp_path / "model"))


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second instead of four."""
    for module in (tokenizer_process, adapter_config):
        monkeypatch.setattr(module, "Confined", partial(Confined, seconds=0.5))
    monkeypatch.setattr(pickles, "SECONDS", 0.5)
    monkeypatch.setattr(pickles, "_TRIAL", Confined(pickles._try, "pickle"))


def change(file: Path, **values: Any) -> None:
    """Change values of a JSON file."""
    file.write_text(
        json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8"
    )


def write_header(file: Path, header: Any) -> Path:
    """Write a safetensors file of a header alone."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    return file


SHAPES = (None, "ab", [[1]], [-1], [1.5], [True], [2**40], {"a": 1})
ENTRIES: list[Any] = [
    *({"dtype": "F32", "shape": shape, "data_offsets": [0, 4]} for shape in SHAPES),
    {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
    {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1], "data_offsets": None},
    {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
    {"dtype": "F32"},
    None,
    [],
]


@pytest.mark.parametrize("entry", ENTRIES, ids=json.dumps)
def test_a_header_of_other_types(entry: Any, tmp_path: Path) -> None:
    """As `base` and in a plan; the message names file and tensor."""
    file = write_header(tmp_path / "model.safetensors", {"model.diffusion_model.a": entry})
    for call in (find_architecture, lambda _, base: check_single_file(base, file, "sdxl")):
        what = refused(call, "sdxl", str(file)).what
        assert what.startswith(f"{file}: header: the entry of model.diffusion_model.a is damaged")


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0)])
def test_a_layer_without_numbers(shape: tuple[int, ...]) -> None:
    """A valid header; an adapter to it has no numbers either."""
    lora = {"rank": 2, "target_modules": ["to_q"], "use_dora": True}
    assert model_sizes({"a.to_q.weight": shape}, lora).everything <= 3 * 4


@pytest.mark.parametrize("header", [b"[]", b"1", b"null", b"[" * 10**5, b"{", b'{"a": NaN}'])
def test_a_header_that_is_no_object(header: bytes, tmp_path: Path) -> None:
    """Neither in a plan nor as `base`."""
    file = write_header(tmp_path / "model.safetensors", header)
    assert refused(find_architecture, "sdxl", str(file)).what.startswith(f"{file}: header: ")
    assert refused(check_single_file, str(file), file, "sdxl").what.startswith(f"{file}: header")


@pytest.mark.parametrize(
    "text", ["[]", "[" * 10**5, '{"unet": ["diffusers", ["a"]]}', "7", '{"a":']
)
def test_an_index_of_a_model_of_other_types(text: str, tmp_path: Path) -> None:
    """model_index.json, in a plan and as `base`."""
    index = tmp_path / "model_index.json"
    index.write_text(text)
    assert str(index) in refused(find_architecture, "sdxl", str(tmp_path)).what
    assert refused(check_model_index, index, SDXL.spec, "MODEL")


@pytest.mark.parametrize("names", [5, {"a": 1}, [[1]], [5], "", None])
def test_a_class_that_is_no_text(names: Any, tmp_path: Path) -> None:
    """config.json of a plan's folder."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))
    what = refused(find_architecture, "causal_lm", str(tmp_path)).what
    assert what == f"{tmp_path / 'config.json'}: it names no class (architectures or _class_name)"


@pytest.mark.parametrize("part", ["unet", "scheduler", "tokenizer"])
@pytest.mark.parametrize("library", ["evil", ["evil"], 3])
def test_a_library_that_is_not_expected(part: str, library: Any, tmp_path: Path) -> None:
    """diffusers would import it: any module of this machine."""
    classes = {name: ["diffusers", one] for name, one in SDXL.spec.classes.items()}
    classes |= {"scheduler": ["diffusers", "Euler"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    classes[part] = [library, classes[part][1]]
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps(classes))
    what = refused(check_model_index, index, SDXL.spec, "MODEL").what
    assert what.startswith(f"{index}: {part} is [")
    assert what.endswith("not a class of diffusers or transformers")
    assert refused(find_architecture, "sdxl", str(tmp_path)).what == what


def opened(folder: Path, base: Path | None = None) -> str:
    """The sentence that `zerotrain generate` ends with."""
    return refusal(open_language_model, folder, base, "cpu")


def test_weights_outside_of_the_folder(model: Path) -> None:
    """An index whose names lead out of it."""
    shutil.move(model / "model.safetensors", model.parent / "other.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "../other.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "the name '../other.safetensors' leaves the folder" in opened(model)


def test_a_shard_that_is_missing(model: Path) -> None:
    """The index names it."""
    (model / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00001.safetensors" in opened(model)


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": None},
        {"quant_method": [1]},
        "gptq",
    ],
    ids=json.dumps,
)
def test_weights_that_another_package_quantised(model: Path, quantised: Any) -> None:
    """Its package is not installed, or there is none."""
    change(model / "config.json", quantization_config=quantised)
    assert opened(model).startswith(f"ERROR: {model}: ")


def test_an_empty_template(model: Path) -> None:
    """The model has none, then."""
    (model / "chat_template.jinja").write_text("")
    tokenizer = open_language_model(model, None, "cpu")[2]
    assert causal_prompt(tokenizer, [Message("user", "1+2=")])


def test_a_pipe_in_the_place_of_a_file(model: Path) -> None:
    """Nobody writes to it."""
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    assert "model.safetensors: is a pipe, not a file" in opened(model)


PATTERN = "([a-z0-9_.]+)+!"
SETTINGS = [
    {"target_modules": PATTERN}, {"target_modules": "("}, {"exclude_modules": "("},
    {"rank_pattern": {PATTERN: 4}}, {"rank_pattern": {"(": 4}}, {"rank_pattern": ["q_proj"]},
    {"alpha_pattern": {"(": 4}}, {"modules_to_save": ["("]}, {"r": "many"}, {"r": [[1]]},
    {"layers_pattern": [PATTERN], "layers_to_transform": [0]},
    {"lora_alpha": None, "r": 0}, {"peft_type": "NO_SUCH"}, {"target_modules": ["no_such_layer"]},
    {"megatron_config": {"a": 1}, "megatron_core": "this"},
]  # fmt: skip


def write_adapter(folder: Path, text: str) -> Path:
    """Write an adapter of peft for the small language model."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(text)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {"lora_A": torch.ones(2, 32), "lora_B": torch.ones(32, 2)}
    tensors = {f"{layer}.{name}.weight": factor for name, factor in factors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("settings", SETTINGS, ids=json.dumps)
def test_settings_of_an_adapter(settings: dict[str, Any], answering: Path, tmp_path: Path) -> None:
    """In a folder of peft, which `generate` opens on its base; there is a limit of all patterns."""
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    folder = write_adapter(tmp_path / "adapter", json.dumps(plain | settings))
    began = time.monotonic()
    assert str(folder) in opened(folder, answering).partition("\n")[0]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("text", ['{"r": NaN}', "[" * 10**5, "[]", "", '{"r": 1, "r": 2}'])
def test_settings_of_an_adapter_that_are_no_object(
    text: str, answering: Path, tmp_path: Path
) -> None:
    """The message names the file."""
    folder = write_adapter(tmp_path / "adapter", text)
    assert opened(folder, answering).startswith(f"ERROR: {folder / 'adapter_config.json'}: ")


def test_settings_of_an_adapter_in_a_models_folder(model: Path) -> None:
    """transformers applies it by itself."""
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": PATTERN}
    write_adapter(model, json.dumps(plain))
    assert f"search for the patterns of {model / 'adapter_config.json'} takes more" in opened(model)


class Small(torch.nn.Module):
    """A denoiser in the eyes of peft."""

    def __init__(self) -> None:
        super().__init__()
        self.block_with_a_long_name_of_letters = torch.nn.Linear(2, 2)


def test_settings_in_the_header_of_a_lora(tmp_path: Path) -> None:
    """diffusers' file has them there."""
    header = {"lora_adapter_metadata": json.dumps({"unet.target_modules": PATTERN, "unet.r": 2})}
    file = tmp_path / "pytorch_lora_weights.safetensors"
    save_file({"unet.a.lora_A.weight": torch.ones(2, 2)}, file, header)
    assert f"patterns of {file} takes more than 0.5 s" in refusal(apply, Small(), tmp_path)
    folder = write_adapter(tmp_path / "adapter", json.dumps({"peft_type": "LORA", "r": "x"}))
    assert "adapter_config.json: r" in refusal(apply_peft, Small(), folder)


def tokenizer_of(pattern: str, template: str | None = None) -> Any:
    """A tokenizer that splits by a regular expression."""
    made = Tokenizer(models.WordLevel({"a": 0, "[U]": 1, "</s>": 2}, "[U]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="[U]")
    found.chat_template = template
    return found


SLOW = "(a+)+$"
TEXT = ("a" * 21 + "b") * 200
"""Each word takes a tenth of a second; the library gives up at longer ones."""


def test_a_tokenizers_regular_expression() -> None:
    """2^20 ways to split each word of a text, of a conversation and of a prompt of images."""
    tokenizer = tokenizer_of(SLOW)
    for call in (
        lambda: causal_prompt(tokenizer, [Message("user", TEXT)]),
        lambda: PromptTokenizer(tokenizer).count([TEXT]),
        lambda: PromptTokenizer(tokenizer)([TEXT]),
    ):
        assert "the tokenizer or its chat template takes more than 0.5 s" in refusal(call)
    assert causal_prompt(tokenizer_of("a"), [Message("user", TEXT)])


def test_a_chat_template_that_makes_a_million_letters() -> None:
    """Of a question of two."""
    tokenizer = tokenizer_of("a", "{{ 'a' * 1000000 }}")
    what = refused(causal_prompt, tokenizer, [Message("user", "hi")]).what
    assert what == "the tokenizer's chat template makes 1,000,000 letters of 2"


HUGE = b"\x8a\x05" + (2**32).to_bytes(5, "little")
"""LONG1: 2^32."""
TIMES = 40
BOMBS = {
    "bytearray": b"cbuiltins\nbytearray\n" + HUGE + b"\x85R.",
    "bytes of hexadecimal digits": b"c_codecs\nencode\n" * TIMES
    + b"X\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86R"
    + b"X\x03\x00\x00\x00hex\x86R" * (TIMES - 1)
    + b".",
    "a key of tuples in tuples": b"}" + b")" + b"\x85" * 200_000 + b"K\x01s.",
    "a key of twice the tuple before": b")q\x00"
    + b"".join(bytes((104, n, 104, n, 134, 113, n + 1)) for n in range(60))  # GET, GET, TUPLE2, PUT
    + b"}h\x3cK\x01s.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_asks_for_memory(name: str, tmp_path: Path) -> None:
    """torch's reader calls what these name, or takes the hash of a key."""
    write_pickle(tmp_path / "one.pt", b"\x80\x02" + BOMBS[name])
    began = time.monotonic()
    assert refused(pickles.load, tmp_path / "one.pt").what.startswith(f"{tmp_path / 'one.pt'}: ")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("repeated", [True, False])
def test_a_table_of_a_few_bytes(
    repeated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same long text in each row, as a word of a dictionary or compressed."""
    monkeypatch.setattr(table, "MOST_EXPANDED", 2**22)
    file = tmp_path / "metadata.parquet"
    rows = pyarrow.table({"file_name": ["a.png"] * 400, "text": ["a" * 2**14] * 400})
    options: dict[str, Any] = {"use_dictionary": repeated, "compression": "zstd"}
    parquet.write_table(rows, file, **options)
    what = refused(list, table.parquet_rows(file)).what
    assert what == f"{file}: its {file.stat().st_size:,} bytes expand to more than 4,194,304"
    parquet.write_table(rows.slice(0, 2), file, **options)
    assert [len(row["text"]) for _, row in table.parquet_rows(file)] == [2**14, 2**14]
