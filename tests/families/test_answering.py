"""Answers end where they should, and nothing but the weights decides a greedy one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.families.texts import build
from tests.families.texts import build_class as build_any
from tests.formats.commands import run_command

from zerotrain.config.models import EvaluateConfig
from zerotrain.data.conversation import Message
from zerotrain.errors import PipelineError
from zerotrain.models.families import load_family
from zerotrain.models.families.language import GENERATION
from zerotrain.models.families.positions import check_row_length

SETTINGS = {
    "repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "min_length": 30, "num_beams": 3,
    "do_sample": True, "temperature": 9.0, "forced_eos_token_id": 7, "suppress_tokens": [9],
}  # fmt: skip
PROMPTS = [[Message("user", text)] for text in ("1+2=", "what is 2+3=")]


def answers(name: str, folder: Path, **config: int) -> list[str]:
    values = EvaluateConfig(**{"max_new_tokens": 12, **config})
    return load_family(name).generate(folder, PROMPTS, values, max_length=64, device="cpu")


@pytest.mark.parametrize("name", ["causal_lm", "seq2seq_lm"])
def test_a_greedy_answer_follows_from_the_weights_alone(tmp_path, name):
    """Whatever the base's generation config says of searching, drawing and forbidding."""
    base = build(name, tmp_path / "base")
    expected = answers(name, base)
    config = json.loads((base / GENERATION).read_text())
    (base / GENERATION).write_text(json.dumps(config | SETTINGS))
    assert answers(name, base) == expected


@pytest.fixture(scope="module", params=["gpt2", "bart"])
def learned(request, tmp_path_factory) -> Path:
    """A model with a table of 64 positions."""
    return build_any(request.param, tmp_path_factory.mktemp(request.param))


def test_an_answer_ends_with_the_positions_that_the_model_has(learned, tmp_path):
    """One that says 1 for ever says as many as its table has left."""
    name = "causal_lm" if learned.name.startswith("gpt2") else "seq2seq_lm"
    family = load_family(name)
    tokenizer, model = family.load_tokenizer(learned), family.load_model(learned)
    with torch.no_grad():
        for called, parameter in model.named_parameters():
            ones = called.endswith("bias") and ("norm" in called or "ln_f" in called)
            parameter.fill_(float(ones))
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("1")] = 1.0
    shutil.copytree(learned, tmp_path, dirs_exist_ok=True)
    model.save_pretrained(tmp_path)
    lengths = [len(family.prompt(tokenizer, prompt, 64)) for prompt in PROMPTS]
    rooms = [64 - length if name == "causal_lm" else 63 for length in lengths]
    assert answers(name, tmp_path, max_new_tokens=100, batch_size=1) == ["1" * n for n in rooms]
    assert answers(name, tmp_path, max_new_tokens=3) == ["111", "111"]


def test_a_prompt_without_room_and_rows_without_positions_are_refused(learned):
    """Before anything is trained, and with both lengths; a cut one is answered."""
    text = run_command("generate", learned, "1" * 80)
    most = 63 if learned.name.startswith("gpt2") else 64
    assert f"the prompt has 81 tokens, and the model has positions for {most}" in text
    check_row_length(learned, 64)
    with pytest.raises(PipelineError) as refused:
        check_row_length(learned, 65)
    assert refused.value.what == (f"train.max_length: 65 tokens, and {learned} has 64 positions")
