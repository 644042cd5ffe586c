"""The family of seq2seq language models (T5, BART): any that AutoModelForSeq2SeqLM loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from zerotrain.config.families import FAMILIES
from zerotrain.errors import PipelineError
from zerotrain.models.families.language import LanguageFamily, answer_loss, attention
from zerotrain.models.families.small_models import LAYERS, WIDTH, Arguments, SmallLanguageModel
from zerotrain.models.families.tokens import IGNORED, seq2seq_prompt, seq2seq_tokens
from zerotrain.models.pretrained import from_pretrained

if TYPE_CHECKING:
    from zerotrain.data.conversation import Message
    from zerotrain.models.families import Batch, Tokens


class Seq2SeqObjective:
    """The objective that predicts an answer's tokens from the source and the tokens before."""

    def __init__(self, start: int, padding: int) -> None:
        self.start = start
        self.padding = padding

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the mean cross entropy of each answer's tokens, float32 [B]."""
        output = model(
            input_ids=batch["input_ids"],
            decoder_input_ids=self.shifted(batch["labels"]),
            **attention(batch),
            use_cache=False,
        )
        return answer_loss(output.logits, batch["labels"])

    def shifted(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift labels [B, T] by one position, after the token that starts an answer."""
        moved = labels.roll(1, dims=1)
        moved[:, 0] = self.start
        return moved.masked_fill(moved == IGNORED, self.padding)


def small_arguments(tokenizer: Any, preset: str) -> Arguments:
    """Return the values of a small T5; as in the first T5, the head is tied.

    The models have 0.3 and 3.3 million parameters.
    """
    return {
        "vocab_size": len(tokenizer),
        "d_model": WIDTH[preset],
        "d_kv": WIDTH[preset] // 4,
        "d_ff": 4 * WIDTH[preset],
        "num_layers": LAYERS[preset],
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": tokenizer.pad_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


class Seq2SeqLm(LanguageFamily):
    """The family of seq2seq language models."""

    small = SmallLanguageModel("T5ForConditionalGeneration", small_arguments)

    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> Seq2SeqObjective:
        """Build the cross entropy of the answers.

        Raises:
            PipelineError: config.json does not name the token that starts an answer.
        """
        config = from_pretrained(transformers.AutoConfig, base)
        start = getattr(config, "decoder_start_token_id", None)
        if start is None:
            raise PipelineError(
                f"{base / 'config.json'}: no decoder_start_token_id, so that no answer can begin",
                hint="add it: T5 begins with its pad_token_id, BART with its eos_token_id",
            )
        padding = start if config.pad_token_id is None else config.pad_token_id
        return Seq2SeqObjective(start, padding)

    def tokenise(self, tokenizer: Any, messages: Sequence[Message], max_length: int) -> Tokens:
        """Tokenise a question and its answer; see families.tokens."""
        return seq2seq_tokens(tokenizer, messages, max_length)

    def prompt(self, tokenizer: Any, messages: Sequence[Message], max_length: int) -> list[int]:
        """Return the tokens that are read to answer the last question."""
        return seq2seq_prompt(tokenizer, messages, max_length)

    def answers(self, generated: torch.Tensor, prompt_length: int) -> torch.Tensor:
        """Return all tokens of the decoder."""
        return generated


FAMILY = Seq2SeqLm(FAMILIES["seq2seq_lm"])
