"""What the families of text have in common: a language model of transformers in one folder."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from accelerate import init_empty_weights
from transformers.initialization import no_init_weights

from zerotrain.artifact import file_sha256, write_json
from zerotrain.errors import PipelineError
from zerotrain.families import ROOT, adapters
from zerotrain.families.answering import answer, name_ends
from zerotrain.families.model_tensors import ModelTensors, tensor_sources, write_model
from zerotrain.families.tokens import IGNORED

if TYPE_CHECKING:
    from zerotrain.config import EvaluateConfig
    from zerotrain.data.conversation import Conversations, Message
    from zerotrain.families import Batch, Objective, Tokens

WEIGHTS = "model"
CONFIG = "config.json"


class LanguageFamily(ABC):
    """A family of transformers' language models; see zerotrain.families.TextFamily."""

    name: str
    modality: Literal["text"] = "text"
    parts: tuple[str, ...] = (ROOT,)
    optional_parts: tuple[str, ...] = ()
    encoding_code: tuple[str, ...] = ("zerotrain.families.tokens",)
    classes: Mapping[str, str]
    trained_part: str = ROOT

    @abstractmethod
    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> Objective:
        """Cross entropy of the answers; no settings are known."""

    @abstractmethod
    def tokenise(
        self, tokenizer: Any, messages: Sequence[Message], max_length: int
    ) -> Tokens | None:
        """What is learned of a conversation; None if nothing of an answer is left of it."""

    @abstractmethod
    def prompt(self, tokenizer: Any, messages: Sequence[Message], max_length: int) -> list[int]:
        """The tokens that an answer to the messages follows."""

    @abstractmethod
    def answers(self, generated: torch.Tensor, prompt_length: int) -> torch.Tensor:
        """What is new in generated tokens [B, T]."""

    def build_preset(self, preset: str, dataset: Conversations, seed: int, out: Path) -> None:
        """Build the preset into `out`, with a tokenizer of the dataset's text."""
        nano = importlib.import_module(f"zerotrain.families.{self.name}_nano")
        nano.build_nano(dataset.split("train"), seed, out, preset=preset)

    def load_tokenizer(self, base: Path) -> Any:
        """The tokenizer of a base model or weights folder.

        Raises:
            PipelineError: it has no token that ends an answer.
        """
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        if tokenizer.eos_token_id is None:
            raise PipelineError(
                f"{base}: its tokenizer has no eos_token, so that an answer would never end",
                hint="name one in tokenizer_config.json, one that the vocabulary holds",
            )
        return tokenizer

    def load_model(self, base: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Load the model on CPU, in float32 if no type is given; a folder's adapter with it."""
        transformers.utils.logging.disable_progress_bar()
        model: torch.nn.Module = self._auto().from_pretrained(
            base, dtype=dtype or torch.float32, use_safetensors=True
        )
        return model

    def empty_model(self, base: Path) -> torch.nn.Module:
        """The model that config.json describes; its parameters on the meta device.

        Buffers (rotary frequencies, masks) are computed, since files do not hold them.
        """
        config = transformers.AutoConfig.from_pretrained(base)
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model: torch.nn.Module = self._auto().from_config(config, dtype=torch.float32)
        # Parameters were moved one by one, which cut their ties.
        model.tie_weights()  # type: ignore[operator]
        untie_head(model, config.to_dict())
        return model

    def load_trained(self, weights: Path) -> torch.nn.Module:
        """Load a weights folder in float32 on CPU, with the folder's adapter."""
        return adapters.apply(self.load_model(weights).eval(), weights)

    def save_model(
        self,
        base: Path,
        shapes: Mapping[str, list[int]],
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        out: Path,
        *,
        frozen: Callable[[str], bool] = lambda name: False,
        max_shard_size: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Write the tensors, and config.json where it names another type; see Family."""
        model = self.empty_model(base)
        sources = tensor_sources(model, shapes, frozen, base / CONFIG)
        held = ModelTensors(base, sources, read)
        out.mkdir(parents=True, exist_ok=True)
        written = write_model(
            model, held.tensor, dtype, out, WEIGHTS,
            max_shard_size=max_shard_size, metadata=metadata,
        )  # fmt: skip
        return written | _name_type(base / CONFIG, dtype, out / CONFIG)

    def generate(
        self,
        weights: Path,
        prompts: Sequence[Sequence[Message]],
        config: EvaluateConfig,
        *,
        max_length: int,
        device: str,
    ) -> list[str]:
        """The likeliest answer to each prompt, token by token (greedy)."""
        model = self.load_for_answers(weights, device)
        tokenizer = self.load_tokenizer(weights)
        return answer(self, model, tokenizer, prompts, config, max_length=max_length)

    def load_for_answers(self, weights: Path, device: str) -> torch.nn.Module:
        """Load a folder, with its adapter, onto a device; float32 on a CPU, else bfloat16."""
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        loaded = self.load_model(weights, dtype).eval()
        return adapters.apply(loaded, weights).to(device)

    def name_ends(self, folder: Path) -> dict[str, str]:
        """Have other programs end an answer where the folder's chat template does."""
        return name_ends(folder)

    def _auto(self) -> Any:
        return getattr(transformers, self.classes[ROOT])


def answer_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each sample, averaged over its label tokens.

    Args:
        logits: [B, T, V] in any type.
        labels: int64 [B, T], the token at each place; IGNORED where none is learned.

    Returns:
        float32 [B].
    """
    learned = labels != IGNORED
    # Only what is learned becomes float32: of long prompts with a large vocabulary that is little.
    each = torch.nn.functional.cross_entropy(
        logits[learned].float(), labels[learned], reduction="none"
    )
    rows = learned.nonzero()[:, 0]
    total = torch.zeros(len(labels), device=each.device).index_add(0, rows, each)
    return total / learned.sum(dim=1)


def attention(batch: Batch) -> dict[str, torch.Tensor]:
    """The batch's attention_mask, or the position_ids that keep packed examples apart."""
    names = ("attention_mask", "position_ids")
    return {name: batch[name] for name in names if name in batch}


def untie_head(model: Any, config: Mapping[str, Any]) -> None:
    """Give a T5's head weights of its own where its file has them.

    The class ties always; loading finds two different tensors in the file and keeps both.
    """
    if config.get("tie_word_embeddings") is False and getattr(model, "lm_head", None) is not None:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))


def _name_type(base: Path, dtype: torch.dtype, path: Path) -> dict[str, str]:
    """Write config.json anew where it names another type: from_pretrained loads in that type.

    Returns:
        Its sha256 by name, if it was written.
    """
    config = json.loads(base.read_text())
    key, named = "torch_dtype" if "torch_dtype" in config else "dtype", str(dtype).split(".")[-1]
    if config.get(key) == named:
        return {}
    path.unlink(missing_ok=True)  # it may be the base's own file under a second name
    write_json(path, config | {key: named})
    return {path.name: file_sha256(path)}
