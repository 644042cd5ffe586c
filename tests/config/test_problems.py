"""A wrong file is answered with line, key and a hint that helps; no two sections are confused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from tests.builders.runs import make_run

from zerotrain.config import problems
from zerotrain.config.problems import TOP, section_keys
from zerotrain.config.read import parse_config, read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.section import Memory
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError

FILE = """\
run: flowers
base: nano
data:
  images: photos
train:
  resolution: 64
launch:
  preset: torch
phases:
  - name: plain
    until: 300
  - name: offload
    until: 700
    launch: zero2_offload
    learning_rate: 1e-4
"""
SECTIONS = section_keys()
SAMPLE: dict[str, Any] = {
    "lora": {}, "validation": {}, "launch.fp16": {}, "resume_from_checkpoint": {"folder": "x"},
}  # fmt: skip
"""What a section needs in addition to the key that is in the wrong one."""


def few(section: type[BaseModel]) -> str:
    """The first keys of a section, as a hint lists them."""
    keys = [*section.model_fields]
    more = f"{len(keys) - 12} more; docs/configuration.md lists all"
    return f"{', '.join(keys[:12])} and {more}"


def refusal(path: Path, text: str | bytes) -> PipelineError:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PipelineError) as caught:
        read_config(path)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "sentences", "hint"),
    [
        ({"train:": "trian:"}, ["line 5: trian: unknown key"], "did you mean train?"),
        ({"data:": "dta:"}, ["line 3: dta: unknown key"], "did you mean data?"),
        ({"run:": "rum:"}, ["line 1: rum: unknown key (found 'flowers')"], "did you mean run?"),
        ({"phases:": "phase:"}, ["line 10: phase: unknown key"], "did you mean phases?"),
        (
            {"train:": "trian:", "resolution: 64": "resolution: big"},
            [
                "line 5: trian: unknown key",
                "train.resolution: must be a whole number (found 'big')",
            ],
            "did you mean train?; docs/configuration.md explains the keys of `train`",
        ),
        # What it means is there as well: nothing is taken for it.
        (
            {"data:": "trian: {packing: true}\ndata:"},
            ["line 3: trian: unknown key"],
            "did you mean train?",
        ),
    ],
)
def test_a_mistyped_section_has_no_errors_that_only_follow_from_it(
    tmp_path: Path, changes: dict[str, str], sentences: list[str], hint: str
) -> None:
    """It is read as the section that is meant; what is wrong inside of it is said as well."""
    text = FILE.replace("preset: torch", "num_processes: 8").replace(
        "resolution: 64", "resolution: 64\n  global_batch_size: 8"
    )
    for old, new in changes.items():
        text = text.replace(old, new, 1)
    error = refusal(tmp_path / "mine.yaml", text)
    assert error.what == f"{tmp_path / 'mine.yaml'}: " + "\n       ".join(sentences)
    assert error.hint == hint


@pytest.mark.parametrize(
    ("old", "new", "sentence", "hint"),
    [
        ("resolution: 64", "resolution: big", "line 6: train.resolution: must be a whole number "
         "(found 'big')", "docs/configuration.md explains the keys of `train`"),
        ("resolution: 64", "resolution: 65", "line 6: train.resolution: must be a multiple of 8 "
         "(found 65)", "docs/configuration.md explains the keys of `train`"),
        ("resolution: 64", "resolution:", "line 6: train.resolution: must be a whole number "
         "(it is empty)", "docs/configuration.md explains the keys of `train`"),
        ("resolution: 64", "learning_rat: 1", "line 6: train.learning_rat: unknown key (found 1)",
         "did you mean learning_rate?"),
        ("  resolution: 64", "  1: 64", "line 6: train.1: unknown key", "known keys here: "
         + few(TrainConfig)),
        ("run: flowers", "run: flowers\n2.5: x", "line 2: 2.5: unknown key", "known keys here: "
         + few(RunConfig)),
        ("preset: torch", "preset: zero2\n  deepspeed: {1: 2}", "line 9: launch.deepspeed.1: must "
         "be text; put it in quotes (found 1)",
         "docs/configuration.md explains the keys of `launch`"),
        ("preset: torch", "preset: zero_2", "line 8: launch.preset: must be one of torch, zero1, "
         "zero2, zero2_offload, zero3, zero3_offload, zero3_nvme, auto (found 'zero_2')",
         "did you mean zero2?"),
        ("launch: zero2_offload", "launch: zero2offload", "line 14: phases.1.launch.preset: must "
         "be one of torch, zero1, zero2, zero2_offload, zero3, zero3_offload, zero3_nvme, auto "
         "(found 'zero2offload')", "did you mean zero2_offload?"),
        ("learning_rate: 1e-4", "learning_rate: -1", "line 15: phases.1.learning_rate: must be "
         "above 0 (found -1)", "docs/configuration.md explains the keys of `train`"),
        ("    until: 700\n", "", "line 12: phases.1.until: missing",
         "add `until:` to `phases.1`"),
        ("run: flowers", "run: a/b", "line 1: run: must be letters, digits, - and _, and not begin "
         "with - or _ (found 'a/b')", "docs/configuration.md explains its keys"),
        ("run: flowers", "run: flowers\nfamily: sdx", "line 2: family: must be one of sdxl, flux, "
         "qwen_image, sd3, causal_lm, seq2seq_lm (found 'sdx')", "did you mean sdxl?"),
        ("resolution: 64", "lr_scheduler: cosin", "line 6: train.lr_scheduler: no such schedule; "
         "the nearest are cosine", "docs/configuration.md explains the keys of `train`"),
        ("name: offload", "name: plain", "line 9: phases: the name 'plain' stands twice; names are "
         "folders", "docs/configuration.md explains its keys"),
        ("resolution: 64", "packing: true", "line 6: packing is a key of text families; remove it: "
         "sdxl has no such thing", "docs/configuration.md explains its keys"),
        ("launch: zero2_offload", "launch: {preset: zero2, dynamo_mode: max-autotune}",
         "line 14: phases.1.launch: dynamo_mode max-autotune and dynamo_backend no: only inductor "
         "has modes", "docs/configuration.md explains the keys of `launch`"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, sentence: str, hint: str
) -> None:
    """File, line, key and value; the hint has something to do in it."""
    path = tmp_path / "flowers.yaml"
    assert FILE.count(old) == 1
    error = refusal(path, FILE.replace(old, new))
    assert error.what.startswith(f"{path}: {sentence}")
    assert "\n" not in error.what
    assert error.hint == hint


@pytest.mark.parametrize("key", ["run: flowers", "name: plain"])
def test_a_name_is_short_enough_for_a_folder_and_its_draft(tmp_path: Path, key: str) -> None:
    """File systems take 255 bytes."""
    named = FILE.replace(key, f"{key.partition(' ')[0]} {'a' * 200}")
    (tmp_path / "flowers.yaml").write_text(named)
    read_config(tmp_path / "flowers.yaml")
    error = refusal(tmp_path / "flowers.yaml", named.replace("aaa", "aaaa", 1))
    assert "name: must have at most 200 letters" in error.what.replace("run:", "name:")


def test_every_problem_is_named_with_its_own_line(tmp_path: Path) -> None:
    """Those of one section and those that sections have with each other, each once."""
    path = tmp_path / "flowers.yaml"
    text = FILE.replace("resolution: 64", "resolution: 64.5").replace("preset: torch", "preset: no")
    error = refusal(path, text)
    assert [line.split(":")[0].strip() for line in error.what.removeprefix(f"{path}: ").split("\n")
            ] == ["line 6", "line 8"]  # fmt: skip
    text = FILE.replace("resolution: 64", "packing: true\n  save_every: 10_000_000")
    text += "evaluate:\n  judge: nearest_neighbour\n"
    assert refusal(path, text).what == (
        f"{path}: line 6: packing is a key of text families; remove it: sdxl has no such thing\n"
        "       line 18: evaluate.judge needs held-out images: set data.holdout, say 0.5\n"
        "       line 7: phase plain: save_every 10000000, but the run ends at step 700: nothing "
        'would be saved before the end; give at most 700, or a time such as "30 min"'
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a:\n\tb: 1\n", "line 2, column 1: no value begins with this character: put the text in "
         "quotes, and indent with spaces instead of tabs"),
        ("a:\n  b: 1\n\tc: 2\n", "line 3, column 1: a tab is in the indentation: indent with "
         "spaces"),
        ("a: x\n\tb: 1\n", "line 2, column 1: a tab is in the indentation: indent with spaces"),
        ("run: x\n? {a: 1}\n: b\n", "line 2, column 3: a list or a mapping is no key: put the text "
         "in quotes"),
        ("a: b: c\n", "line 1, column 5: a second `: ` in one line, or more indentation than the "
         "line above allows: put a text that holds `: ` in quotes"),
        ("a: 1\nb\nc: 2\n", "line 3, column 1: a key without `:` in this line or the one above"),
        ("a: 1\na: 2\n", "line 2, column 1: the key a stands twice: remove one of them"),
        ("a: 'x\nb: 2\n", "line 3, column 1: a quote is opened and not closed"),
        ("a: [1, 2\nb: 3\n", "line 2, column 2: a list is opened with [ and not closed, or an "
         "entry has no comma"),
        ("a: {b: 1\n", "line 2, column 1: a mapping is opened with { and not closed, or an entry "
         "has no comma"),
        ("a: *x\n", "line 1, column 4: a value that begins with * is YAML's alias: put the text in "
         "quotes"),
        ("a:\n  b: 1\n c: 2\n", "line 3, column 2: the indentation is not that of the lines above"),
        ("- a\nb: 1\n", "line 2, column 1: a list ends here and a key follows with the same "
         "indentation"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_yaml_is_explained_in_our_words(
    tmp_path: Path, text: str, sentence: str
) -> None:
    """Line, column and what to look for, not the reader's own terms."""
    path = tmp_path / "flowers.yaml"
    assert refusal(path, text).what == f"{path}: not valid YAML: {sentence}"


