"""Import of files that are dropped on the builder's page, and of text that is pasted into it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerotrain.builder.importing import (
    LONGEST_COMMAND,
    MOST_BYTES,
    Imported,
    ImportRefusedError,
    import_drop,
)
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import config_text
from zerotrain.importers.reading import ImportOptions, import_file
from zerotrain.machine.detect import choose_precision

REFERENCES = Path(__file__).parents[1] / "importing" / "references"
CHOSEN = ImportOptions(choose=choose_precision)
BF16 = ImportOptions(precision="bf16")


def drop(*names: str, pasted: str = "", options: ImportOptions | None = None) -> Imported:
    """Import reference files by their names."""
    files = [REFERENCES / name for name in names]
    return import_drop({file.name: file.read_bytes() for file in files}, pasted, options or CHOSEN)


def refusal(files: dict[str, bytes], pasted: str = "") -> PipelineError:
    with pytest.raises(PipelineError) as error:
        import_drop(files, pasted, BF16)
    return error.value


def test_dropped_file_becomes_what_launch_import_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's text is that of `zerotrain launch import`, key by key."""
    found = drop("openmind/example_zero2.json", options=BF16)
    monkeypatch.chdir(REFERENCES / "openmind")
    by_command = import_file(Path("example_zero2.json"), ImportOptions(precision="bf16"))
    assert found.text == config_text(by_command)
    assert {outcome: len(rows) for outcome, rows in found.rows.items()} == {
        "kept": 9, "resolved": 10, "default": 2, "no-op": 5,
    }  # fmt: skip
    assert found.missing == ("run", "base", "data", "phases")


def test_a_value_that_is_the_same_is_not_called_another_one() -> None:
    """What differs then is its effect, for the reason that is given."""
    peak = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-05, "warmup_num_steps": 10}}
    optimizer = {"type": "AdamW", "params": {"lr": 3e-05}}
    pasted = json.dumps({"scheduler": peak, "optimizer": optimizer, "bf16": {"enabled": True}})
    found = import_drop({}, pasted, BF16)
    [row] = [row for row in found.rows["differs"] if row.ours == "train.learning_rate"]
    assert (row.given, row.value) == ("1.0e-05", "1.0e-05")
    assert row.reason == (
        "the schedule sets every step's rate, so that the optimizer's 3e-05 never holds"
    )
    assert all(row.given != row.value for row in found.rows.get("changed", []))


def test_files_dropped_together_find_one_another() -> None:
    """A script, the YAML that it names and the JSON that this names are one import of three files;
    a pasted command finds a dropped file, too."""
    names = ("commands.sh", "deepspeed_zero3_cpuoffload.yaml", "ds_z3_cpuoffload.json")
    whole = drop(*(f"diffsynth/{name}" for name in names))
    assert whole.missing == ()
    assert "preset: zero3_offload" in whole.text
    command = (REFERENCES / "peft" / "command.sh").read_text()
    assert "preset: zero3_offload" in drop("peft/ds_zero3_cpu.yaml", pasted=command).text


@pytest.mark.parametrize(
    ("pasted", "source"),
    [
        ('{"zero_optimization": {"stage": 2}}', "pasted.json, DeepSpeed"),
        ((REFERENCES / "simpletuner" / "default_config.yaml").read_text(), "pasted.yaml"),
        (
            '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "cats"\nresolution = 64',
            "pasted.toml, kohya's",
        ),
        ((REFERENCES / "diffusers" / "sd3.sh").read_text(), "accelerate, examples/dreambooth"),
    ],
)
def test_form_of_pasted_text_is_recognised(pasted: str, source: str) -> None:
    """JSON, YAML, TOML and a command line need no name to be read as what they are."""
    assert import_drop({}, pasted, CHOSEN).source.startswith(source)


