"""zerotrain publish of language models: the card says how to load them, and what they answered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tests.formats.conftest import REPO, head_of, publish, publish_phase, run_card
from tests.formats.languages import Language, publish_base

from zerotrain import artifact
from zerotrain.config.families import ROOT
from zerotrain.evaluation.results import ANSWERS, Answer, write_answers
from zerotrain.export.command import convert

ANSWERED = [
    Answer("1+2=", "3", "3"),
    Answer("be brief\n<b> | x", None, "42"),
    *(Answer(f"{n}+0=", str(n), "?") for n in range(10)),
]


@pytest.fixture
def phase(language: Language, tmp_path: Path) -> Path:
    """An evaluated phase with a LoRA's weights, and a base that names a hub id."""
    folder = tmp_path / "sums" / "only"
    base = publish_base(language.name, tmp_path / "sums" / "base", "Qwen/Qwen2.5-7B")
    publish_phase(folder, base, language.lora, language.name)
    with artifact.publish(folder / "evaluation", "evaluation") as draft:
        write_answers(draft.folder / ANSWERS, ANSWERED)
        prompts = [answer.prompt for answer in ANSWERED]
        draft.content = {"prompts": prompts, "evaluate": {"prompts": prompts}}
    (folder / "metrics.json").write_text(json.dumps({"exact_match": 0.97, "perplexity": 1.25}))
    return folder


def test_a_dry_run_writes_the_card_and_lists_the_files(phase, language, tmp_path):
    """Of an adapter in peft's form: what the hub sorts by, metrics, and the first answers."""
    convert(phase / "weights", "peft", tmp_path / "peft")
    said = publish(tmp_path / "peft", REPO, "--license", "apache-2.0", "--dry-run")
    listed = [line.split()[0] for line in said.splitlines() if line.endswith("bytes")]
    assert set(listed) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    card = tmp_path / "peft-card" / "README.md"
    task = {"causal_lm": "text-generation", "seq2seq_lm": "text2text-generation"}
    assert head_of(card) == {
        "base_model": "Qwen/Qwen2.5-7B",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "license": "apache-2.0",
        "pipeline_tag": task[language.name],
        "tags": [language.name, "zerotrain", "lora"],
    }
    text = card.read_text()
    assert "| answers that are exactly right | 97.0% |" in text
    assert "| 1+2= | 3 | 3 |" in text
    assert "| be brief<br>&lt;b&gt; &#124; x |  | 42 |" in text
    assert text.count("| ? |") == 8
    assert "| format | peft |" in text


@pytest.mark.parametrize(
    ("language", "form"),
    [
        *(("causal_lm", form) for form in ("peft", "single_file", "adapter", "method")),
        *(("seq2seq_lm", form) for form in ("peft", "transformers")),
    ],
    indirect=["language"],
)
def test_the_card_says_how_to_load_it(language, tmp_path, form, monkeypatch):
    """Its code runs, and gives the model that was trained."""
    source = language.lora if form in ("adapter", "peft") else language.whole
    if form == "method":
        shutil.copytree(source := language.loha, tmp_path / "out")
    else:
        convert(source, None if form == "adapter" else form, tmp_path / "out")
    publish(tmp_path / "out", REPO, "--dry-run")
    monkeypatch.chdir(tmp_path)  # it writes an image there
    scope = run_card(tmp_path / "out", language.base)
    if form == "single_file":
        assert (
            "model.embed_tokens.weight" in scope["tensors"] or "shared.weight" in scope["tensors"]
        )
        return
    auto = getattr(transformers, language.family.spec.classes[ROOT])
    expected = language.logits(
        language.family.load_trained(source) if form == "method" else auto.from_pretrained(source)
    )
    assert torch.equal(language.logits(scope["model"]), expected)
    assert scope["tokenizer"]("1+2").input_ids


@pytest.mark.parametrize("language", ["causal_lm"], indirect=True)
@pytest.mark.parametrize("form", ["raw", "system"])
def test_the_card_asks_as_the_training_did(phase, form):
    """A prompt of Alpaca's text as it is, or with the system's turn before the question."""
    manifest = phase / ("weights" if form == "raw" else "evaluation") / "manifest.json"
    written = json.loads(manifest.read_text())
    written["content"] |= (
        {"prompt_template": "alpaca"} if form == "raw" else {"systems": ["You add.", *[""] * 11]}
    )
    manifest.write_text(json.dumps(written))
    publish(phase / "weights", REPO, "--dry-run")
    card = (phase / "weights-card" / "README.md").read_text()
    assert {
        "raw": 'inputs = tokenizer("1+2=", return_tensors="pt")',
        "system": 'ids = tokenizer("You add.\\n").input_ids',
    }[form] in card
