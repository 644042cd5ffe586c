"""Which tokens are read, and which are learned."""

from __future__ import annotations

import pytest
from tests.families.texts import asked, build

from zerotrain.data.conversation import Message
from zerotrain.errors import PipelineError
from zerotrain.families import load_family
from zerotrain.families.tokens import (
    IGNORED,
    causal_prompt,
    causal_tokens,
    end_tokens,
    seq2seq_tokens,
)

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [
    Message("system", "be brief"),
    Message("user", "1+2="),
    Message("assistant", "3"),
    Message("user", "2+2="),
    Message("assistant", "4"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    base = build("causal_lm", tmp_path_factory.mktemp("causal"))
    return lambda: load_family("causal_lm").load_tokenizer(base)


@pytest.fixture
def chat(plain):
    """A tokenizer with a chat template whose turns end in a token of their own."""
    tokenizer = plain()
    tokenizer.chat_template = CHATML
    roles = [f"<|{name}|>" for name in ("system", "user", "assistant", "end")]
    tokenizer.add_special_tokens({"additional_special_tokens": roles})
    return tokenizer


def learned(tokenizer, tokens) -> str:
    """The text of all that is learned, stretches apart."""
    text = ""
    for token, label in zip(tokens.input_ids, tokens.labels, strict=True):
        assert label in (token, IGNORED)
        text += "|" if label == IGNORED else tokenizer.decode(token)
    return "|".join(part for part in text.split("|") if part)


def test_without_a_template_questions_are_lines_and_answers_end(plain):
    tokenizer = plain()
    found = causal_tokens(tokenizer, TALK, 100)
    assert tokenizer.decode(found.input_ids) == "be brief\n1+2=\n3</s>2+2=\n4</s>"
    assert learned(tokenizer, found) == "3</s>|4</s>"


def test_a_chat_template_renders_what_is_read(chat):
    """Every answer is learned with the token that ends its turn; questions never are."""
    found = causal_tokens(chat, TALK, 100)
    turns = [{"role": m.role, "content": m.content} for m in TALK]
    assert chat.decode(found.input_ids) == chat.apply_chat_template(turns, tokenize=False)
    answers = [
        chat.decode([t for t in part])
        for part in _stretches(found)
    ]  # fmt: skip
    assert answers == ["3<|end|>\n", "4<|end|>\n"]
    assert end_tokens(chat) == {chat.eos_token_id, chat.convert_tokens_to_ids("<|end|>")}


def _stretches(tokens) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for label in tokens.labels:
        if label == IGNORED:
            found.append([])
        else:
            found[-1].append(label)
    return [part for part in found if part]


def test_a_question_has_the_tokens_that_its_answer_follows(plain, chat):
    """What is generated from is the beginning of what was learned."""
    for tokenizer in (plain(), chat):
        whole = causal_tokens(tokenizer, TALK, 100)
        prompt = causal_prompt(tokenizer, TALK[:-1])
        assert whole.input_ids[: len(prompt)] == prompt
        assert whole.labels[len(prompt) - 1] == IGNORED != whole.labels[len(prompt)]


def test_a_template_that_forgets_earlier_answers_teaches_the_last(chat):
    """As those of models that reason do."""
    chat.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content if loop.last or m.role != 'assistant' else '...' }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    found = causal_tokens(chat, TALK, 100)
    assert [chat.decode(part) for part in _stretches(found)] == ["4<|end|>"]
    assert "...<|end|>" in chat.decode(found.input_ids)


def test_a_template_that_puts_more_before_an_answer_is_refused(chat):
    chat.chat_template = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"
    with pytest.raises(PipelineError, match="renders an answer otherwise"):
        causal_tokens(chat, TALK, 100)


def test_what_is_too_long_is_cut_at_its_end(plain):
    """With nothing of an answer left, there is no sample."""
    tokenizer = plain()
    whole = causal_tokens(tokenizer, asked("1+2=", "345").messages, 100)
    assert len(whole.input_ids) == 9
    cut = causal_tokens(tokenizer, asked("1+2=", "345").messages, 7)
    assert (cut.input_ids, cut.labels) == (whole.input_ids[:7], whole.labels[:7])
    assert causal_tokens(tokenizer, asked("1+2=", "345").messages, 5) is None


def test_a_seq2seq_model_reads_all_before_the_last_answer(tmp_path):
    """Source and answer end with the token that ends a text, also where they are cut."""
    tokenizer = load_family("seq2seq_lm").load_tokenizer(build("seq2seq_lm", tmp_path))
    found = seq2seq_tokens(tokenizer, TALK, 100)
    assert tokenizer.decode(found.input_ids) == "be brief\n1+2=\n3\n2+2=</s>"
    assert tokenizer.decode(found.labels) == "4</s>"
    cut = seq2seq_tokens(tokenizer, TALK, 4)
    assert (len(cut.input_ids), cut.input_ids[-1]) == (4, tokenizer.eos_token_id)
