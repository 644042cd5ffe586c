"""Damaged files of other programs that once ended in a traceback; test_fuzz.py found them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tests.builders.refusals import refused
from tests.builders.talks import publish_dataset
from tests.hostile.foreign_readers import FOREIGN_READERS, KOHYA

from zerotrain.artifact.columns import Columns
from zerotrain.artifact.documents import check_type
from zerotrain.data.conversation import read_conversations
from zerotrain.data.metadata import read_metadata
from zerotrain.importers.command_line import import_command
from zerotrain.importers.reading import import_file
from zerotrain.state.external.consistency import reading
from zerotrain.state.external.ranks import ModelFile, OptimizerFile


def write(path: Path, document: Any) -> Path:
    """Write a document as JSON."""
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({**KOHYA, "datasets": [7]}, "datasets: must be keys with values (found [7])"),
        ({**KOHYA, "datasets": {"a": 1}}, "datasets: must be keys with values (found {'a': 1})"),
        ({**KOHYA, "general": [1]}, "general: must be keys with values (found [[1]])"),
        ({"datasets": [{"resolution": -8, "subsets": [{"image_dir": "a"}]}]}, "resolution is -8"),
        ({"datasets": [{"resolution": 8, "enable_bucket": True, "bucket_reso_steps": 0,
                        "subsets": [{"image_dir": "a"}]}]}, "in steps of 0"),
        ({"datasets": [{"resolution": 8, "enable_bucket": True, "bucket_reso_steps": 300,
                        "subsets": [{"image_dir": "a"}]}]}, "in steps of 300"),
        ({"datasets": [{"resolution": 8, "enable_bucket": True, "max_bucket_reso": 10**9,
                        "subsets": [{"image_dir": "a"}]}]}, "buckets of 256 to 1000000000 pixels"),
    ],
)  # fmt: skip
def test_kohyas_datasets_of_other_types(tmp_path: Path, document: Any, said: str) -> None:
    """Sections that are none, and sizes that no image has."""
    assert said in refused(import_file, write(tmp_path / "a.json", document)).what


def test_nested_toml(tmp_path: Path) -> None:
    """Brackets beyond what the parser's own stack holds."""
    (tmp_path / "a.toml").write_text("a = " + "[" * 9999, encoding="utf-8")
    assert "nested more than 50 deep" in refused(import_file, tmp_path / "a.toml").what


SPLIT = (
    "accelerate launch train.py --num_epochs {} --output_path {} --task sft\n"
    "accelerate launch train.py --preset_lora_path {} --task sft\n"
)


@pytest.mark.parametrize(
    "words", [("x", "a", "a"), ("9" * 5000, "a", "a"), ("5", "", "a"), ("5", "a", "")]
)
def test_diffsynths_two_trainings_with_odd_flags(words: tuple[str, str, str]) -> None:
    """Flags without a value, and a value that is not a number."""
    refused(import_command, SPLIT.format(*words))


def test_simpletuners_command_with_an_open_quote() -> None:
    """And with a name that no file has."""
    assert "no closing quotation" in refused(import_command, "simpletuner train --env 'x").what
    assert "is not there" in refused(import_command, "simpletuner train --env " + "x" * 999).what


def test_a_command_without_arguments() -> None:
    """Of an example whose DeepSpeed file is not named."""
    program = "examples/peft_lora_seq2seq_accelerate_ds_zero3_offload.py"
    found = import_command(f"accelerate launch {program}")
    assert found.values["launch.preset"] == "torch"


def test_parquet_whose_text_is_not_unicode(tmp_path: Path) -> None:
    """The bytes of a string are not checked when the file is opened."""
    offsets, data = pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xe9")
    text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, data])
    parquet.write_table(pa.table({"file_name": text, "text": text}), tmp_path / "a.parquet")
    what = refused(read_metadata, tmp_path / "a.parquet", tmp_path, []).what
    assert "not readable as Parquet ('utf-8' codec can't decode byte 0xe9" in what


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configurations of a base; who opens a connection fails the test."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("the hub was asked"))
    FOREIGN_READERS["base"].write(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ("somebody/other-model", "a string"),
        (7, "a number"),
        (None, "null"),
        (["a"], "a list"),
    ],
)
@pytest.mark.parametrize("file", ["scheduler/scheduler_config.json", "unet/config.json"])
def test_a_configuration_that_is_a_name(base: Path, file: str, document: Any, what: str) -> None:
    """diffusers takes it for a model of the hub."""
    write(base / file, document)
    found = refused(FOREIGN_READERS["base"].read, base, base / file).what
    assert found == f"{base / file}: holds {what}, not keys with values"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("unet/config.json", {"block_out_channels": "x"}),
        ("unet/config.json", {"norm_num_groups": 0}),
        ("config.json", {"num_attention_heads": 0}),
        ("config.json", {"hidden_size": [1]}),
        ("scheduler/scheduler_config.json", {"beta_schedule": "odd"}),
    ],
)
def test_a_model_that_its_library_cannot_build(base: Path, file: str, change: Any) -> None:
    """Libraries raise any error; the sentence has the folder and the error."""
    write(base / file, json.loads((base / file).read_bytes()) | change)
    assert "cannot be loaded (" in refused(FOREIGN_READERS["base"].read, base, base / file).what


