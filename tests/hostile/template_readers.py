"""The reader of chat templates. It needs no torch: see fuzzing.py."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tests.hostile.reader import Reader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from zerotrain.data.conversation import Message
from zerotrain.models.families.tokens import answer_start, causal_tokens, end_tokens

TALK = [
    Message("system", "be brief"), Message("user", "1+2="), Message("assistant", "3"),
    Message("user", "2+2="), Message("assistant", "4"),
]  # fmt: skip
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "phi": CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}"),
    "thinking": CHATML.replace(
        "{{ m['content']",
        "{% if loop.last and m.role == 'assistant' %}<think>{% endif %}{{ m.content",
    ),
    "dated": "{% set date = strftime_now('%d %b %Y') %}Today is {{ date }}\n" + CHATML,
    "strict": "{% if messages[0].role == 'x' %}{{ raise_exception('no x') }}{% endif %}"
    "{% macro turn(m) %}{{ '<' + m.role + '>' ~ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{{ loop.index0 % 2 }}\n{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}",
}
"""What the templates of published models do."""


@functools.cache
def _tokenizer() -> Any:
    """A tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelling = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token="</s>")


def _write_templates(folder: Path) -> None:
    for name, template in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(template, encoding="utf-8")


def _read_template(_: Path, file: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.chat_template = file.read_text(encoding="utf-8", errors="replace")
    use_tokenizer(tokenizer)


def use_tokenizer(tokenizer: Any) -> None:
    """Tokenise a conversation, and look for what surrounds answers."""
    causal_tokens(tokenizer, TALK, 100), end_tokens(tokenizer), answer_start(tokenizer)


TEMPLATE_READERS = {"chat template": Reader(_write_templates, _read_template, opens=False)}
