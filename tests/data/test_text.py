"""Text: each format, each mistake's words, and built-in tasks."""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import datasets
import pytest

from zerotrain.config.data import DataConfig
from zerotrain.data.conversation import Conversation, read_conversations
from zerotrain.data.dataset_folder import read_bad
from zerotrain.data.open import source_files
from zerotrain.data.source import Found
from zerotrain.data.text import question_of, read_conversations_of
from zerotrain.errors import PipelineError
from zerotrain.stages.prepare_dataset import prepare_dataset

ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}


def config(path: object, **options: object) -> DataConfig:
    return DataConfig.model_validate({"source": "text", "path": str(path), **options})


def read(path: object, **options: object) -> list[Conversation | Found]:
    return read_conversations_of(config(path, **options))


def written(path, rows, suffix=".jsonl"):
    file = path / f"rows{suffix}"
    lines = [json.dumps(row) for row in rows]
    file.write_text("\n".join(lines) if suffix == ".jsonl" else json.dumps(rows))
    return file


def turns(sample: Conversation) -> list[tuple[str, str]]:
    return [tuple(message[:2]) for message in sample.messages]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_alpaca_rows(tmp_path, suffix):
    """With and without input; system and history as LLaMA-Factory has them."""
    rows = [
        ALPACA,
        {"instruction": "Say hi.", "input": " ", "output": "hi"},
        {**ALPACA, "system": "be brief", "history": [["a", "b"]]},
        {"instruction": "Double.", "input": 0, "output": 0},
    ]
    found = read(written(tmp_path, rows, suffix))
    assert turns(found[0]) == [("user", "Add.\n1 and 2"), ("assistant", "3")]
    assert turns(found[1]) == [("user", "Say hi."), ("assistant", "hi")]
    assert [role for role, _ in turns(found[2])] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    assert turns(found[3]) == [("user", "Double.\n0"), ("assistant", "0")]
    kind = "item" if suffix == ".json" else "line"
    assert [one.file for one in found] == [f"rows{suffix} {kind} {n}" for n in (1, 2, 3, 4)]


STANFORD = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:"
)


def test_alpaca_rows_in_the_prompt_text_of_stanford_alpaca(tmp_path):
    """Bit by bit, with the spaces and braces of the rows."""
    rows = [
        ALPACA,
        {"instruction": " Say {hi}. ", "input": "", "output": "hi \n"},
        {**ALPACA, "system": "be brief"},
    ]
    found = read(written(tmp_path, rows), prompt_template="alpaca")
    assert turns(found[0]) == [("prompt", STANFORD), ("assistant", "3")]
    assert turns(found[1]) == [
        (
            "prompt",
            "Below is an instruction that describes a task. Write a response that appropriately "
            "completes the request.\n\n### Instruction:\n Say {hi}. \n\n### Response:",
        ),
        ("assistant", "hi \n"),
    ]
    assert found[2].reason == "system has no place in prompt_template: alpaca"
    data = DataConfig(source="text", path="-", prompt_template="alpaca")
    plain = turns(found[1])[0][1].replace(" Say {hi}. ", "Add.")
    assert question_of(data, "Add.")[:2] == ("prompt", plain)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"format": "chat"}, "prompt_template: alpaca is for rows of the format alpaca"),
        ({"response_column": "output"}, "prompt_template: alpaca has columns of its own"),
    ],
)
def test_the_prompt_text_is_for_alpaca_rows_alone(keys, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(source="text", path="-", prompt_template="alpaca", **keys)


def test_chat_rows_of_both_kinds(tmp_path):
    """messages with role and content; conversations with from and value."""
    openai = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    sharegpt = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    first, second = read(written(tmp_path, [openai, sharegpt]), format="chat")
    assert turns(first) == turns(second) == [("user", "a"), ("assistant", "b")]
    assert first.sha256 == second.sha256


def test_columns_with_a_template_and_names_of_labels(tmp_path):
    """Label as text: what a classifier is taught to write."""
    file = tmp_path / "tweets.csv"
    file.write_text('Tweet text,Label\n"late, again",1.0\nlovely,0\nhm,7\n')
    template = "Tweet text : {Tweet text} Label :"
    named = {"prompt_template": template, "response_column": "Label"}
    found = read(file, label_names=["no complaint", "complaint"], **named)
    assert turns(found[0]) == [
        ("user", "Tweet text : late, again Label :"),
        ("assistant", "complaint"),
    ]
    assert found[2] == Found(
        "tweets.csv line 4",
        reason="Label is '7', a label without a name (0, 1 have one)",
    )
    plain = read(file, prompt_column="Tweet text", response_column="Label")
    assert turns(plain[1]) == [("user", "lovely"), ("assistant", "0")]


def test_braces_of_a_template_are_written_twice(tmp_path):
    file = written(tmp_path, [{"text": "a", "label": "b"}])
    (found,) = read(file, prompt_template='{{"say": "{text}"}}', response_column="label")
    assert turns(found)[0] == ("user", '{"say": "a"}')


def test_a_cell_may_hold_a_document(tmp_path):
    """Longer than the 131072 characters that the csv module allows by itself."""
    file = tmp_path / "rows.csv"
    file.write_text(f"text,label\n{'long ' * 40_000},b\n")
    (found,) = read(file, prompt_column="text", response_column="label")
    assert len(turns(found)[0][1]) == 5 * 40_000 - 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "messages is no list of turns"),
        ({"messages": ["a"]}, "turn 1 is str, not an object"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "turn 1 has the role 'bot'"),
        ({"messages": [{"role": "user", "content": " "}]}, "turn 1 has no content"),
        (
            {"messages": [{"role": "user", "content": {"text": "a"}}]},
            "the content of turn 1 is dict, not text",
        ),
        ({"messages": [{"role": "user", "content": "a"}]}, "its last turn is the user's"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "an answer comes first"),
        (
            {
                "messages": [
                    {"role": "system", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ]
            },
            "an answer comes first",
        ),
        (
            {**ALPACA, "history": [["a", "b"], [None, "c"]]},
            "no question 2 of history",
        ),
        ({**ALPACA, "history": [["a", " "]]}, "empty answer 1 of history"),
        ({**ALPACA, "history": ["a"]}, "history 1 is no pair of a question and an answer"),
        ({**ALPACA, "history": 3}, "history is int, not a list"),
    ],
)
def test_what_is_wrong_with_a_row_is_reported(tmp_path, row, reason):
    (found,) = read(written(tmp_path, [row]))
    assert isinstance(found, Found)
    assert reason in found.reason


