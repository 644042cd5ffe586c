"""Prompts longer than a tokenizer takes: cut without a warning for each, counted, or in chunks.

A pipeline of diffusers tokenises every prompt a second time without a limit and logs what it cuts,
padded to the longest of the batch. `PromptTokenizer` replaces a tokenizer in a pipeline and returns
the first call's tokens for the second call.

`chunk` encodes a prompt in chunks of as many tokens as fit between the two special ones (75 for
CLIP), each with its own special tokens; the hidden states are concatenated, and the pooled
embedding is the first chunk's, as in AUTOMATIC1111's web UI and compel
(`truncate_long_prompts=False`, https://github.com/damian0815/compel/blob/main/doc/compel.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerotrain.models.families.tokenizer_process import call
from zerotrain.models.pretrained import loading

TRUNCATE, CHUNK = "truncate", "chunk"
"""Values of train.long_captions."""
AT_A_TIME = 64
"""Texts of a call."""
LETTERS_PER_TOKEN = 6
"""More than most texts have; if a text has more, more of it is read."""


class PromptTokenizer:
    """A tokenizer that gives a pipeline one chunk of each prompt, the first by default."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cut: tuple[Any, Any] | None = None
        self.chunk = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # in a copy without attributes yet
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return the tokens of the chunk, as the tokenizer does."""
        if self._cut and self._cut[0] == text and not options.get("truncation"):
            return self._cut[1]
        found = self._later_chunk(text) if self.chunk else self._first_chunk(text, options)
        self._cut = (text, found)
        return found

    def tokenize(self, text: str) -> list[str]:
        """Return the added tokens in a prompt: a pipeline looks for no others."""
        return [token for token in self._tokenizer.get_added_vocab() if token in text]

    def count(self, prompts: Sequence[str]) -> list[int]:
        """Count the tokens of each prompt, including special ones."""
        distinct = list(dict.fromkeys(prompts))
        counts = dict(zip(distinct, count_tokens(self._tokenizer, distinct), strict=True))
        return [counts[prompt] for prompt in prompts]

    def chunks(self, prompts: Sequence[str]) -> list[int]:
        """Count the chunks of each prompt; one for an empty prompt."""
        room = self._room()
        special = self._tokenizer.model_max_length - room
        return [max(1, -(-(count - special) // room)) for count in self.count(prompts)]

    def _room(self) -> int:
        return int(
            self._tokenizer.model_max_length - self._tokenizer.num_special_tokens_to_add(pair=False)
        )

    def _first_chunk(self, text: Any, options: dict[str, Any]) -> Any:
        """Tokenise texts as the tokenizer does, but read only as much of them as it keeps.

        The tokenizers of CLIP and T5, which pad to the limit, split at white space first: a text
        that is cut there has the same tokens as the start of the whole text.
        """
        if not isinstance(text, list) or options.get("padding") != "max_length":
            count_tokens(self._tokenizer, [text] if isinstance(text, str) else text)
            return self._tokenizer(text, **options)
        limit = options["max_length"]
        length = LETTERS_PER_TOKEN * limit
        while True:
            starts = [_words_within(one, length) for one in text]
            count_tokens(self._tokenizer, starts)
            found = self._tokenizer(starts, **options)
            kept = [int(sum(row)) for row in found.attention_mask]
            if all(
                count == limit or start == one
                for count, start, one in zip(kept, starts, text, strict=True)
            ):
                return found
            length *= 4

    def _later_chunk(self, prompts: Sequence[str]) -> Any:
        room, tokenizer = self._room(), self._tokenizer
        start = self.chunk * room
        count_tokens(tokenizer, prompts)
        whole = tokenizer(list(prompts), add_special_tokens=False, verbose=False).input_ids
        first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
        rows = [[first, *ids[start : start + room], last] for ids in whole]
        return tokenizer.pad(
            {"input_ids": rows},
            padding="max_length",
            max_length=tokenizer.model_max_length,
            return_tensors="pt",
        )


def count_tokens(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Count the tokens of texts, including special ones.

    It is also a trial: what follows in this process ends as soon.

    Raises:
        PipelineError: the tokenizer takes more time or memory than such texts need.
    """
    parts = (texts[start : start + AT_A_TIME] for start in range(0, len(texts), AT_A_TIME))
    return [count for part in parts for count in call(tokenizer, _lengths, list(part))]


def _lengths(tokenizer: Any, texts: list[str]) -> list[int]:
    with loading(f"the tokenizer {tokenizer.name_or_path}"):
        return [len(ids) for ids in tokenizer(texts, verbose=False).input_ids]


def _words_within(text: str, length: int) -> str:
    """Cut a text to the words that end within its first `length` characters."""
    if len(text) <= length:
        return text
    return text[: length + 1].rpartition(" ")[0] or text


def set_prompt_tokenizers(pipeline: Any) -> dict[str, PromptTokenizer]:
    """Replace each tokenizer of a pipeline by a PromptTokenizer, and return all by name."""
    found = {}
    for name, part in pipeline.components.items():
        if name.startswith("tokenizer") and part is not None:
            if not isinstance(part, PromptTokenizer):
                setattr(pipeline, name, part := PromptTokenizer(part))
            found[name] = part
    return found


@dataclass(frozen=True)
class TokenLimit:
    """The number of tokens that text encoders read of a prompt, and those of each prompt."""

    limit: int
    """Including special tokens."""
    tokenizers: tuple[str, ...]
    alone: bool
    """Whether no other tokenizer of the model reads more."""
    counts: tuple[int, ...]
    """Tokens of each prompt, in order; the maximum over the tokenizers."""

    @property
    def exceeding(self) -> list[int]:
        """Positions of the prompts that have more tokens."""
        return [place for place, count in enumerate(self.counts) if count > self.limit]

    def describe(self, what: str, long_captions: str = TRUNCATE) -> str:
        """Describe the prompts that exceed the limit; `what` names them, in the plural."""
        number = f"{len(self.exceeding)} of {len(self.counts)} {what} exceed {self.limit} tokens"
        if long_captions == CHUNK:
            return f"{number} and are read in chunks"
        if self.alone:
            return f"{number}; the excess is ignored"
        return f"{number} of {' and '.join(self.tokenizers)}, which ignore the excess"


def token_limits(
    limits: Mapping[str, int], counts: Mapping[str, Sequence[int]]
) -> list[TokenLimit]:
    """List the limits of a model that some prompt exceeds, in ascending order.

    Args:
        limits: Tokens that the encoder of each tokenizer reads.
        counts: Tokens of each prompt, by tokenizer.
    """
    found = []
    for limit in sorted(set(limits.values())):
        names = tuple(name for name, other in limits.items() if other == limit)
        most = tuple(max(row) for row in zip(*(counts[name] for name in names), strict=True))
        one = TokenLimit(limit, names, len(names) == len(limits), most)
        if one.exceeding:
            found.append(one)
    return found
