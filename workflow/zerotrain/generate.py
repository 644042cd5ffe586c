"""zerotrain generate: answers to a prompt, by exported weights of any format."""

from __future__ import annotations

import sys
from pathlib import Path

from zerotrain.config import EvaluateConfig
from zerotrain.errors import PipelineError


def generate(
    weights: Path,
    prompt: str,
    *,
    number: int,
    seed: int,
    temperature: float | None,
    max_new_tokens: int,
    system: str | None,
    base: Path | None,
) -> list[str]:
    """Answer a prompt; the answer of a seed is the same however many are made.

    Args:
        weights: Exported weights: see zerotrain.formats.opening_text.open_language_model.
        prompt: What is asked.
        number: Answers to make, of seed, seed + 1, and so on.
        seed: Seed of the first.
        temperature: 0 gives the likeliest answer; default: 0 for one answer, 1 for several.
        max_new_tokens: Longest answer, in tokens.
        system: What stands before the question as the system's turn.
        base: The base model, where `weights` is a part of one.

    Raises:
        PipelineError: a number is none that can be, the prompt is too long, or the weights cannot
            be opened.
    """
    for option, value, least in (
        ("-n", number, 1),
        ("--max-new-tokens", max_new_tokens, 1),
        ("--seed", seed, 0),
        ("--temperature", temperature or 0, 0),
    ):
        if value < least:
            raise PipelineError(f"{option}: {value} is too small", hint=f"{least} or more")
    if temperature is None:
        temperature = 0.0 if number == 1 else 1.0
    if number > 1 and not temperature:
        raise PipelineError(
            f"-n: {number}, and with --temperature 0 all answers are the same",
            hint="leave --temperature away, or set it above 0",
        )
    import torch

    from zerotrain.data.conversation import Message
    from zerotrain.families.answering import answer
    from zerotrain.families.positions import longest_prompt
    from zerotrain.formats.opening_text import open_language_model
    from zerotrain.machine.device import device_type

    family, model, tokenizer = open_language_model(weights, base, device_type())
    turns = [Message("system", system)] if system else []
    turns.append(Message("user", prompt))
    length, most = len(family.prompt(tokenizer, turns, sys.maxsize)), longest_prompt(model)
    if length > most:
        raise PipelineError(
            f"the prompt has {length} tokens, and the model has positions for {most}",
            hint="shorten it",
        )
    config = EvaluateConfig(max_new_tokens=max_new_tokens, batch_size=1)
    answers = []
    for which in range(seed, seed + number):
        torch.manual_seed(which)
        answers += answer(
            family,
            model,
            tokenizer,
            [turns],
            config,
            max_length=sys.maxsize,
            temperature=temperature,
        )
    return answers
