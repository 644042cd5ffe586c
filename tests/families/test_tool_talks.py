"""Conversations with tools, thoughts, and answers that are not learned: which tokens are learned.

The texts are compared with those that the template itself renders of the same turns.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.families.texts import build

from zerotrain.data.conversation import Message
from zerotrain.errors import PipelineError
from zerotrain.models.families import load_family
from zerotrain.models.families.tokens import (
    IGNORED,
    causal_prompt,
    causal_tokens,
    seq2seq_prompt,
    seq2seq_tokens,
)

TOOLS = """\
{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif -%}
"""
TURNS = """\
{% for m in messages %}{% if m.role == 'tool' -%}
<|user|><result>{{ m.content }}</result><|end|>
{%- elif m.role in ('system', 'user') -%}
<|{{ m.role }}|>{{ m.content }}<|end|>
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor -%}
<|end|>
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
HERMES = TOOLS + TURNS
"""As templates of Qwen and Hermes: unknown roles and keys are passed over."""
JOINING = TURNS.replace("c.function | tojson", "c.function.name + c.function.arguments")
"""It joins the arguments of a call as text, as DeepSeek's templates."""
ADD = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": 2}}}
CALLS = json.dumps({"tool_calls": [CALL]})
TALK = [
    Message("tools", json.dumps(ADD)),
    Message("system", "be brief"),
    Message("user", "1+2="),
    Message("assistant", "", CALLS),
    Message("tool", "3", '{"name": "add"}'),
    Message("assistant", "it is 3"),
]
CALLED = '<call>{"name": "add", "arguments": {"x": 1, "y": 2}}</call><|end|>'


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    base = build("causal_lm", tmp_path_factory.mktemp("causal"))
    return lambda: load_family("causal_lm").load_tokenizer(base)


@pytest.fixture
def chat(plain):
    """A tokenizer with a chat template, whose turns end in a token of their own."""
    tokenizer = plain()
    tokenizer.chat_template = HERMES
    roles = [f"<|{name}|>" for name in ("system", "user", "assistant", "end")]
    tokenizer.add_special_tokens({"additional_special_tokens": roles})
    return tokenizer


def learned(tokenizer: Any, talk: list[Message]) -> list[str]:
    """The texts of all that is learned, stretches apart."""
    found: list[list[int]] = [[]]
    tokens = causal_tokens(tokenizer, talk, 1000)
    for token, label in zip(tokens.input_ids, tokens.labels, strict=True):
        assert label in (token, IGNORED)
        found = [*found, []] if label == IGNORED else [*found[:-1], [*found[-1], token]]
    return [tokenizer.decode(part) for part in found if part]


def text(tokenizer: Any, talk: list[Message]) -> str:
    return tokenizer.decode(causal_tokens(tokenizer, talk, 1000).input_ids)


def test_a_conversation_with_tools_is_what_its_template_renders(chat):
    """Of it the assistant's turns are learned alone: the call and the answer."""
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "name": "add"},
        {"role": "assistant", "content": "it is 3"},
    ]
    expected = chat.apply_chat_template(turns, tools=ADD, tokenize=False)
    assert text(chat, TALK) == expected
    assert '<|system|>[{"type": "function"' in expected
    assert "<result>3</result>" in expected
    assert learned(chat, TALK) == [CALLED, "it is 3<|end|>"]
    prompt = causal_prompt(chat, TALK[:3])
    assert prompt == causal_tokens(chat, TALK, 1000).input_ids[: len(prompt)]


def test_a_template_that_joins_arguments_gets_them_as_text(chat):
    chat.chat_template = JOINING
    assert learned(chat, TALK[1:])[0] == '<call>add{"x": 1, "y": 2}</call><|end|>'


@pytest.mark.parametrize(
    ("hidden", "shown"),
    [
        ("tools", TURNS),
        ("tool_calls", HERMES.replace("m.tool_calls or []", "[]")),
        ("turns of the tool", HERMES.replace("{{ m.content }}</result>", "</result>")),
    ],
)
def test_a_template_that_passes_over_tools_is_refused(chat, hidden, shown):
    chat.chat_template = shown
    with pytest.raises(PipelineError) as refused:
        causal_tokens(chat, TALK, 1000)
    assert refused.value.what == (
        f"the tokenizer's chat template shows no {hidden}, which the conversation has"
    )


