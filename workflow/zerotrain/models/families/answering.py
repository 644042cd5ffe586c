"""Answers of a language model: how they are generated, and which tokens end them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from zerotrain.artifact import file_sha256, write_json
from zerotrain.machine.progress_bar import progress
from zerotrain.models.families.positions import longest_prompt, positions
from zerotrain.models.families.tokens import answer_start, decode, end_tokens
from zerotrain.models.pretrained import from_pretrained, read_config

if TYPE_CHECKING:
    from zerotrain.config.models import EvaluateConfig
    from zerotrain.data.conversation import Message

GENERATION = "generation_config.json"


class Answering(Protocol):
    """The part of a language family that generating answers needs."""

    def prompt(self, tokenizer: Any, messages: Sequence[Message], max_length: int) -> list[int]:
        """Return the tokens that precede an answer to the messages."""

    def answers(self, generated: torch.Tensor, prompt_length: int) -> torch.Tensor:
        """Return the new tokens among generated ones [B, T]."""


def answer(
    family: Answering,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[Message]],
    config: EvaluateConfig,
    *,
    max_length: int,
    temperature: float = 0.0,
) -> list[str]:
    """Answer each prompt; prompts of similar length are batched.

    Answers end where the model's table of positions does, if it has one.

    Args:
        family: The model's family.
        model: The model, on its device.
        tokenizer: Its tokenizer.
        prompts: The turns before each answer.
        config: batch_size and max_new_tokens.
        max_length: Tokens that a prompt is cut to.
        temperature: With 0, each token is the likeliest one (greedy), and the model's generation
            config is replaced. Above 0, tokens are drawn with torch's generator, by the top_k,
            top_p and penalties of that config.
    """
    most = positions(model.config)
    max_length = min(max_length, longest_prompt(model))
    tokens = [family.prompt(tokenizer, messages, max_length) for messages in prompts]
    order = sorted(range(len(tokens)), key=lambda i: (len(tokens[i]), i))
    filler = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = {
        "eos_token_id": _ends(model.generation_config.eos_token_id, tokenizer),
        "pad_token_id": filler,
    }
    drawn = {"do_sample": True, "temperature": temperature, "num_beams": 1} if temperature else {}
    if not drawn:
        start = getattr(model.config, "decoder_start_token_id", None)
        model.generation_config = GenerationConfig(decoder_start_token_id=start)
    begin = answer_start(tokenizer)

    def answers() -> Iterator[tuple[int, str]]:
        for first in range(0, len(order), config.batch_size):
            chosen = order[first : first + config.batch_size]
            inputs = _left_padded([tokens[i] for i in chosen], filler, model.device)
            length = inputs["input_ids"].shape[1]
            room = most - (1 if model.config.is_encoder_decoder else length)
            with torch.inference_mode():
                generated = model.generate(
                    **inputs, max_new_tokens=min(config.max_new_tokens, room), **drawn, **ids
                )
            new = family.answers(generated, length)
            yield from zip(chosen, decode(tokenizer, new.tolist()), strict=True)

    found = dict(progress(answers(), len(prompts), "generating answers", "answer"))
    return [found[i].strip().removeprefix(begin).strip() for i in range(len(prompts))]


def name_ends(folder: Path) -> dict[str, str]:
    """Make other programs end an answer where the folder's chat template does.

    generation_config.json is rewritten if it does not name all tokens that may end an answer.

    Returns:
        Its sha256 by name, if it was written.
    """
    path = folder / GENERATION
    if path.is_file():
        config = read_config(path)
    else:
        config = GenerationConfig.from_model_config(from_pretrained(AutoConfig, folder)).to_dict()
    own = config.get("eos_token_id")
    ends = _ends(own, from_pretrained(AutoTokenizer, folder))
    if ends in (own, [own]):
        return {}
    path.unlink(missing_ok=True)  # it may be a link to the base's own file
    write_json(path, config | {"eos_token_id": ends})
    return {path.name: file_sha256(path)}


def _ends(own: int | list[int] | None, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer by a generation config, then those of the tokenizer."""
    known = own if isinstance(own, list) else [] if own is None else [own]
    return [*known, *sorted(end_tokens(tokenizer) - set(known))]


def _left_padded(
    rows: Sequence[list[int]], padding: int, device: torch.device
) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    filled = [[padding] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {
        "input_ids": torch.tensor(filled, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }
