"""What is measured of answers, and how they are shown."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tests.cache.test_tokens import bases, publish_dataset, run_config  # noqa: F401

from zerotrain.cache import read_cache
from zerotrain.evaluation.answers import ANSWERS, Answer, read_answers
from zerotrain.evaluation.text import measure_text
from zerotrain.families import load_family
from zerotrain.page import PhaseFacts, render_page
from zerotrain.stages.cache_latents import cache_latents

TALKS = [(f"{a}+1=", str(a + 1)) for a in range(8)]


@pytest.mark.parametrize("family", ["causal_lm", "seq2seq_lm"])
def test_what_is_held_out_is_answered_and_measured(bases, tmp_path, monkeypatch, family):  # noqa: F811
    """Exact match counts answers, perplexity every learned token once; prompts are answered too."""
    dataset = publish_dataset(tmp_path / "data", TALKS, holdout=3)
    config = run_config(family)
    config = config.model_copy(
        update={"evaluate": config.evaluate.model_copy(update={"prompts": ["9+9="]})}
    )
    cache_latents(config, 32, dataset, bases[family], tmp_path / "cache")
    answers = ["?", "6", "7", "no"]  # held-out examples come by their digests

    def generate(self, weights, prompts, config, *, max_length, device):
        known = dict(TALKS) | {"7+1=": "wrong"}
        return [known.get(messages[-1].content, "?") for messages in prompts]

    monkeypatch.setattr(type(load_family(family)), "generate", generate)
    made = measure_text(config, "one", dataset, tmp_path / "cache", bases[family], "cpu")
    assert len(made.prompts) == len(answers)
    assert made.metrics["exact_match"] == pytest.approx(2 / 3)

    opened = read_cache(tmp_path / "cache")
    model = load_family(family).load_model(bases[family]).eval()
    total, count = 0.0, 0
    for i, row in enumerate(opened.entries):
        if row.split == "holdout":
            own = opened.sample(i)
            with torch.inference_mode():
                loss = model(input_ids=own["input_ids"][None], labels=own["labels"][None]).loss
            learned = int((own["labels"] != -100).sum())
            total, count = total + float(loss) * learned, count + learned
    assert made.metrics["val_loss"] == pytest.approx(total / count, abs=1e-5)
    assert made.metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)

    made.write(tmp_path)
    found = read_answers(tmp_path / ANSWERS)
    assert found[0] == Answer("9+9=", None, "?")
    assert {a.prompt: a.generated for a in found[1:]} == {"5+1=": "6", "6+1=": "7", "7+1=": "wrong"}
    assert json.loads((tmp_path / ANSWERS).read_text().splitlines()[1])["expected"] in "678"


def test_without_held_out_examples_training_questions_are_shown(bases, tmp_path):  # noqa: F811
    """And nothing is measured of them."""
    dataset = publish_dataset(tmp_path / "data", TALKS, holdout=0)
    config = run_config()
    cache_latents(config, 32, dataset, bases["causal_lm"], tmp_path / "cache")
    config = config.model_copy(
        update={"evaluate": config.evaluate.model_copy(update={"max_new_tokens": 2})}
    )
    made = measure_text(config, "one", dataset, tmp_path / "cache", bases["causal_lm"], "cpu")
    assert set(made.metrics.values()) == {None}
    assert made.prompts == [question for question, _ in TALKS]


def test_the_page_shows_wrong_answers_first():
    """Beside what was expected, escaped; and how transformers loads the weights."""
    answers = [Answer("1+1=", "2", "2"), Answer("<b>", "4", "5")]
    facts = PhaseFacts(
        name="one", metrics={"exact_match": 0.5, "perplexity": 1.25}, grid=None, answers=answers,
        loss=b"", learning_rate=b"", launch=[], weights=Path("results/r/one/weights"),
    )  # fmt: skip
    page = render_page("r", [], [facts])
    assert page.index("&lt;b&gt;") < page.index("1+1=")
    assert "50.0%" in page
    assert "AutoModelForCausalLM.from_pretrained" in page
