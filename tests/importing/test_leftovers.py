"""Keys that another program accepts and does not use are named; its own spellings are read."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from zerotrain.importers.command_line import import_command
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.reading import import_file

ZERO = {
    "stage": 3, "stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 2000,
    "stage3_prefetch_bucket_size": 300, "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
ZERO3 = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": ZERO}
RUN = "torchrun --nproc_per_node 8 finetune.py --model_name_or_path a/b --max_steps 9 --bf16"


def read(folder: Path, name: str, text: str) -> ImportedConfig:
    (folder / name).write_text(text)
    return import_file(folder / name)


def notes(found: ImportedConfig) -> dict[str, tuple[str, str]]:
    return {note.key: (note.outcome, note.reason) for note in found.notes}


def test_deepspeeds_short_names_are_its_long_ones(place: Path) -> None:
    """Its sections take the names with and without stage3_."""
    zero = {name.removeprefix("stage3_"): value for name, value in ZERO.items()}
    long = read(place, "long.json", json.dumps(ZERO3)).values
    short = read(place, "short.json", json.dumps({**ZERO3, "zero_optimization": zero})).values
    assert short == long
    assert long["launch.deepspeed.zero_optimization.stage3_max_live_parameters"] == 1000


@pytest.mark.parametrize("command", [False, True])
def test_deepspeeds_file_may_have_comments_and_trailing_commas(place: Path, command: bool) -> None:
    """DeepSpeed reads Hjson; a text that looks like a comment stays."""
    text = json.dumps(ZERO3, indent=1).replace("8,", "8, // of all GPUs\n/* bf16 */ # yes", 1)
    text = text.rstrip("}\n") + "},\n}\n"
    text = text.replace("{", '{"_note": "see https://a/b#c, }", ', 1)
    plain = read(place, "plain.json", json.dumps(ZERO3)).values
    if not command:
        assert read(place, "ds.json", text).values == plain
        return
    (place / "ds.json").write_text(text)
    by_file = import_command(f"{RUN} --deepspeed ds.json").values
    encoded = base64.urlsafe_b64encode(json.dumps(ZERO3).encode()).decode()
    assert import_command(f"{RUN} --deepspeed {encoded}").values == by_file
    assert by_file["launch.preset"] == plain["launch.preset"] == "zero3"


def test_the_last_of_a_repeated_key_counts_and_is_named(place: Path) -> None:
    """As PyYAML takes it for accelerate."""
    yaml = "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n"
    found = read(place, "launch.yaml", f"{yaml}num_processes: 4\n")
    assert found.values["launch.num_processes"] == 4
    said = [note.reason for note in found.notes if note.outcome == "changed"]
    assert said == ["it stands twice; that of line 4 counts"]
