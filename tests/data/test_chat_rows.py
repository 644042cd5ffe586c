"""Rows of a chat: system texts, thoughts, weights, tools, and the keys that nobody reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import datasets
import pytest

from zerotrain.artifact.documents import LeftOut
from zerotrain.config.data import DataConfig
from zerotrain.data.conversation import Conversation, Message, read_conversations
from zerotrain.data.dataset_folder import read_left_out
from zerotrain.data.source import Found
from zerotrain.data.text import read_conversations_of
from zerotrain.stages.prepare_dataset import prepare_dataset

ASK = {"role": "user", "content": "a"}
SAY = {"role": "assistant", "content": "b"}
CALL = {"name": "add", "arguments": {"x": 1}}
HERMES = {"type": "function", "function": CALL}
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}


def config(path: Path, **options: object) -> DataConfig:
    return DataConfig.model_validate({"source": "text", "path": str(path), **options})


def write(folder: Path, *rows: dict, suffix: str = ".jsonl") -> Path:
    file = folder / f"rows{suffix}"
    text = "\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows)
    file.write_text(text)
    return file


def read(folder: Path, *rows: dict) -> list[Conversation | Found]:
    return read_conversations_of(config(write(folder, *rows)))


def messages(folder: Path, row: dict) -> list[Message]:
    [found] = read(folder, row)
    assert isinstance(found, Conversation), found.reason
    return [*found.messages]


def reason(folder: Path, row: dict) -> str:
    [found] = read(folder, row)
    assert isinstance(found, Found), found.messages
    return str(found.reason)


def left_out(folder: Path, *rows: dict) -> list[str]:
    counted = LeftOut()
    read_conversations_of(config(write(folder, *rows)), counted)
    return counted.lines()


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_a_system_text_next_to_the_turns_is_the_first_turn(tmp_path, column):
    turns = {
        "messages": [ASK, SAY],
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    }
    row = {"system": "be brief", column: turns[column]}
    expected = [Message("system", "be brief"), Message("user", "a"), Message("assistant", "b")]
    assert messages(tmp_path, row) == expected
    assert left_out(tmp_path, row) == []
    for absent in (None, " ", float("nan")):
        assert messages(tmp_path, {**row, "system": absent}) == expected[1:]


def test_a_system_text_that_the_first_turn_repeats_is_there_once(tmp_path):
    """Another one contradicts it: the row is refused."""
    first = {"role": "system", "content": "be brief"}
    row = {"system": "be brief ", "messages": [first, ASK, SAY]}
    assert [message.role for message in messages(tmp_path, row)] == ["system", "user", "assistant"]
    assert reason(tmp_path, {**row, "system": "be long"}) == (
        "system and turn 1, which is the system's, differ; keep one of them"
    )
    assert reason(tmp_path, {**row, "system": 3}) == "system is int, not text"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_kept_for_the_chat_template(tmp_path, name):
    found = messages(tmp_path, {"messages": [ASK, {**SAY, name: "hm"}]})
    assert found[1] == Message("assistant", "b", '{"reasoning_content": "hm"}')
    assert left_out(tmp_path, {"messages": [ASK, {**SAY, name: "hm"}]}) == []
    assert messages(tmp_path, {"messages": [ASK, {**SAY, name: " "}]})[1] == Message(
        "assistant", "b"
    )


def test_a_weight_of_0_is_not_learned(tmp_path):
    for unlearned in ({"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": False}):
        turns = [ASK, {**SAY, **unlearned}, {**ASK, "weight": 0}, {**SAY, "weight": 1}]
        found = messages(tmp_path, {"messages": turns})
        assert [message.learned for message in found] == [True, False, False, True]
    plain = messages(tmp_path, {"messages": [{**ASK, "weight": None}, {**SAY, "train": True}]})
    assert plain == [Message("user", "a"), Message("assistant", "b")]


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([ASK, {**SAY, "weight": 0.5}], "turn 2 has weight: 0.5; only 0 and false (not learned), "),
        ([ASK, {**SAY, "train": "no"}], "turn 2 has train: 'no'; only 0 and false"),
        ([{**ASK, "weight": 1}, SAY], "turn 1 is the user's and has weight: 1; answers alone are"),
        ([ASK, {**SAY, "weight": 0, "train": True}], "weight and train of turn 2 contradict"),
        ([ASK, {**SAY, "weight": 0}], "no answer is learned: all have weight: 0 or train: false"),
        (
            [ASK, {**SAY, "reasoning": "c", "reasoning_content": "d"}],
            "reasoning_content and reasoning of turn 2 differ",
        ),
        ([ASK, {**SAY, "reasoning": ["c"]}], "reasoning_content of turn 2 is list, not text"),
        ([{"role": "tool", "content": "a"}, SAY], "a tool's result comes first, before any"),
        ([ASK, {"role": "assistant", "content": None}], "turn 2 has no content"),
        ([ASK, {**SAY, "content": float("nan")}], "turn 2 has no content"),
        (
            [{**ASK, "content": [{"type": "image_url", "image_url": "x"}]}, SAY],
            "turn 1 has a part of the type 'image_url'; only text is read",
        ),
        ([{**ASK, "content": ["a"]}, SAY], "turn 1 has a part without text"),
        ([ASK, {**SAY, "tool_calls": [{"id": "1"}]}], "tool_calls of turn 2: a call has no name"),
        (
            [ASK, {**SAY, "tool_calls": [{"name": "add", "arguments": "{"}]}],
            "tool_calls of turn 2: arguments of add: not valid JSON",
        ),
        (
            [ASK, {**SAY, "tool_calls": [{"name": "add", "arguments": [1]}]}],
            "tool_calls of turn 2: arguments of add are list, not names with values",
        ),
        (
            [ASK, {**SAY, "tool_calls": [{"name": "add", "arguments": {"x": float("inf")}}]}],
            "turn 2: Out of range float values",
        ),
        ([ASK, {"from": "function_call", "value": "add 1"}], "the value of turn 2: not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_turn_is_reported(tmp_path, turns, said):
    assert said in reason(tmp_path, {"messages": turns})


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("{", "tools: not valid JSON"),
        ({"name": "add"}, "tools is dict, not a list"),
        (["add"], "tool 1 has no name of a function"),
    ],
)
def test_tools_that_are_none_are_reported(tmp_path, tools, said):
    assert said in reason(tmp_path, {"messages": [ASK, SAY], "tools": tools})


def test_every_other_key_is_named_with_its_count(tmp_path, capsys):
    """By the stage, and in the dataset; keys without content and those that only name do not
    count, and bad rows are named as a whole."""
    turn = {**SAY, "foo": 1, "id": "7", "refusal": None}
    rows = [
        {"messages": [{**ASK, "name": "Ann"}, turn, ASK, turn], "id": 1, "score": 0.5},
        {"messages": [ASK, {**SAY, "value": "c"}], "source": "web", "rating": []},
        {"messages": [{**ASK, "bad": 1}], "score": 0.5},
        {"messages": [{**ASK, "content": [{"type": "text", "text": "a", "cache": 1}]}, SAY]},
    ]
    assert left_out(tmp_path, *rows) == [
        "left out: key cache of 1 part of a turn",
        "left out: key score of 1 row",
        "left out: key foo of 2 turns",
        "left out: key value of 1 turn",
    ]
    prepare_dataset(config(tmp_path / "rows.jsonl", max_bad_samples=1), tmp_path / "out")
    said = capsys.readouterr().err
    assert "WARNING: left out: key foo of 2 turns\n" in said
    kept = read_left_out(read_conversations(tmp_path / "out").artifact)
    assert kept.counts()["turn"] == {"foo": 2, "value": 1}


def test_columns_of_alpaca_rows_are_named_too(tmp_path):
    row = {"instruction": "a", "output": "b", "text": "a b", "id": 3}
    assert left_out(tmp_path, row, row) == ["left out: key text of 2 rows"]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_an_absent_value_is_no_word(tmp_path, suffix):
    """NaN and null, in a prompt, an optional input and an answer."""
    nan = float("nan")
    good = {"instruction": "a", "output": "b"}
    for absent in (nan, None):
        rows = [
            {**good, "input": absent, "history": absent, "system": absent},
            {**good, "instruction": absent},
            {**good, "output": absent},
            {**good, "history": [["c", absent]]},
        ]
        found = read_conversations_of(config(write(tmp_path, *rows, suffix=suffix)))
        assert found[0].messages == (Message("user", "a"), Message("assistant", "b"))
        assert [one.reason for one in found[1:]] == [
            "no instruction",
            "no output",
            "no answer 1 of history",
        ]
        file = write(tmp_path, {"text": absent, "label": 1}, {"text": 2, "label": absent})
        for names in ({}, {"label_names": ["no", "yes"]}):
            columns = {"prompt_column": "text", "response_column": "label", **names}
            found = read_conversations_of(config(file, **columns))
            assert [one.reason for one in found] == ["no text", "no label"]


def test_an_absent_value_of_a_table_of_hugging_face_is_no_word(tmp_path):
    """Arrow has null where pandas has NaN, and both in a column of numbers."""
    rows = {"text": [1.5, float("nan"), None], "label": ["a", "b", "c"]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "data")
    columns = {"prompt_column": "text", "response_column": "label"}
    found = read_conversations_of(config(tmp_path / "data", **columns))
    assert found[0].messages[0].content == "1.5"
    assert [one.reason for one in found[1:]] == ["no text", "no text"]


def test_tools_of_a_table_of_hugging_face_have_their_own_keys_alone(tmp_path):
    """Arrow gives each struct the fields of all, and null for those that it does not have."""

    def tool(name: str) -> dict:
        return {"name": "f", "parameters": {"properties": {name: {"type": "string"}}}}

    def call(name: str) -> dict:
        called = {"type": "function", "function": {"name": "f", "arguments": {name: 1}}}
        return {"role": "assistant", "tool_calls": [called]}

    names = ("x", "y")
    rows = [{"messages": [ASK, call(name)], "tools": [tool(name)]} for name in names]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "data")
    counted = LeftOut()
    found = read_conversations_of(config(tmp_path / "data"), counted)
    for name, one in zip(names, found, strict=True):
        [offered] = json.loads(one.messages[0].content)
        assert offered["function"] == tool(name)
        [called] = json.loads(one.messages[2].keys)["tool_calls"]
        assert called["function"]["arguments"] == {name: 1}
    assert counted.lines() == []


def test_a_cell_of_csv_is_text(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\nnan,a\n,b\n")
    columns = {"prompt_column": "text", "response_column": "label"}
    found = read_conversations_of(config(tmp_path / "rows.csv", **columns))
    assert found[0].messages[0].content == "nan"
    assert found[1].reason == "empty text"


def test_sharegpt_and_openai_name_the_same_conversation_with_tools(tmp_path):
    """Tools as a list or as its JSON, calls as objects or as text, with and without their level
    `function`."""
    openai = {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "1+"}, {"text": "2"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
                ],
            },
            {"role": "tool", "content": "3"},
            SAY,
        ],
        "tools": [{"type": "function", "function": ADD}],
    }
    sharegpt = {
        "conversations": [
            {"from": "developer", "value": "be brief"},
            {"from": "human", "value": "1+2"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "b"},
        ],
        "tools": json.dumps([ADD]),
    }
    found = messages(tmp_path, openai)
    assert found == messages(tmp_path, sharegpt)
    assert [message.role for message in found] == [
        *("tools", "developer", "user", "assistant", "tool", "assistant")
    ]
    assert json.loads(found[0].content) == openai["tools"]
    assert found[2].content == "1+2"
    assert found[3] == Message("assistant", "", json.dumps({"tool_calls": [HERMES]}))
    assert left_out(tmp_path, openai, sharegpt) == []


def test_ids_of_calls_and_names_of_results_are_kept(tmp_path):
    called = {"role": "assistant", "tool_calls": [{"id": "c1", "index": 0, **HERMES, "foo": 1}]}
    result = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}
    row = {"messages": [ASK, called, result, SAY]}
    found = messages(tmp_path, row)
    assert json.loads(found[1].keys) == {"tool_calls": [{"id": "c1", **HERMES}]}
    assert json.loads(found[2].keys) == {"tool_call_id": "c1", "name": "add"}
    assert left_out(tmp_path, row) == ["left out: key foo of 1 call"]


def test_a_published_dataset_keeps_what_turns_have(tmp_path):
    """Equal after a way through the file, and the digest of a plain conversation is that of its
    roles and contents."""
    file = write(
        tmp_path,
        {"messages": [ASK, {**SAY, "reasoning": "hm"}, ASK, {**SAY, "weight": 0}]},
        {"messages": [ASK, SAY], "tools": [ADD]},
        {"messages": [ASK, SAY]},
    )
    prepare_dataset(config(file), tmp_path / "out")
    found = read_conversations(tmp_path / "out").samples
    assert [*found] == read_conversations_of(config(file))
    assert len({one.sha256 for one in found}) == 3
    plain = json.dumps([["user", "a"], ["assistant", "b"]]).encode()
    assert found[2].sha256 == hashlib.sha256(plain).hexdigest()


def test_a_plain_dataset_is_stored_as_before(tmp_path):
    """Its identity and its file have no column of what no turn has."""
    prepare_dataset(config(write(tmp_path, {"messages": [ASK, SAY]})), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert "left_out" not in manifest["content"]
    columns = (tmp_path / "out" / "samples" / "samples.arrow").read_bytes()
    assert b"content" in columns
    assert b"learned" not in columns
    sample = read_conversations(tmp_path / "out").samples[0]
    expected = {
        "repeats": 1,
        "count": {"train": 1, "holdout": 0, "bad": 0},
        "samples": [
            {
                "file": "rows.jsonl line 1",
                "messages": [ASK, SAY],
                "sha256": sample.sha256,
                "split": "train",
            }
        ],
        "bad": [],
    }
    text = json.dumps(
        {"kind": "dataset", "content": expected, "files": {}},
        sort_keys=True,
        separators=(",", ":"),
    )
    assert manifest["content"]["identity"] == hashlib.sha256(text.encode()).hexdigest()
