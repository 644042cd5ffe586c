"""zerotrain generate: every format gives the same answer, and what is missing is named."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.formats.commands import run_command
from tests.formats.languages import MESSAGES, PROMPT, Language

from zerotrain.config.families import ROOT
from zerotrain.config.models import EvaluateConfig
from zerotrain.data.conversation import Message
from zerotrain.export.command import convert

WORDS = ("--max-new-tokens", 12)
BETWEEN = "\n---\n"
"""What stands between several answers."""


def answer(weights: Path, *words: object) -> str:
    return run_command("generate", weights, PROMPT, *WORDS, *words, progress=False)


@cache
def expected(language: Language, weights: Path) -> str:
    """What the family says in an evaluation."""
    config = EvaluateConfig(max_new_tokens=12)
    found = language.family.generate(weights, [MESSAGES], config, max_length=32, device="cpu")
    return found[0] + "\n"


@pytest.mark.parametrize("form", ["transformers", "single_file"])
def test_a_whole_model_of_any_format_answers_alike(language, tmp_path, form):
    """That of the weights folder, which is not its base's."""
    convert(language.whole, form, tmp_path / "out")
    words = ("--base", language.base) if form == "single_file" else ()
    assert answer(tmp_path / "out", *words) == expected(language, language.whole)
    assert expected(language, language.whole) != expected(language, language.base)


@pytest.mark.parametrize("form", ["transformers", "merged", "peft"])
def test_a_lora_of_any_format_answers_alike(language, tmp_path, form):
    """peft's file names its base; a base that is named counts before it."""
    convert(language.lora, form, tmp_path / "out")
    assert answer(tmp_path / "out") == expected(language, language.lora)
    assert expected(language, language.lora) != expected(language, language.base)
    if form == "peft":
        file = tmp_path / "out" / "adapter_model.safetensors"
        assert answer(file, "--base", language.base) == expected(language, language.lora)


def test_a_raw_prompt_is_taken_as_it_is(language):
    """As the rows of prompt_template: alpaca were learned; it has no other turns."""
    config = EvaluateConfig(max_new_tokens=12)
    found = language.family.generate(
        language.whole, [[Message("prompt", PROMPT)]], config, max_length=32, device="cpu"
    )
    assert answer(language.whole, "--raw") == found[0] + "\n"
    assert "a raw prompt has no turns" in answer(language.whole, "--raw", "--system", "be brief")


def test_a_prefix_is_found(language, tmp_path):
    convert(language.whole, "single_file", tmp_path / "out", prefix="text_encoder.")
    file = tmp_path / "out" / "model.safetensors"
    assert answer(file, "--base", language.base) == expected(language, language.whole)


def test_an_answer_is_a_function_of_its_seed(language):
    """However many are made; one alone is the likeliest, several are drawn."""
    three = answer(language.whole, "-n", 3, "--seed", 7).split(BETWEEN)
    assert len(set(three)) == 3
    assert answer(language.whole, "--seed", 8, "--temperature", 1) == three[1] + "\n"
    assert answer(language.whole, "--seed", 8) == expected(language, language.whole)
    # A low temperature leaves but the likeliest.
    cold = answer(language.whole, "-n", 2, "--temperature", 0.0001).split(BETWEEN)
    assert cold == [expected(language, language.whole)[:-1], expected(language, language.whole)]


def test_what_is_drawn_is_what_the_library_draws(language):
    """The same line of a user's own, from the same seed."""
    model = getattr(transformers, language.family.spec.classes[ROOT]).from_pretrained(
        language.whole
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(language.whole)
    text = PROMPT + "\n" * (language.name == "causal_lm")
    ids = tokenizer(text, return_tensors="pt").input_ids
    torch.manual_seed(3)
    drawn = model.eval().generate(ids, do_sample=True, temperature=0.7, max_new_tokens=12)[0]
    drawn = drawn[ids.shape[1] :] if language.name == "causal_lm" else drawn
    found = answer(language.whole, "--seed", 3, "--temperature", 0.7)
    assert found == tokenizer.decode(drawn, skip_special_tokens=True).strip() + "\n"


def test_a_long_prompt_is_answered_where_positions_are_computed(language):
    """As Qwen2 and T5 do, beyond the length of their training, too."""
    assert "ERROR" not in run_command("generate", language.whole, "1" * 600, "--max-new-tokens", 1)


def test_the_systems_turn_stands_before_the_question(language):
    assert answer(language.whole, "--system", "count") != answer(language.whole)


def test_what_is_missing_is_named(language, tmp_path):
    convert(language.whole, "single_file", tmp_path / "file")
    file = tmp_path / "file" / "model.safetensors"
    assert f"ERROR: {file}: is a part of a model" in answer(file)
    text = answer(file, "--base", tmp_path)
    assert f"--base: {tmp_path} has no config.json" in text
    assert "has an adapter of its own" in answer(file, "--base", language.lora)
    whole = answer(language.whole, "--base", language.base)
    assert f"--base: {language.whole} is a whole model already" in whole
    assert "there is nothing" in answer(tmp_path / "nowhere")
    assert "holds 0 safetensors files and no config.json" in answer(tmp_path)
    assert "-n: 0 is too small" in answer(language.whole, "-n", 0)
    assert "with --temperature 0 all" in answer(language.whole, "-n", 2, "--temperature", 0)
    other = tmp_path / "other.safetensors"
    save_file({f"other{n}": t for n, t in load_file(file).items()}, other)
    text = answer(other, "--base", language.base)
    assert "belong to no format that is known here, or to another base" in text


@pytest.mark.parametrize("form", ["single_file", "peft"])
def test_a_file_of_another_width_is_refused(language, tmp_path, form):
    """With the tensor that does not fit."""
    convert(language.whole if form == "single_file" else language.lora, form, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    wider = {n: torch.cat([t, t]) if t.dim() > 1 else t for n, t in load_file(file).items()}
    save_file(wider, file, metadata={"format": "pt"})
    (file.parent / "manifest.json").unlink()  # without it the folder is another program's
    text = answer(tmp_path / "out", "--base", language.base)
    assert f"ERROR: {file}: does not fit the base (" in text


def test_each_command_names_the_other(language, whole):
    assert f"zerotrain sample {whole} PROMPT" in answer(whole)
    text = run_command("sample", language.whole, PROMPT)
    assert f"zerotrain generate {language.whole} PROMPT" in text
