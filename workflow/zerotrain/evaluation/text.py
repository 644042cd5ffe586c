"""Evaluation of a language model's weights: perplexity and exact match on one split."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.config.stage_settings import EvaluateSettings
from zerotrain.data.conversation import SYSTEM, Conversation, Message, read_conversations, turns_of
from zerotrain.data.text import question_of
from zerotrain.evaluation.results import ANSWERS, Answer, Measured, spread, write_answers
from zerotrain.models.families import Tokens, load_family
from zerotrain.models.families.tokens import IGNORED, answer_start, decode
from zerotrain.training.reporting.holdout_loss import (
    holdout_loss,
    perplexity,
    split_places,
    whole_example,
)

if TYPE_CHECKING:
    from zerotrain.models.families.language import LanguageFamily

MOST_ASKED = 10
"""Maximum of training examples whose questions are asked if nothing is held out."""


def measure_text(settings: EvaluateSettings, dataset: Path, weights: Path, device: str) -> Measured:
    """Answer prompts and the questions of evaluate.split; measure perplexity and exact match.

    val_loss is measured only on held-out examples. At most evaluate.max_samples are used, of those
    with an answer within train.max_length: the first by digest, which is a random but fixed choice.

    Args:
        settings: The settings of evaluate.
        dataset: Folder of the dataset.
        weights: Folder of the phase's weights.
        device: The device to compute on.
    """
    family = load_family(settings.family)
    assert family.modality == "text"
    max_length = settings.train.max_length
    tokenizer = family.load_tokenizer(weights)
    samples = read_conversations(dataset)
    measured = (
        (sample, tokens)
        for sample in sorted(samples.split(settings.evaluate.split), key=lambda one: one.sha256)
        if (tokens := family.tokenise(tokenizer, sample.messages, max_length))
    )
    taken = list(islice(measured, settings.evaluate.max_samples))
    asked = [sample for sample, _ in taken] or spread(samples.split("train"), MOST_ASKED)
    own = [(question_of(settings.data, prompt),) for prompt in settings.evaluate.prompts]
    questions: list[Sequence[Message]] = [*own, *(sample.messages[:-1] for sample in asked)]
    rows = {sample.sha256: tokens for sample, tokens in taken}
    expected = [
        *[None] * len(own),
        *(_right_answer(tokenizer, sample, rows.get(sample.sha256)) for sample in asked),
    ]
    generated = family.generate(
        weights, questions, settings.evaluate, max_length=max_length, device=device
    )
    answers = [
        Answer("\n".join(message.content for message in turns_of(question)), right, answer)
        for question, right, answer in zip(questions, expected, generated, strict=True)
    ]
    metrics: dict[str, float | None] = {"exact_match": None, "perplexity": None, "val_loss": None}
    if taken:
        judged = answers[len(own) :]
        metrics["exact_match"] = sum(a.generated == a.expected for a in judged) / len(judged)
        loss = _mean_loss(
            family, weights, [tokens for _, tokens in taken], settings.evaluate.batch_size, device
        )
        metrics["perplexity"] = perplexity(loss)
        metrics["val_loss"] = loss if settings.evaluate.split == "holdout" else None

    def write(folder: Path) -> None:
        write_answers(folder / ANSWERS, answers)

    prompts = [question[-1].content for question in questions]
    return Measured(metrics, prompts, ANSWERS, write, [_system(q) for q in questions])


def _right_answer(tokenizer: Any, sample: Conversation, tokens: Tokens | None) -> str:
    """Return the answer that is right; one with calls or a thought as the template renders it."""
    answer = sample.messages[-1]
    if not answer.keys or not answer.learned or tokens is None:
        return answer.content.strip()
    ids = [*takewhile(lambda label: label != IGNORED, reversed(tokens.labels))]
    text = decode(tokenizer, [ids[::-1]])[0]
    return text.strip().removeprefix(answer_start(tokenizer)).strip()


def _system(question: Sequence[Message]) -> str:
    """Return the system's turn at the start of a conversation; empty if it has none."""
    first = turns_of(question)[0]
    return first.content if first.role in SYSTEM else ""


def _mean_loss(
    family: LanguageFamily, weights: Path, rows: Sequence[Tokens], batch_size: int, device: str
) -> float:
    """Compute the mean cross entropy of all learned tokens, with weights loaded as for answers."""
    samples = [whole_example(torch.tensor(row.input_ids), torch.tensor(row.labels)) for row in rows]
    return holdout_loss(
        family.load_for_answers(weights, device),
        family.objective(weights),
        samples,
        torch.device(device),
        split_places(range(len(samples)), batch_size),
    )