def test_a_file_in_another_encoding_is_named_with_its_first_wrong_byte(tmp_path: Path) -> None:
    """An editor of Windows saves umlauts in another encoding."""
    path = tmp_path / "flowers.yaml"
    error = refusal(path, b"run: bl\xfcte\n")
    assert error.what == f"{path}: byte 8 is not UTF-8: save the file as UTF-8"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "is empty"),
        ("# a comment\n", "is empty"),
        ("- run\n", "holds a list, not keys with values"),
        ("run\n", "holds one value, not keys with values"),
    ],
)
def test_a_file_without_keys_says_what_it_holds(tmp_path: Path, text: str, found: str) -> None:
    """No name of a Python type."""
    path = tmp_path / "flowers.yaml"
    assert refusal(path, text).what == f"{path}: {found}"


def _misplaced(every: bool) -> list[tuple[str, str]]:
    """Every key in each section that does not have it, or in one of them: in each a few keys."""
    found: list[tuple[str, str]] = []
    for number, key in enumerate(sorted(set().union(*SECTIONS.values()))):
        others = [
            section
            for section in SECTIONS
            if key not in SECTIONS[section]
            and not (section == "phases" and key in SECTIONS["train"])
            and section not in ("train.param_groups", "train.tread_config.routes")
        ]
        chosen = others if every else [others[number % len(others)]]
        found += [(section, key) for section in chosen]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_key_of_another_section_is_named_with_it(every: bool) -> None:
    """The hint names each section that has it."""
    for section, key in _misplaced(every):
        homes = [home for home in SECTIONS if key in SECTIONS[home]]
        raw: dict[str, Any] = make_run(run="flowers", phases=[{"name": "plain", "until": 300}])
        inner: dict[str, Any] = raw
        if section == "phases":
            inner = raw["phases"][0]
        elif section == "data.sources":
            inner = {"name": "one", "images": "photos"}
            raw["data"] = {"sources": [inner]}
        elif section != TOP:
            for part in section.split("."):
                inner = inner.setdefault(part, dict(SAMPLE.get(section, {})))
        inner[key] = "x"
        with pytest.raises(PipelineError) as caught:
            parse_config(raw, "test")
        assert f"{key}: unknown key (found 'x')" in caught.value.what, (section, key)
        named = [home if home == TOP else f"`{home}`" for home in homes]
        assert f"{key} is a key of " in caught.value.hint, (section, key)
        assert all(home in caught.value.hint for home in named), (section, key)


