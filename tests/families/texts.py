"""Small language models of both families, and a batch for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from zerotrain.data.conversation import Conversation, Message, conversation
from zerotrain.models.families import load_family
from zerotrain.models.families.language import LanguageFamily
from zerotrain.models.families.nano import build_language_model, train_byte_tokenizer

LORA = {"causal_lm": ("q_proj", "down_proj"), "seq2seq_lm": ("q", "wo")}
"""Layers that get an adapter."""


def asked(question: str, answer: str) -> Conversation:
    """A question with its answer."""
    return conversation("test", [Message("user", question), Message("assistant", answer)], 0.0)


SUMS = [asked(f"{a}+{b}=", str(a + b)) for a in range(4) for b in range(4)]


def build(name: str, folder: Path) -> Path:
    """A nano model of that family."""
    build_language_model(load_family(name), SUMS, 0, folder)
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


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def config_of(kind: str, ids: dict[str, Any]) -> Any:
    """A small model's configuration; only the names of the widths differ between classes."""
    if kind == "llama":
        return transformers.LlamaConfig(
            **SIZES, intermediate_size=64, num_key_value_heads=2, rope_theta=1e6, **ids
        )
    if kind == "gpt2":
        return transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **ids)
    if kind == "bloom":
        return transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **ids)
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder")
              for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    return transformers.BartConfig(
        d_model=32, **layers, max_position_embeddings=64, dropout=0.0, forced_eos_token_id=None,
        decoder_start_token_id=ids["eos_token_id"], **ids,
    )  # fmt: skip


def build_class(kind: str, folder: Path, steps: int = 30, **changes: Any) -> Path:
    """Model and tokenizer as their library saves them, taught so many steps."""
    seq2seq = kind == "bart"
    tokenizer = train_byte_tokenizer(SUMS, seq2seq=seq2seq)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names} | {"vocab_size": len(tokenizer)}
    auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config_of(kind, ids | changes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    taught(family_of(kind), model, folder, steps)
    model.save_pretrained(folder)
    return folder


def family_of(kind: str) -> LanguageFamily:
    return load_family("seq2seq_lm" if kind == "bart" else "causal_lm")  # type: ignore[return-value]


def taught(family: LanguageFamily, model: Any, base: Path, steps: int = 2) -> list[float]:
    """The losses of steps on one batch."""
    given, objective = batch(family.name, base), family.objective(base)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = objective.loss(model.train(), given).mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses
