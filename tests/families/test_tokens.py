"""Which tokens are read, and which are learned."""

from __future__ import annotations

import pytest
from tests.families.texts import asked, build
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AddedToken

from zerotrain.data.conversation import Message
from zerotrain.errors import PipelineError
from zerotrain.models.families import load_family
from zerotrain.models.families.tokens import (
    IGNORED,
    answer_start,
    causal_prompt,
    causal_tokens,
    end_tokens,
    seq2seq_tokens,
)

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PHI = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
"""What ends a text stands only where no answer follows, as in Phi-3's template."""
QWEN = CHATML.replace(
    "{{ m.content }}",
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)
"""The last answer alone has an empty thought before it, as in Qwen3's template."""
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


def test_a_prompt_as_it_is_has_neither_template_nor_line_break(plain, chat):
    """The answer follows at once and ends with the end-of-text token; a chat model, too."""
    talk = [Message("prompt", "1+2="), Message("assistant", "3")]
    for tokenizer in (plain(), chat):
        found = causal_tokens(tokenizer, talk, 100)
        assert tokenizer.decode(found.input_ids) == f"1+2=3{tokenizer.eos_token}"
        assert learned(tokenizer, found) == f"3{tokenizer.eos_token}"
        assert causal_prompt(tokenizer, talk[:-1]) == found.input_ids[: -len("3") - 1]


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


TEMPLATES = {
    "none": None,
    "chatml": CHATML,
    "phi": PHI,
    "qwen": QWEN,
    "words": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
}


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_question_has_the_tokens_that_its_answer_follows(chat, template, spaced):
    """What is generated from is the beginning of what was learned; also where a tokenizer begins
    each text with a space."""
    chat.chat_template = TEMPLATES[template]
    if spaced:
        chat.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    whole = causal_tokens(chat, TALK, 200)
    prompt = causal_prompt(chat, TALK[:-1])
    assert whole.input_ids[: len(prompt)] == prompt
    assert whole.labels[len(prompt) - 1] == IGNORED != whole.labels[len(prompt)]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (PHI, ["3<|end|>\n", "4<|end|>\n</s>"]),
        (QWEN, ["<think>\n\n</think>\n\n4<|end|>\n"]),
    ],
)
def test_an_earlier_answer_is_learned_as_far_as_it_stands_as_generated(chat, template, answers):
    """What ends the last one alone is cut from it; one that is shown otherwise is left out, and
    counted."""
    chat.chat_template = template
    found = causal_tokens(chat, TALK, 200)
    assert [chat.decode(part) for part in _stretches(found)] == answers
    assert found.left_out == 2 - len(answers)
    turns = [{"role": m.role, "content": m.content} for m in TALK]
    assert chat.decode(found.input_ids) == chat.apply_chat_template(turns, tokenize=False)


def test_what_a_template_has_answers_begin_with_is_known(plain, chat):
    assert answer_start(plain()) == answer_start(chat) == ""
    chat.chat_template = QWEN
    assert answer_start(chat) == "<think>\n\n</think>"


@pytest.mark.parametrize("end", ["<|end|>", "<|eob|>", " <|end|></s>", "\n", ""])
def test_the_end_of_a_turn_ends_an_answer(chat, end):
    """It is special, whether the tokenizer lists it or not; an end in plain letters is none."""
    chat.add_tokens([AddedToken("<|eob|>", special=True)])
    chat.chat_template = CHATML.replace("<|end|>\n", end)
    special = {
        chat.convert_tokens_to_ids(token) for token in ("<|end|>", "<|eob|>") if token in end
    }
    assert end_tokens(chat) == {chat.eos_token_id} | special


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("m.role == 'system'", "System role not supported"),
        ("loop.index == 2 and m.role == 'user'", "roles must alternate"),
    ],
)
def test_what_a_template_refuses_is_reported_in_its_words(chat, condition, words):
    chat.chat_template = CHATML.replace(
        "<|{{", f"{{% if {condition} %}}{{{{ raise_exception('{words}') }}}}{{% endif %}}<|{{{{"
    )
    with pytest.raises(PipelineError) as refused:
        causal_prompt(chat, TALK[:-1])
    assert refused.value.what == (
        f"the tokenizer's chat template takes no turns of system, user: {words}"
    )


def test_a_template_that_python_cannot_compute_is_refused(chat):
    chat.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(PipelineError, match="chat template takes no turns of system, user: can"):
        causal_prompt(chat, TALK[:-1])


def test_what_begins_an_answer_is_no_part_of_its_question(chat):
    """Where a template lets answers follow what it does not put before them, nothing is."""
    chat.chat_template = CHATML.replace("<|assistant|>", "<|assistant|><think>")
    assert answer_start(chat) == ""


def test_tokens_do_not_depend_on_the_day(chat):
    """Templates that name the date get one that stays."""
    chat.chat_template = (
        "{% if strftime_now is defined %}{% set day = strftime_now('%-d %B %Y, %Y-%m-%d') %}"
        "{% endif %}{{ day }}: " + CHATML
    )
    found = chat.decode(causal_prompt(chat, TALK[1:2]))
    assert found == "26 July 2024, 2024-07-26: <|user|>1+2=<|end|>\n<|assistant|>"


def test_a_template_that_forgets_earlier_answers_teaches_the_last(chat):
    """As those of models that reason do."""
    chat.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content if loop.last or m.role != 'assistant' else '...' }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    found = causal_tokens(chat, TALK, 100)
    assert [chat.decode(part) for part in _stretches(found)] == ["4<|end|>"]
    assert found.left_out == 1
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
