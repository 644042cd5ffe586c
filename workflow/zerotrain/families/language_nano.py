"""What the small language models have in common: a seed, and a tokenizer of their dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
"""At most; small tasks need far fewer tokens."""
MAX_TOKENS = 512
PIECES = Regex(r"\d| ?\p{L}+| ?[^\s\d\p{L}]+|\s+")
"""Digits one by one, as Qwen2 has them: a model that calculates needs to see each."""
FEWEST = 50
"""Occurrences that make two pieces one token: rare words are spelled."""


def write_model(build: Callable[[Any], Any], tokenizer: Any, seed: int, out: Path) -> None:
    """Write what `build` makes of the tokenizer, and the tokenizer, as transformers loads them."""
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def train_tokenizer(conversations: Sequence[Conversation], *, seq2seq: bool) -> Any:
    """A byte-level BPE tokenizer whose merges come from the conversations.

    Every byte has a token, so that any later text can be encoded. For a seq2seq model each text
    ends with END, as T5's and BART's do.
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
        _texts(conversations),
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


def _texts(conversations: Sequence[Conversation]) -> Iterable[str]:
    return (message.content for one in conversations for message in one.messages)
