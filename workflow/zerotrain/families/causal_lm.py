"""The family of causal language models: any that AutoModelForCausalLM loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.families import ROOT
from zerotrain.families.language import LanguageFamily, answer_loss, attention
from zerotrain.families.tokens import causal_prompt, causal_tokens

if TYPE_CHECKING:
    from zerotrain.data.conversation import Message
    from zerotrain.families import Batch, Tokens


class CausalObjective:
    """Each token of an answer is predicted from all before it."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross entropy of each row's learned tokens, float32 [B]."""
        output = model(input_ids=batch["input_ids"], **attention(batch), use_cache=False)
        # A trained prompt stands before the row, and has places of its own.
        length = batch["labels"].shape[1]
        return answer_loss(output.logits[:, -length:-1], batch["labels"][:, 1:])


class CausalLm(LanguageFamily):
    """The family's acts; see zerotrain.families.TextFamily."""

    name = "causal_lm"
    classes: Mapping[str, str] = {ROOT: "AutoModelForCausalLM"}

    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> CausalObjective:
        """Cross entropy of the answers."""
        return CausalObjective()

    def tokenise(
        self, tokenizer: Any, messages: Sequence[Message], max_length: int
    ) -> Tokens | None:
        """A conversation whose answers are learned; see zerotrain.families.tokens."""
        return causal_tokens(tokenizer, messages, max_length)

    def prompt(self, tokenizer: Any, messages: Sequence[Message], max_length: int) -> list[int]:
        """The end of what came before the answer: its beginning is cut where it is too long."""
        return causal_prompt(tokenizer, messages)[-max_length:]

    def answers(self, generated: torch.Tensor, prompt_length: int) -> torch.Tensor:
        """What follows the prompts."""
        return generated[:, prompt_length:]


FAMILY = CausalLm()