def test_all_problems_are_listed_and_can_be_left_out() -> None:
    """Every refused key is a problem of its own, and is skipped on request."""
    known = "--model_family sdxl --pretrained_model_name_or_path a/b --max_train_steps 9"
    pasted = f"accelerate launch train.py {known} --first_unknown 1 --second_unknown 2"
    error = refusal({}, pasted)
    assert isinstance(error, ImportRefusedError)
    assert [what.partition(" key ")[2] for what, _ in error.problems] == [
        "first_unknown", "second_unknown",
    ]  # fmt: skip
    skip = frozenset({"first_unknown", "second_unknown"})
    found = import_drop({}, pasted, ImportOptions(choose=choose_precision, skip=skip))
    assert len(found.rows["skipped by you"]) == 2


def test_only_dropped_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that names files and folders of the machine opens none of them, by any reader."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"train_batch_size": 12345}')
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"seed": 12345}')
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("mixed_precision: secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    kohya = f'[[datasets]]\n[[datasets.subsets]]\nimage_dir="{tmp_path}"\nclass_tokens="cat"'
    for pasted in (
        f"accelerate launch --config_file {secret} train.py",
        f"torchrun train.py --deepspeed {secret} --model_name_or_path m",
        f'{{"--model_family": "sdxl", "deepspeed_config": "{secret}"}}',
        f"deepspeed train.py --deepspeed_config {secret}",
        "simpletuner train --env ../config",
    ):
        assert "which is not among the dropped files" in refusal({}, pasted).what
    assert "a dropped file opens no folder" in refusal({}, kohya).what
    backends = json.dumps({"--model_family": "sdxl", "--data_backend_config": str(secret)})
    assert "12345" not in import_drop({}, backends, BF16).text
    assert "secret" not in import_drop({}, "accelerate launch train.py", BF16).text


@pytest.mark.parametrize(
    "name", ["../ds.json", "/etc/ds.json", "a\\b.json", "a\n.json", "..", "ds.exe", "x" * 300]
)
def test_names_that_are_no_names_of_files_are_refused(name: str) -> None:
    """A dropped file's name with a folder, a control character or another ending writes nothing."""
    assert refusal({name: b"{}"}).what.isprintable()


def test_too_many_and_too_large_texts_are_refused() -> None:
    """Each limit has its sentence, which says what to drop instead."""
    many = {f"{number}.json": b"{}" for number in range(21)}
    assert refusal(many).what == "21 files, more than 20"
    assert "more than 256 KiB" in refusal({"a.json": b" " * (MOST_BYTES + 1)}).what
    assert "more than 256 KiB" in refusal({}, "{" + " " * MOST_BYTES).what
    assert "more than 32 KiB" in refusal({}, "accelerate launch a.py " + "x" * LONGEST_COMMAND).what
    assert "not UTF-8" in refusal({"a.yaml": b"a: \xff"}).what
    assert "nothing was dropped" in refusal({}).what
    assert "one at a time" in refusal({"a.json": b"{}", "b.json": b"{}"}).hint


BOMB = "a0: &a0 [1, 2]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n" for number in range(1, 20)
)


@pytest.mark.parametrize(
    ("pasted", "why"),
    [
        (BOMB, "its aliases repeat more than 100,000 values"),
        ("a: &a [*a]", "the alias *a contains itself"),
        ("a: " + "[" * 1000, "nested more than 50 deep"),
        ("[" * 1000 + "]" * 1000, "nested more than 50 deep"),
        ('{"a":' * 1000 + "1" + "}" * 1000, "nested more than 50 deep"),
        ("a: b\n" * 51000, "it has more than 100,000 values"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("accelerate launch a.py" + "\n" * 32000, "no such text"),
    ],
)
def test_hostile_text_is_refused_in_a_sentence(pasted: str, why: str) -> None:
    """Values that multiply, contain themselves or nest without end are refused before they are
    built; what matches a pattern slowly does not."""
    if why == "no such text":
        assert import_drop({}, pasted, BF16).source == "accelerate, a.py"
    else:
        assert why in refusal({}, pasted).what