def test_a_comma_without_quotes_is_a_bad_row(tmp_path):
    """Cut at it, the row would teach another answer."""
    file = tmp_path / "rows.csv"
    file.write_text("text,label\nhello,greeting\nhello, world,complaint\n")
    found = read(file, prompt_column="text", response_column="label")
    assert found[1] == Found(
        "rows.csv line 3",
        reason="more cells than columns; put text that holds a comma in double quotes",
    )


def test_bad_rows_are_counted_and_named(tmp_path):
    """As bad images are: more than data.max_bad_samples stop the run."""
    file = written(tmp_path, [ALPACA, {**ALPACA, "output": ""}, {"instruction": 3.5}])
    with pytest.raises(PipelineError, match="2 of 3 samples are bad") as error:
        prepare_dataset(config(file), tmp_path / "out")
    assert "rows.jsonl line 2: empty output" in str(error.value)
    prepare_dataset(config(file, max_bad_samples=2), tmp_path / "out")
    kept = read_conversations(tmp_path / "out")
    assert [sample.file for sample in kept.samples] == ["rows.jsonl line 1"]
    assert len(read_bad(kept.artifact)) == 2


def test_a_split_follows_from_the_first_question_alone(tmp_path):
    """Adding rows moves none; a question asked twice, or first of several, is on one side."""
    rows = [{"instruction": f"say {i}", "output": str(i)} for i in range(200)]
    before = read(written(tmp_path, rows), holdout=0.3)
    again = [{"instruction": f"say {i}", "output": "else"} for i in range(200)]
    after = read(written(tmp_path, [*again, *rows]), holdout=0.3)
    splits = [sample.split for sample in before]
    assert [sample.split for sample in after] == splits * 2
    assert 30 < splits.count("holdout") < 90
    why = {"instruction": "why?", "output": "so"}
    going_on = [{**why, "history": [[f"say {i}", str(i)]]} for i in range(200)]
    later = read(written(tmp_path, going_on), holdout=0.3)
    assert [sample.split for sample in later] == splits


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"instruction": "a"}', "not a list of objects"),
        ("a.json", "[", "not valid JSON"),
        ("a.json", "[" * 100_000, "nested more than 50 deep"),
        ("a.jsonl", "[" * 100_000, "nested more than 50 deep"),
        ("a.jsonl", "[1]", "holds a list, not keys with values"),
        ("a.jsonl", '{"question": "a"}', "no column 'instruction', which the format alpaca needs"),
        ("a.jsonl", "", "holds no rows"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(PipelineError, match=said):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "there", "said"),
    [
        ("a.jsonl", False, "no such file"),
        ("a.tsv", False, r"the extension is \.tsv, which is not read"),
        ("a.parquet", True, r"the extension is \.parquet, which is not read"),
        ("notes", True, "the extension is none, which is not read"),
    ],
)
def test_a_file_is_not_taken_for_an_id_of_the_hub(tmp_path, name, there, said):
    """Neither when snakemake looks for its inputs nor when the dataset is prepared."""
    if there:
        (tmp_path / name).write_text("")
    for use in (source_files, read_conversations_of):
        with pytest.raises(PipelineError, match=rf"data\.path: {tmp_path / name}: {said}"):
            use(config(tmp_path / name))


