"""zerotrain export --to FORMAT: of a checkpoint, of exported weights, and what it refuses."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from tests.builders.adapters import adapter_of, make_adapted
from tests.builders.exports import Export
from tests.builders.runs import make_run
from tests.formats.commands import run_command
from tests.formats.conftest import ADAPTER, LAYERS

from zerotrain import artifact
from zerotrain.training.checkpointing.conditions import manifest_content

run = partial(run_command, "export")


@pytest.fixture
def checkpoint(base: Path, tmp_path: Path) -> Export:
    """A checkpoint of the adapter that `lora` has, and its configuration next to it."""
    made = Export(tmp_path, base)
    made.settings = {"lora": {"rank": 4, "alpha": 6.0, "target_modules": list(LAYERS)}}
    made.save(dict(adapter_of(make_adapted(base, **ADAPTER))))
    document = (
        make_run(run="tiny", data={"source": "digits"}, phases=[{"name": "plain", "until": 12}])
        | made.settings
    )
    (tmp_path / "run.yaml").write_text(json.dumps(document))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("form", ["kohya", "merged"])
def test_a_checkpoint_becomes_any_format_at_once(checkpoint, base, tmp_path, form):
    """The same files as through a weights folder, of which nothing is left."""
    words = ["--config", tmp_path / "run.yaml", "--base", base]
    out = tmp_path / "out"
    for words_of in (
        [checkpoint.checkpoint, *words, "--to", form, "--dtype", "bf16", "--output", out],
        [checkpoint.checkpoint, *words, "--output", tmp_path / "weights"],
        [tmp_path / "weights", "--to", form, "--dtype", "bf16", "--output", tmp_path / "again"],
    ):
        assert "wrote " in run(*words_of)
    kind = "weights" if form == "merged" else "exported"
    once, twice = (artifact.read(tmp_path / name, kind) for name in ("out", "again"))
    assert once.identity == twice.identity
    assert set(once.parents) == {"checkpoint", "base"}
    assert set(twice.parents) == {"weights"}
    assert once.made_by["dtype"] == "bf16"
    assert not list(tmp_path.glob(".*"))


def test_a_rolling_checkpoint_is_exported_as_it_was_trained(checkpoint, base, tmp_path):
    """Whatever the configuration says by now, which is named with both values."""
    words = ["--config", tmp_path / "run.yaml", "--base", base]
    run(checkpoint.checkpoint, *words, "--output", tmp_path / "before")
    progress = tmp_path / "results" / "tiny" / "plain" / "progress"
    rolling = shutil.copytree(checkpoint.checkpoint, progress / "step-00000012")
    config = checkpoint.config("fp32")
    trained = {
        "family": "sdxl", "lora": config.adapter_values(), "peft": None, "frozen_parameters": [],
        "trainable_parameters": [], "long_captions": "chunk",
    }  # fmt: skip
    manifest = json.loads((rolling / "manifest.json").read_text())
    manifest["content"] = manifest_content(trained)
    (rolling / "manifest.json").write_text(json.dumps(manifest))
    document = json.loads((tmp_path / "run.yaml").read_text())
    document["lora"] |= {"alpha": 64.0}
    (tmp_path / "run.yaml").write_text(json.dumps(document))
    said = run(rolling, *words, "--output", tmp_path / "after")
    for key, now, then in (("long_captions", "truncate", "chunk"), ("lora.alpha", 64.0, 6.0)):
        assert (
            f"{tmp_path / 'run.yaml'}: {key} is {now}, and the checkpoint was trained with {then}, "
            "which is taken\n" in said
        )
    assert said.count("which is taken") == 2
    said = run(rolling, "--family", "sdxl", "--base", base, "--output", tmp_path / "alone")
    assert said == f"wrote {tmp_path / 'alone'}\n"
    before, after, alone = (
        artifact.read(tmp_path / name, "weights") for name in ("before", "after", "alone")
    )
    lora = "pytorch_lora_weights.safetensors"
    assert before.files[lora] == after.files[lora] == alone.files[lora]
    assert after.content == alone.content == before.content | {"long_captions": "chunk"}


def test_what_a_checkpoint_cannot_become_is_refused_before_it_is_read(checkpoint, base, tmp_path):
    """No state appears either."""
    words = ["--config", tmp_path / "run.yaml", "--base", base, "--state", tmp_path / "state"]
    text = run(checkpoint.checkpoint, *words, "--to", "ldm", "--output", tmp_path / "out")
    assert "holds an adapter and its base, not one model" in text
    assert not (tmp_path / "state").exists()


def test_a_state_has_no_options_of_files(checkpoint, tmp_path):
    state, universal = ["--state"], ["--to", "universal", "--output"]
    for to, *given in (
        (state, "--max-shard-size", "5GB"), (universal, "--prefix", "pipe."),
        (universal, "--dtype", "bf16"), (state, "--no-ema"),
    ):  # fmt: skip
        said = run(checkpoint.checkpoint, *to, tmp_path / "s", *given)
        assert f"{given[0]}: no model is written" in said
    assert not (tmp_path / "s").exists()


def test_exported_weights_are_no_training(lora, tmp_path):
    for words in (["--state", tmp_path / "s"], ["--to", "universal", "--output", tmp_path / "u"]):
        assert "exported weights are no training, and hold no moments" in run(lora, *words)


@pytest.mark.slow
def test_an_export_converts_to_another_format_by_the_weights_it_was_made_from(lora, tmp_path):
    """In its own type. A LoRA alone lacks its base: without the weights the message names them."""
    weights = shutil.copytree(lora, tmp_path / "weights")
    kohya = tmp_path / "kohya"
    run(weights, "--to", "kohya", "--dtype", "bf16", "--output", kohya)
    run(weights, "--to", "peft", "--dtype", "bf16", "--output", tmp_path / "direct")
    assert "wrote " in run(kohya, "--to", "peft", "--output", tmp_path / "peft")
    direct, found = (artifact.read(tmp_path / name, "exported") for name in ("direct", "peft"))
    assert (found.identity, found.parents) == (direct.identity, direct.parents)
    shutil.rmtree(weights)
    text = run(kohya, "--to", "peft", "--output", tmp_path / "again")
    assert f"ERROR: {kohya}: is exported as kohya already" in text
    assert "Hint: name the weights folder that it was made from" in text


def test_the_source_is_never_replaced(lora):
    before = artifact.read(lora, "weights").identity
    assert "would be replaced whole" in run(lora, "--to", "kohya", "--output", lora)
    assert artifact.read(lora, "weights").identity == before
