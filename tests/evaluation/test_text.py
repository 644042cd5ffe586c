"""What is measured of answers, and how they are shown."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tests.builders.talks import publish_dataset, run_config
from tests.families.texts import asked

from zerotrain.data import dataset_folder
from zerotrain.data.conversation import TEXTS, Message, conversation
from zerotrain.evaluation.results import ANSWERS, Answer, read_answers
from zerotrain.evaluation.text import EvaluateSettings, _right_answer, measure_text
from zerotrain.models.families import load_family
from zerotrain.models.families.tokens import IGNORED

TALKS = [(f"{a}+1=", str(a + 1)) for a in range(8)]
TOO_LONG = ("how much is " * 20, "much")
"""A question that fills the 32 tokens of a row of a causal model."""


def measured(base: Path, folder: Path, talks, holdout: int, family="causal_lm", **evaluate):
    """What is measured of a base as if it had been trained, with the last talks held out."""
    config = run_config(family)
    changed = config.evaluate.model_copy(update=evaluate)
    dataset = publish_dataset(folder / "data", talks, holdout=holdout)
    settings = EvaluateSettings.of(config.model_copy(update={"evaluate": changed}), "one")
    return measure_text(settings, dataset, base, "cpu")


@pytest.fixture
def known(monkeypatch) -> None:
    """Answers that a model would have learned, with one mistake."""
    answers = dict(TALKS) | {"7+1=": "wrong"}

    def generate(self, weights, prompts, config, *, max_length, device):
        return [answers.get(messages[-1].content, "?") for messages in prompts]

    for name in ("causal_lm", "seq2seq_lm"):
        monkeypatch.setattr(type(load_family(name)), "generate", generate)


def loss_of(family: str, base: Path, talks) -> float:
    """The library's own cross entropy of answers, each token counted once."""
    chosen = load_family(family)
    model, tokenizer = chosen.load_model(base).eval(), chosen.load_tokenizer(base)
    total, count = 0.0, 0
    for question, answer in talks:
        tokens = chosen.tokenise(tokenizer, asked(question, answer).messages, 32)
        ids, labels = torch.tensor([tokens.input_ids]), torch.tensor([tokens.labels])
        with torch.inference_mode():
            loss = float(model(input_ids=ids, labels=labels).loss)
        learned = int((labels != IGNORED).sum())
        total, count = total + loss * learned, count + learned
    return total / count


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("batch_size", [2, 8])
@pytest.mark.parametrize("family", ["causal_lm", "seq2seq_lm"])
def test_what_is_held_out_is_answered_and_measured(bases, tmp_path, family, batch_size):
    """Exact match counts answers, spaces around them aside, perplexity every learned token once;
    prompts are answered too."""
    held_out = [("5+1=", "6"), ("6+1=", " 7\n"), ("7+1=", "8")]
    made = measured(
        bases[family], tmp_path, [*TALKS[:5], *held_out], 3, family,
        prompts=["9+9="], batch_size=batch_size,
    )  # fmt: skip
    assert made.metrics["exact_match"] == pytest.approx(2 / 3)
    loss = loss_of(family, bases[family], held_out)
    assert made.metrics["val_loss"] == pytest.approx(loss, abs=1e-5)
    assert made.metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)

    made.write(tmp_path)
    found = read_answers(tmp_path / ANSWERS)
    assert found[0] == Answer("9+9=", None, "?")
    assert sorted(found[1:], key=lambda answer: answer.prompt) == [
        Answer("5+1=", "6", "6"), Answer("6+1=", "7", "7"), Answer("7+1=", "8", "wrong")
    ]  # fmt: skip
    assert made.prompts == [answer.prompt for answer in found]


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_both_numbers_are_of_the_same_examples(bases, tmp_path, most):
    """Of max_samples at most, without what has no room for an answer; a larger number adds some."""
    made = measured(bases["causal_lm"], tmp_path, [*TALKS, TOO_LONG], 4, max_samples=most)
    first = measured(bases["causal_lm"], tmp_path, [*TALKS, TOO_LONG], 4, max_samples=1)
    assert len(made.prompts) == min(most, 3)
    assert set(first.prompts) <= set(made.prompts) <= {"5+1=", "6+1=", "7+1="}
    right = len(made.prompts) - ("7+1=" in made.prompts)
    assert made.metrics["exact_match"] == pytest.approx(right / len(made.prompts))
    loss = loss_of("causal_lm", bases["causal_lm"], [t for t in TALKS if t[0] in made.prompts])
    assert made.metrics["val_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("held_out", [[], [TOO_LONG]], ids=["none", "none that fits"])
def test_without_held_out_examples_training_questions_are_shown(bases, tmp_path, held_out):
    """And nothing is measured of them."""
    made = measured(
        bases["causal_lm"], tmp_path, [*TALKS, *held_out], len(held_out), max_new_tokens=2
    )
    assert set(made.metrics.values()) == {None}
    assert made.prompts == [question for question, _ in TALKS]


@pytest.mark.usefixtures("known")
def test_trained_examples_are_measured_where_the_run_says_so(bases, tmp_path):
    """As PEFT's guide prints its accuracy; their loss is no validation loss."""
    made = measured(bases["causal_lm"], tmp_path, TALKS, 0, split="train")
    assert made.metrics["exact_match"] == 7 / 8
    assert sorted(made.prompts) == [question for question, _ in TALKS]
    loss = loss_of("causal_lm", bases["causal_lm"], TALKS)
    assert made.metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert made.metrics["val_loss"] is None


@pytest.mark.usefixtures("known")
def test_the_prompt_to_try_is_the_last_question_alone(bases, tmp_path):
    """The table shows all turns before the answer; a command takes one."""
    talk = [Message("system", "add"), *asked("1+1=", "2").messages, *asked("5+1=", "6").messages]
    dataset_folder.publish_dataset(
        tmp_path / "data", TEXTS, [conversation("line 1", talk, 0.0)], repeats=1
    )
    settings = EvaluateSettings.of(run_config(), "one")
    made = measure_text(settings, tmp_path / "data", bases["causal_lm"], "cpu")
    made.write(tmp_path)
    assert made.prompts == ["5+1="]
    assert read_answers(tmp_path / ANSWERS) == [Answer("add\n1+1=\n2\n5+1=", "6", "6")]


def test_a_right_answer_with_a_call_is_what_the_template_renders(bases):
    """Without the tokens that end it, as the generated one; a plain answer is its content."""
    tokenizer = load_family("causal_lm").load_tokenizer(bases["causal_lm"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    )
    function = {"name": "add", "arguments": {"x": 1}}
    keys = json.dumps({"tool_calls": [{"type": "function", "function": function}]})
    for answer, right in (
        (Message("assistant", "", keys), json.dumps(function)),
        (Message("assistant", " 3 "), "3"),
        (Message("assistant", "3", keys, learned=False), "3"),
    ):
        talk = conversation("line 1", [*asked("5+1=", "6").messages[:1], answer], 0.0)
        tokens = load_family("causal_lm").tokenise(tokenizer, talk.messages, 100)
        assert _right_answer(tokenizer, talk, tokens) == right