def test_keys_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="path means nothing to source: sums"):
        DataConfig.model_validate({"source": "sums", "path": "a.json"})
    with pytest.raises(ValueError, match="images means nothing to source: text"):
        config("a.json", images="folder")
    with pytest.raises(ValueError, match="give response_column"):
        config("a.csv", prompt_column="a")
    with pytest.raises(ValueError, match="prompt_template: 'Label' names no column"):
        config("a.csv", prompt_template="Label", response_column="b")
    with pytest.raises(ValueError, match="not both"):
        config("a.csv", prompt_column="a", prompt_template="{a}", response_column="b")
    with pytest.raises(PipelineError, match=r"data\.subset: .* is one file"):
        read(written(tmp_path, [ALPACA]), subset="en")


def test_files_are_inputs_and_hub_ids_are_none(tmp_path):
    file = written(tmp_path, [ALPACA])
    assert source_files(config(file)) == [str(file)]
    assert source_files(config(tmp_path)) == [str(file)]
    assert source_files(config("owner/name")) == []
    assert source_files(DataConfig(source="sums")) == []


class FakeDataset(list):
    """Rows with the names of their labels, as datasets.Dataset has them."""

    features = {"label": SimpleNamespace(names=["no", "yes"])}  # noqa: RUF012


@pytest.fixture
def fake_datasets(monkeypatch) -> ModuleType:
    """The package's two functions, which remember how they were called."""
    module = ModuleType("datasets")
    rows = FakeDataset([{"text": "a", "label": 1}, {"text": "b", "label": 0}])
    module.calls = []
    module.DatasetDict = dict
    module.exceptions = SimpleNamespace(DatasetsError=OSError)
    module.load_from_disk = lambda path: module.calls.append(path) or {"test": rows}
    module.load_dataset = lambda *names, split: module.calls.append((*names, split)) or rows
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_a_dataset_of_hugging_face_by_id_or_on_disk(tmp_path, fake_datasets):
    """Subset and split are taken, and labels have the dataset's own names."""
    named = {"prompt_column": "text", "response_column": "label", "hub_split": "test"}
    for path, extra in (("owner/name", {"subset": "en"}), (tmp_path, {})):
        found = read(path, **named, **extra)
        assert [turns(one)[1][1] for one in found] == ["yes", "no"]
        assert found[0].file == "test row 1"
    assert fake_datasets.calls == [("owner/name", "en", "test"), str(tmp_path)]
    with pytest.raises(PipelineError, match="split train: 'train'"):
        read(tmp_path, **{**named, "hub_split": "train"})


def test_a_dataset_made_by_a_script_is_read_from_the_hubs_copy(fake_datasets):
    """As ought/raft, the reference's own."""
    rows, calls = fake_datasets.load_dataset(split="train"), []

    def load_dataset(*names, split, **files):
        calls.append((*names, split, files))
        if names[0] != "parquet":
            raise RuntimeError("Dataset scripts are no longer supported, but found raft.py")
        return rows

    fake_datasets.load_dataset = load_dataset
    named = {"prompt_column": "text", "response_column": "label", "hub_split": "train[:2]"}
    found = read("ought/raft", subset="twitter_complaints", **named)
    assert [turns(one)[1][1] for one in found] == ["yes", "no"]
    place = "hf://datasets/ought/raft@refs/convert/parquet/twitter_complaints/train/*.parquet"
    assert calls[1] == ("parquet", "train[:2]", {"data_files": {"train": place}})


def test_the_library_reads_what_it_wrote(tmp_path):
    """The real one: a split of several, a dataset alone, and words of labels."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "several")
    named = {"prompt_column": "text", "response_column": "label"}
    for path, extra in (("one", {}), ("several", {"hub_split": "test"})):
        found = read(tmp_path / path, **named, **extra)
        assert [turns(one)[1][1] for one in found] == ["yes", "no"]
    with pytest.raises(PipelineError, match="split train: 'train'"):
        read(tmp_path / "several", **named)
    for key, path in (("hub_split", "one"), ("subset", "several")):
        with pytest.raises(PipelineError, match=rf"data\.{key}: .* save_to_disk wrote"):
            read(tmp_path / path, **named, **{key: "test"})


def test_built_in_tasks():
    """Each pair and each sentence is asked once; both labels are as frequent; answers are right."""
    sums = read_conversations_of(DataConfig(source="sums", holdout=0.1))
    pairs = set()
    for one in sums:
        asked, answer = (message.content for message in one.messages)
        a, b = map(int, asked.rstrip("=").split("+"))
        assert a + b == int(answer)
        pairs.add(frozenset((a, b)))
    assert len(pairs) == len(sums) == 90 * 91 // 2
    found = read_conversations_of(DataConfig(source="complaints"))
    labels = Counter(one.messages[1].content for one in found)
    assert labels == {"complaint": len(found) // 2, "no complaint": len(found) // 2}
    assert len({one.messages[0] for one in found}) == len(found)
