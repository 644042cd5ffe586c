"""Small language models, built from a class, a seed, and a tokenizer of the dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

if TYPE_CHECKING:
    from zerotrain.data.conversation import Conversation

PADDING, START, END = "<pad>", "<s>", "</s>"
VOCABULARY = 1024
"""The maximum; small tasks need far fewer tokens."""
MAX_TOKENS = 512
PIECES = Regex(r"\d| ?\p{L}+| ?[^\s\d\p{L}]+|\s+")
"""Each digit is a piece, as in Qwen2: a model that calculates needs to see each."""
FEWEST = 50
"""Minimum of occurrences for merging two pieces: rare words are spelled."""


@dataclass(frozen=True)
class SmallLanguageModel:
    """The small models of a family: a real class, with random weights from a seed.

    Attributes:
        model: The class of the model in transformers.
        config: Returns its configuration for a tokenizer and a preset.
        seq2seq: Whether it is an encoder and decoder.
    """

    model: Any
    config: Callable[[Any, str], Any]
    seq2seq: bool

    def build(
        self,
        conversations: Sequence[Conversation],
        seed: int,
        out: Path,
        *,
        preset: str = "nano",
    ) -> None:
        """Write model and tokenizer into `out`; equal arguments give equal files."""
        logging.disable_progress_bar()
        tokenizer = train_tokenizer(conversations, seq2seq=self.seq2seq)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model(self.config(tokenizer, preset))
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def train_tokenizer(conversations: Sequence[Conversation], *, seq2seq: bool) -> Any:
    """Train a byte-level BPE tokenizer on the conversations.

    Every byte has a token, so that any later text can be encoded. For a seq2seq model, each text
    ends with END, as with T5 and BART.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(
        (message.content for one in conversations for message in one.messages),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            min_frequency=FEWEST,
            special_tokens=[PADDING, START, END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    if seq2seq:
        trained.post_processor = processors.TemplateProcessing(
            single=f"$A {END}", special_tokens=[(END, trained.token_to_id(END))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        pad_token=PADDING,
        bos_token=START,
        eos_token=END,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