@pytest.mark.parametrize("talk", [TALK, TALK[1:], [TALK[0], Message("user", "a"), TALK[-1]]])
def test_tools_need_a_chat_template(plain, talk):
    with pytest.raises(PipelineError) as refused:
        causal_tokens(plain(), talk, 1000)
    assert refused.value.what == (
        "a conversation with tools needs a tokenizer with a chat template, which renders tools, "
        "calls and results; this tokenizer has none"
    )
    assert "set base to a model" in refused.value.hint


def test_a_seq2seq_model_reads_no_tools_and_learns_its_last_answer(tmp_path):
    tokenizer = load_family("seq2seq_lm").load_tokenizer(build("seq2seq_lm", tmp_path))
    for call in (lambda: seq2seq_tokens(tokenizer, TALK, 100),
                 lambda: seq2seq_prompt(tokenizer, TALK[:-1], 100)):  # fmt: skip
        with pytest.raises(PipelineError, match="a seq2seq model reads without one"):
            call()
    asked = [Message("user", "a"), Message("assistant", "b", learned=False)]
    with pytest.raises(PipelineError, match="its last answer has weight: 0 or train: false"):
        seq2seq_tokens(tokenizer, asked, 100)


def test_developer_is_the_system_where_a_template_does_not_know_it(chat):
    talk = [Message("developer", "be brief"), *TALK[2:3], TALK[-1]]
    same = [Message("system", "be brief"), *TALK[2:3], TALK[-1]]
    assert text(chat, talk) == text(chat, same)
    assert "<|system|>be brief<|end|>" in text(chat, talk)
    chat.chat_template = HERMES.replace("('system',", "('system', 'developer',")
    assert text(chat, talk).startswith("<|developer|>be brief<|end|>")


def test_a_thought_is_learned_with_its_answer(chat):
    """By a template that takes it; by another, the text is that of the answer alone."""
    thought = Message("assistant", "3", '{"reasoning_content": "hm"}')
    talk = [Message("user", "1+2="), thought]
    family = load_family("causal_lm")
    assert learned(chat, talk) == ["<think>hm</think>3<|end|>"]
    assert family.unused_keys(chat) == ()
    chat.chat_template = HERMES.replace("m.reasoning_content", "m.thinking")
    assert learned(chat, talk) == ["<think>hm</think>3<|end|>"]
    assert family.unused_keys(chat) == ()
    chat.chat_template = HERMES.replace("m.reasoning_content", "enable_thinking")
    assert learned(chat, talk) == ["3<|end|>"]
    assert family.unused_keys(chat) == ("reasoning_content",)
    assert load_family("seq2seq_lm").unused_keys(chat) == ("reasoning_content",)


@pytest.mark.parametrize("template", [None, HERMES])
def test_an_answer_of_weight_0_is_read_like_a_question(chat, template):
    """The tokens are those of the same turns; labels are those of the others alone."""
    chat.chat_template = template
    end = "<|end|>" if template else chat.eos_token
    talk = [
        Message("user", "1+2="), Message("assistant", "4"),
        Message("user", "no"), Message("assistant", "3"),
    ]  # fmt: skip
    forgiven = [talk[0], talk[1]._replace(learned=False), *talk[2:]]
    whole, part = (causal_tokens(chat, one, 100) for one in (talk, forgiven))
    assert part.input_ids == whole.input_ids
    assert learned(chat, talk) == [f"4{end}", f"3{end}"]
    assert learned(chat, forgiven) == [f"3{end}"]
    assert part.left_out == 0
    last = [*talk[:3], talk[3]._replace(learned=False)]
    assert learned(chat, last) == [f"4{end}"]
    nothing = [talk[0], talk[1]._replace(learned=False)]
    assert causal_tokens(chat, nothing, 100) is None
