"""The family of causal language models: any that AutoModelForCausalLM loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.config.families import FAMILIES
from zerotrain.models.families.language import LanguageFamily, answer_loss, attention
from zerotrain.models.families.small_models import (
    LAYERS,
    MAX_ROW,
    WIDTH,
    Arguments,
    SmallLanguageModel,
)
from zerotrain.models.families.tokens import (
    REASONING,
    causal_prompt,
    causal_tokens,
    takes_reasoning,
)

if TYPE_CHECKING:
    from zerotrain.data.conversation import Message
    from zerotrain.models.families import Batch, Tokens


class CausalObjective:
    """The objective that predicts each token of an answer from all tokens before it."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the mean cross entropy of each row's learned tokens, float32 [B]."""
        output = model(input_ids=batch["input_ids"], **attention(batch), use_cache=False)
        # A trained prompt precedes the row and has its own logits.
        length = batch["labels"].shape[1]
        return answer_loss(output.logits[:, -length:-1], batch["labels"][:, 1:])


def small_arguments(tokenizer: Any, preset: str) -> Arguments:
    """Return the values of a small Qwen2, its head tied as in the series' small models.

    The models have 0.2 and 1.9 million parameters.
    """
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH[preset],
        "intermediate_size": 4 * WIDTH[preset],
        "num_hidden_layers": LAYERS[preset],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_ROW,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


class CausalLm(LanguageFamily):
    """The family of causal language models."""

    small = SmallLanguageModel("Qwen2ForCausalLM", small_arguments)

    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> CausalObjective:
        """Build the cross entropy of the answers."""
        return CausalObjective()

    def tokenise(
        self, tokenizer: Any, messages: Sequence[Message], max_length: int
    ) -> Tokens | None:
        """Tokenise a conversation whose answers are learned; see families.tokens."""
        return causal_tokens(tokenizer, messages, max_length)

    def unused_keys(self, tokenizer: Any) -> tuple[str, ...]:
        """List the optional keys of turns that the tokenizer's chat template does not take."""
        return () if takes_reasoning(tokenizer) else (REASONING,)

    def prompt(self, tokenizer: Any, messages: Sequence[Message], max_length: int) -> list[int]:
        """Return the tokens before the answer, cut at the start if there are too many."""
        return causal_prompt(tokenizer, messages)[-max_length:]

    def answers(self, generated: torch.Tensor, prompt_length: int) -> torch.Tensor:
        """Return the tokens after the prompts."""
        return generated[:, prompt_length:]


FAMILY = CausalLm(FAMILIES["causal_lm"])
