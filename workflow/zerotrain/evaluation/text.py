"""What the weights of a phase answer: perplexity and exact match on held-out examples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from zerotrain.config import RunConfig
from zerotrain.data.conversation import Message, read_conversations
from zerotrain.evaluation.answers import ANSWERS, Answer, write_answers
from zerotrain.evaluation.holdout_loss import holdout_loss, perplexity, whole_example
from zerotrain.evaluation.measured import Measured
from zerotrain.families import TextFamily, Tokens, load_family

MOST_ASKED = 10
"""Training examples that are asked where nothing is held out."""


def measure_text(
    config: RunConfig, phase: str, dataset: Path, weights: Path, device: str
) -> Measured:
    """Answer prompts and held-out questions; measure perplexity and exact match.

    At most evaluate.max_samples held-out examples are taken, of those that train.max_length leaves
    an answer of: those whose digests come first, a random choice that stays.

    Args:
        config: The run's configuration.
        phase: The phase's name.
        dataset: Folder of the dataset.
        weights: Folder of the phase's weights.
        device: The device to compute on.
    """
    family = load_family(config.family)
    assert family.modality == "text"
    max_length = config.phase(phase).train.max_length
    tokenizer = family.load_tokenizer(weights)
    samples = read_conversations(dataset)
    held_out = (
        (sample, tokens)
        for sample in sorted(samples.split("holdout"), key=lambda sample: sample.sha256)
        if (tokens := family.tokenise(tokenizer, sample.messages, max_length))
    )
    taken = list(islice(held_out, config.evaluate.max_samples))
    asked = [sample for sample, _ in taken] or samples.split("train")[:MOST_ASKED]
    own = [(Message("user", prompt),) for prompt in config.evaluate.prompts]
    questions: list[Sequence[Message]] = [*own, *(sample.messages[:-1] for sample in asked)]
    expected = [None] * len(own) + [sample.messages[-1].content.strip() for sample in asked]
    generated = family.generate(
        weights, questions, config.evaluate, max_length=max_length, device=device
    )
    answers = [
        Answer("\n".join(message.content for message in question), right, answer)
        for question, right, answer in zip(questions, expected, generated, strict=True)
    ]
    metrics: dict[str, float | None] = {"exact_match": None, "perplexity": None, "val_loss": None}
    if taken:
        judged = answers[len(own) :]
        metrics["exact_match"] = sum(a.generated == a.expected for a in judged) / len(judged)
        rows = [tokens for _, tokens in taken]
        loss = _mean_loss(family, weights, rows, config.evaluate.batch_size, device)
        metrics |= {"perplexity": perplexity(loss), "val_loss": loss}

    def write(folder: Path) -> None:
        write_answers(folder / ANSWERS, answers)

    return Measured(metrics, [question[-1].content for question in questions], ANSWERS, write)


def _mean_loss(
    family: TextFamily, weights: Path, rows: Sequence[Tokens], batch_size: int, device: str
) -> float:
    """Cross entropy over all learned tokens, each counted once, of the weights as they answer."""
    samples = [whole_example(torch.tensor(row.input_ids), torch.tensor(row.labels)) for row in rows]
    return holdout_loss(
        family.load_for_answers(weights, device),
        family.objective(weights),
        samples,
        torch.device(device),
        batch_size,
    )
