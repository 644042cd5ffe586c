"""What the weights of a phase answer: perplexity and exact match on held-out examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from zerotrain.cache import TokenCache, read_cache, stacked
from zerotrain.config import RunConfig
from zerotrain.data.conversation import Message, read_conversations
from zerotrain.evaluation.answers import ANSWERS, Answer, write_answers
from zerotrain.evaluation.measured import Measured
from zerotrain.families import TextFamily, load_family

MOST_ASKED = 10
"""Training examples that are asked where nothing is held out."""
BATCH = 8
IGNORED = -100


def measure_text(
    config: RunConfig, phase: str, dataset: Path, cache: Path, weights: Path, device: str
) -> Measured:
    """Answer prompts and held-out questions; measure perplexity and exact match.

    At most evaluate.max_samples held-out examples are taken: those whose digests come first, a
    random choice that stays.

    Args:
        config: The run's configuration.
        phase: The phase's name.
        dataset: Folder of the dataset.
        cache: Folder of the phase's cache.
        weights: Folder of the phase's weights.
        device: The device to compute on.
    """
    family = load_family(config.family)
    assert family.modality == "text"
    samples = read_conversations(dataset)
    held_out = sorted(samples.split("holdout"), key=lambda sample: sample.sha256)
    asked = held_out[: config.evaluate.max_samples] or samples.split("train")[:MOST_ASKED]
    own = [(Message("user", prompt),) for prompt in config.evaluate.prompts]
    questions: list[Sequence[Message]] = [*own, *(sample.messages[:-1] for sample in asked)]
    expected = [None] * len(own) + [sample.messages[-1].content.strip() for sample in asked]
    generated = family.generate(
        weights,
        questions,
        config.evaluate,
        max_length=config.phase(phase).train.max_length,
        device=device,
    )
    answers = [
        Answer("\n".join(message.content for message in question), right, answer)
        for question, right, answer in zip(questions, expected, generated, strict=True)
    ]
    metrics: dict[str, float | None] = {"exact_match": None, "perplexity": None, "val_loss": None}
    if held_out:
        judged = answers[len(own) :]
        metrics["exact_match"] = sum(a.generated == a.expected for a in judged) / len(judged)
        loss = _holdout_loss(config, family, cache, weights, device)
        metrics |= {"perplexity": math.exp(loss), "val_loss": loss}

    def write(folder: Path) -> None:
        write_answers(folder / ANSWERS, answers)

    return Measured(metrics, [answer.prompt for answer in answers], ANSWERS, write)


def _holdout_loss(
    config: RunConfig, family: TextFamily, cache: Path, weights: Path, device: str
) -> float:
    """Cross entropy over all learned tokens of held-out rows, each token counted once."""
    opened = read_cache(cache, verify=False)
    assert isinstance(opened, TokenCache)
    rows = [i for i, row in enumerate(opened.entries) if row.split == "holdout"]
    rows = sorted(rows, key=lambda i: (opened.entries[i].keys, i))[: config.evaluate.max_samples]
    model = family.load_trained(weights).to(device)
    objective = family.objective(weights)
    total, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(rows), BATCH):
            batch = stacked(
                [opened.sample(i) for i in rows[start : start + BATCH]], torch.device(device)
            )
            learned = (batch["labels"] != IGNORED).sum(dim=1)
            losses = objective.loss(model, batch).double()
            total += float((losses * learned).sum())
            count += int(learned.sum())
    return total / count
