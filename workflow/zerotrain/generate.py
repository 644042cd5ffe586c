"""zerotrain generate: answers to a prompt, by exported weights of any format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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
    from zerotrain.formats.opening_text import open_language_model
    from zerotrain.machine.device import device_type

    family, model, tokenizer = open_language_model(weights, base, device_type())
    turns = [Message("system", system)] if system else []
    turns.append(Message("user", prompt))
    length = len(family.prompt(tokenizer, turns, sys.maxsize))
    room = min(max_new_tokens, _room(model.config, length))
    config = EvaluateConfig(max_new_tokens=room, batch_size=1)
    answers = []
    for which in range(seed, seed + number):
        torch.manual_seed(which)
        answers += family.answer(
            model, tokenizer, [turns], config, max_length=sys.maxsize, temperature=temperature
        )
    return answers


def _room(config: Any, length: int) -> int:
    """Tokens that the model has positions for after a prompt of this length; of a seq2seq model the
    answer has positions of its own.

    Raises:
        PipelineError: the prompt itself has more.
    """
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    left = most - (1 if config.is_encoder_decoder else length)
    if length > most or left < 1:
        raise PipelineError(
            f"the prompt has {length} tokens, and the model takes {most}", hint="shorten it"
        )
    return int(left)
