"""Small language models of both families, and a batch for each."""

from __future__ import annotations

from pathlib import Path

import torch

from zerotrain.data.conversation import Conversation, Message, conversation
from zerotrain.models.families import causal_lm_nano, load_family, seq2seq_lm_nano

SMALL = {"causal_lm": causal_lm_nano.SMALL, "seq2seq_lm": seq2seq_lm_nano.SMALL}
LORA = {"causal_lm": ("q_proj", "down_proj"), "seq2seq_lm": ("q", "wo")}
"""Layers that get an adapter."""


def asked(question: str, answer: str) -> Conversation:
    """A question with its answer."""
    return conversation("test", [Message("user", question), Message("assistant", answer)], 0.0)


SUMS = [asked(f"{a}+{b}=", str(a + b)) for a in range(4) for b in range(4)]


def build(name: str, folder: Path) -> Path:
    """A nano model of that family."""
    SMALL[name].build(SUMS, 0, folder)
    return folder


def batch(name: str, base: Path) -> dict[str, torch.Tensor]:
    """Two examples of different lengths, filled up."""
    family = load_family(name)
    tokenizer = family.load_tokenizer(base)
    rows = [
        family.tokenise(tokenizer, asked(question, answer).messages, 32)
        for question, answer in (("1+2=", "3"), ("what is 2+3=", "it is 5"))
    ]

    def filled(values: list[list[int]], filler: int) -> torch.Tensor:
        longest = max(map(len, values))
        return torch.tensor([row + [filler] * (longest - len(row)) for row in values])

    return {
        "input_ids": filled([row.input_ids for row in rows], 0),
        "attention_mask": filled([[1] * len(row.input_ids) for row in rows], 0),
        "labels": filled([row.labels for row in rows], -100),
    }


def logits(model: torch.nn.Module, given: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What the model says of a batch, in eval mode."""
    own = {"labels": given["labels"]} if name == "seq2seq_lm" else {}
    with torch.inference_mode():
        return model.eval()(
            input_ids=given["input_ids"], attention_mask=given["attention_mask"], **own
        ).logits
