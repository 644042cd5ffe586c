"""The base class of text families, a language model of transformers in one folder; its answers."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights

from zerotrain.artifact import file_sha256, write_json
from zerotrain.artifact.tensor_file import open_tensors
from zerotrain.config.families import ROOT
from zerotrain.errors import PipelineError
from zerotrain.machine.progress_bar import progress
from zerotrain.models.families.model_family import CONFIG, ModelFamily
from zerotrain.models.families.model_tensors import stored_tensors, write_model
from zerotrain.models.families.positions import longest_prompt, positions
from zerotrain.models.families.tokens import IGNORED, REASONING, answer_start, decode, end_tokens
from zerotrain.models.pretrained import from_config, from_pretrained, read_config

if TYPE_CHECKING:
    from zerotrain.config.models import EvaluateConfig
    from zerotrain.data.conversation import Conversations, Message
    from zerotrain.models.families import Batch, Tokens
    from zerotrain.models.families.small_models import SmallLanguageModel


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


class LanguageFamily(ModelFamily):
    """A family of transformers' language models."""

    modality: Literal["text"] = "text"
    """What it generates."""
    weights_name = "model"
    small: SmallLanguageModel
    """Its small models, unless it overrides build_preset."""

    @abstractmethod
    def tokenise(
        self, tokenizer: Any, messages: Sequence[Message], max_length: int
    ) -> Tokens | None:
        """Tokenise a conversation; return None if no part of an answer is left."""

    def unused_keys(self, tokenizer: Any) -> tuple[str, ...]:
        """List the optional keys of turns that the tokenizer's text does not show."""
        return (REASONING,)

    @abstractmethod
    def prompt(self, tokenizer: Any, messages: Sequence[Message], max_length: int) -> list[int]:
        """Return the tokens that precede an answer to the messages."""

    @abstractmethod
    def answers(self, generated: torch.Tensor, prompt_length: int) -> torch.Tensor:
        """Return the new tokens among generated ones [B, T]."""

    def build_preset(self, preset: str, dataset: Conversations, seed: int, out: Path) -> None:
        """Build a small base model and its tokenizer from a seed, into the folder `out`."""
        from zerotrain.models.families.nano import build_language_model  # slow to import

        build_language_model(self, dataset.split("train"), seed, out, preset=preset)

    def load_tokenizer(self, base: Path) -> Any:
        """Load the tokenizer of a base model or weights folder.

        Raises:
            PipelineError: it has no token that ends an answer.
        """
        tokenizer = from_pretrained(transformers.AutoTokenizer, base)
        if tokenizer.eos_token_id is None:
            raise PipelineError(
                f"{base}: its tokenizer has no eos_token, so that an answer would never end",
                hint="name one in tokenizer_config.json, one that the vocabulary holds",
            )
        return tokenizer

    def load_model(self, base: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Load the model on CPU, in float32 if no type is given, with the folder's LoRA."""
        transformers.utils.logging.disable_progress_bar()
        model: torch.nn.Module = from_pretrained(
            self._auto(), base, dtype=dtype or torch.float32, use_safetensors=True
        )
        return model

    def empty_model(self, base: Path) -> torch.nn.Module:
        """Build the model that config.json describes, its parameters on the meta device.

        Buffers (rotary frequencies, masks) are computed, since no file holds them.
        """
        config = from_pretrained(transformers.AutoConfig, base)
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model: torch.nn.Module = from_config(self._auto(), config, dtype=torch.float32)
        # Parameters were moved one by one, which separated tied ones.
        model.tie_weights()  # type: ignore[operator]
        untie_head(model, config.to_dict())
        return model

    def generate(
        self,
        weights: Path,
        prompts: Sequence[Sequence[Message]],
        config: EvaluateConfig,
        *,
        max_length: int,
        device: str,
    ) -> list[str]:
        """Generate the likeliest answer to each prompt, token by token (greedy)."""
        model = self.load_for_answers(weights, device)
        tokenizer = self.load_tokenizer(weights)
        return answer(self, model, tokenizer, prompts, config, max_length=max_length)

    def load_for_answers(self, weights: Path, device: str) -> torch.nn.Module:
        """Load a folder, with its adapter, onto a device: in float32 on a CPU, else in bfloat16."""
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        return self.load_trained(weights, dtype).to(device)

    def name_ends(self, folder: Path) -> dict[str, str]:
        """Write the tokens that end an answer into a weights folder, for other programs.

        Returns:
            sha256 of each file that was written, by name.
        """
        return name_ends(folder)

    def write_config(self, config: Path, dtype: torch.dtype, folder: Path) -> dict[str, str]:
        """Write config.json if it names another type: from_pretrained loads in the named type."""
        content = read_config(config)
        key = "torch_dtype" if "torch_dtype" in content else "dtype"
        named = str(dtype).split(".")[-1]
        if content.get(key) == named:
            return {}
        path = folder / CONFIG
        path.unlink(missing_ok=True)  # it may be a link to the base's own file
        write_json(path, content | {key: named})
        return {CONFIG: file_sha256(path)}

    def store_by_own_names(self, folder: Path, source: str) -> None:
        """Rewrite a model's files unless they name its tensors as its class does.

        A model that was saved without its head can be loaded, but its names lack the class's
        prefix, and buffers of the head are missing.

        Args:
            folder: Folder of the model; files are replaced, never written to: they may be links.
            source: Name of the model in messages.

        Raises:
            PipelineError: a weight is missing, which loading would draw at random.
        """
        files = sorted(folder.glob("model*.safetensors*"))  # also their index
        held = open_tensors(path for path in files if path.suffix == ".safetensors")
        if stored_tensors(self.empty_model(folder)).keys() <= held.keys():
            return
        types = (held[name].get_tensor(name).dtype for name in held)
        dtype = functools.reduce(torch.promote_types, types)
        model, found = from_pretrained(
            self._auto(), folder, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
        parameters = dict(model.named_parameters())
        if missing := sorted(found["missing_keys"] & parameters.keys()):
            raise PipelineError(
                f"{source}: no tensor {missing[0]}, which the model's config.json asks for",
                hint="complete the folder, or download the model again",
            )
        for path in files:
            path.unlink()
        write_model(model, model.state_dict().__getitem__, dtype, folder, self.weights_name)

    def _auto(self) -> Any:
        return getattr(transformers, self.spec.classes[ROOT])


def answer_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy of each sample, averaged over its label tokens.

    Args:
        logits: [B, T, V] in any type.
        labels: int64 [B, T], the token at each position; IGNORED where none is learned.

    Returns:
        float32 [B].
    """
    learned = labels != IGNORED
    # Only learned positions become float32: with long prompts, that is a small part of the logits.
    each = torch.nn.functional.cross_entropy(
        logits[learned].float(), labels[learned], reduction="none"
    )
    rows = learned.nonzero()[:, 0]
    total = torch.zeros(len(labels), device=each.device).index_add(0, rows, each)
    return total / learned.sum(dim=1)


def attention(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the batch's attention_mask, or the position_ids that keep packed examples apart."""
    names = ("attention_mask", "position_ids")
    return {name: batch[name] for name in names if name in batch}


def untie_head(model: Any, config: Mapping[str, Any]) -> None:
    """Give a T5's head its own weight, if config.json unties it.

    The class always ties it; loading finds two different tensors in the file and keeps both.
    """
    if config.get("tie_word_embeddings") is False and getattr(model, "lm_head", None) is not None:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