@pytest.mark.parametrize("length", [{}, "x", [1]])
def test_a_tokenizer_with_a_length_that_is_none(tmp_path: Path, length: Any) -> None:
    """The library compares it when it tokenises."""
    FOREIGN_READERS["tokenizer"].write(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    write(file, json.loads(file.read_bytes()) | {"model_max_length": length})
    refused(FOREIGN_READERS["tokenizer"].read, tmp_path, file)


MODEL: dict[str, Any] = {"global_steps": 3, "param_shapes": [{"a": torch.Size([2, 3])}]}
STATE: dict[str, Any] = {
    "state": {0: {"exp_avg": torch.ones(6)}}, "param_groups": [{"params": [0]}],
}  # fmt: skip
RANK: dict[str, Any] = {
    "partition_count": 1, "single_partition_of_fp32_groups": [torch.ones(6)],
    "base_optimizer_state": STATE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "whole", "change", "said"),
    [
        (ModelFile, MODEL, {"global_steps": None}, "global_steps: Input should be a valid integer"),
        (ModelFile, MODEL, {"param_shapes": 0.5}, "param_shapes: Input should be a valid list"),
        (ModelFile, MODEL, {"param_shapes": [{"a": (2, -3)}]}, "param_shapes.0.a.1: Input should"),
        (ModelFile, MODEL, {"shared_params": [1]}, "shared_params: Input should be a valid dict"),
        (ModelFile, MODEL, {"frozen_param_fragments": {"a": torch.ones(1)}}, "different names"),
        (OptimizerFile, RANK, {"partition_count": "x"}, "partition_count.constrained-int: Input"),
        (OptimizerFile, RANK, {"single_partition_of_fp32_groups": [[]]}, "_groups.0: Input should"),
        (OptimizerFile, RANK, {"single_partition_of_fp32_groups": [torch.ones(())]}, "flat tensor"),
        (OptimizerFile, RANK, {"base_optimizer_state": None}, "the optimizer's state is missing"),
        (OptimizerFile, RANK, {"base_optimizer_state": [{}, {}]}, "2 states of 1 flat groups"),
        (OptimizerFile, RANK, {"base_optimizer_state": STATE | {"param_groups": [{"params": [4]}]}},
         "name others than 1 flat groups"),
        (OptimizerFile, RANK, {"base_optimizer_state": STATE | {"state": {0: {"exp_avg": 1}}}},
         "exp_avg should be a tensor"),
    ],
)  # fmt: skip
def test_deepspeeds_files_of_other_types(kind: Any, whole: Any, change: Any, said: str) -> None:
    """File and key are named."""
    path = Path("mp_rank_00_model_states.pt")
    check_type(whole, kind, path)
    what = refused(check_type, whole | change, kind, path).what
    assert what.startswith(f"{path}: ")
    assert said in what


def test_a_value_that_no_reader_checks(tmp_path: Path) -> None:
    """Wherever it is used."""

    def read() -> None:
        with reading(tmp_path):
            {}["x"]

    assert "another type or size (KeyError: 'x')" in refused(read).what


@dataclass(frozen=True)
class Word:
    """A record."""

    text: str


def test_a_column_that_points_beyond_its_values() -> None:
    """Arrow reads such an index only with the values."""
    indices = pa.array([0, 9], pa.int32())
    words = pa.DictionaryArray.from_arrays(indices, pa.array(["a"]), safe=False)
    found = Columns(Word, pa.table({"text": words}), "samples.arrow")
    for read in (Columns.check, list, lambda columns: columns[1]):
        assert refused(read, found).what.startswith("samples.arrow: damaged: ")


def test_a_dataset_whose_manifest_lacks_a_key(tmp_path: Path) -> None:
    """The manifest is named."""
    file = publish_dataset(tmp_path / "data") / "manifest.json"
    manifest = json.loads(file.read_bytes())
    content = {name: one for name, one in manifest["content"].items() if name != "repeats"}
    write(file, {**manifest, "content": content})
    said = refused(read_conversations, tmp_path / "data").what
    assert said == f"{file}: repeats is None, not a number of times"