def test_the_misplaced_key_of_the_issue() -> None:
    """launch.gradient_checkpointing was answered with cpu_checkpointing, a near name."""
    raw = make_run(
        run="flowers",
        phases=[{"name": "plain", "until": 300}],
        launch={"gradient_checkpointing": True},
    )
    with pytest.raises(PipelineError) as caught:
        parse_config(raw, "test")
    assert caught.value.hint == ("gradient_checkpointing is a key of `train`: move it to `train:`")


def test_a_size_of_hundreds_of_digits_is_refused() -> None:
    """As a number it would be infinite."""
    for size in ("9" * 400, 10**400, "1." + "0" * 400):
        with pytest.raises(ValidationError, match="must be a size such as"):
            TypeAdapter(Memory).validate_python(size)
    assert TypeAdapter(Memory).validate_python("1.5 GiB") == 3 * 2**29
    assert TypeAdapter(Memory).validate_python(2**70) == 2**70


def test_of_thousands_of_unknown_keys_the_first_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near names are looked up for 20; a lookup for each took 14 s for 2,000 keys."""
    looked: list[object] = []
    monkeypatch.setattr(problems, "did_you_mean", lambda name, known: looked.append(name) or "")
    error = refusal(tmp_path / "a.yaml", FILE + "".join(f"k{n}: 1\n" for n in range(2000)))
    assert error.what.startswith(f"{tmp_path / 'a.yaml'}: 2,000 problems, such as these:\n")
    assert looked == [f"k{number}" for number in range(20)]
