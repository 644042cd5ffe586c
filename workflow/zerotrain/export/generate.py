"""zerotrain generate: answers to a prompt from exported weights of any format."""

from __future__ import annotations

import sys

from zerotrain.config.models import EvaluateConfig
from zerotrain.errors import PipelineError
from zerotrain.export.options import GenerateOptions


def generate(options: GenerateOptions) -> list[str]:
    """Answer a prompt; the answer of a seed does not depend on how many are made.

    Raises:
        PipelineError: the prompt is too long, or the weights cannot be opened.
    """
    import torch

    from zerotrain.data.conversation import PROMPT, Message
    from zerotrain.export.formats.opening_text import open_language_model
    from zerotrain.machine.device import device_type
    from zerotrain.models.families.answering import answer
    from zerotrain.models.families.positions import longest_prompt

    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if options.number == 1 else 1.0
    family, model, tokenizer = open_language_model(options.weights, options.base, device_type())
    turns = [Message("system", options.system)] if options.system else []
    turns.append(Message(PROMPT if options.raw else "user", options.prompt))
    length, most = len(family.prompt(tokenizer, turns, sys.maxsize)), longest_prompt(model)
    if length > most:
        raise PipelineError(
            f"the prompt has {length} tokens, and the model has positions for {most}",
            hint="shorten it",
        )
    config = EvaluateConfig(max_new_tokens=options.max_new_tokens, batch_size=1)
    answers = []
    for seed in range(options.seed, options.seed + options.number):
        torch.manual_seed(seed)
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
