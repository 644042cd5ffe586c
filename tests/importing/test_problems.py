"""An import names everything that stops it at once, and leaves out what the user takes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.builders.commands import run_zerotrain
from tests.builders.refusals import refusal

from zerotrain.errors import PipelineError
from zerotrain.importers.command_line import import_command
from zerotrain.importers.imported_config import config_text, report
from zerotrain.importers.key_values import asks_nothing
from zerotrain.importers.reading import ImportOptions, import_file
from zerotrain.launch import keys
from zerotrain.launch.keys import Key

PRESETS = Path(__file__).parents[2] / "config" / "launch"
BROKEN = {
    "zero_optimization": {"stage": 2, "overlap_com": True},
    "pipeline": {"stages": 2},
    "gradient_accumulation_steps": "many",
    "elasticity": {"enabled": True},
    "autotuning": {"enabled": False},
}
ALL = """\
ERROR: ds.json: 4 problems:
  - unknown key zero_optimization.overlap_com (did you mean zero_optimization.overlap_comm? \
correct it or take it out (`--skip zero_optimization.overlap_com`); docs/importing.md lists all \
that are known)
  - pipeline: {'stages': 2} cannot be honoured: processes split the batch, and nothing else \
(`--skip pipeline` imports the rest, if the training is meant without it)
  - gradient_accumulation_steps: must be a whole number (found 'many') (give \
gradient_accumulation_steps such a value, or take it out of the file)
  - elasticity: {'enabled': True} cannot be honoured: removed from DeepSpeed \
(`--skip elasticity` imports the rest, if the training is meant without it)
  Hint: correct them, or take keys out by `--skip KEY --skip KEY`; the report lists what was \
skipped"""


def write(place: Path, config: Any) -> Path:
    """The file's name, in the folder where the import runs."""
    (place / "ds.json").write_text(json.dumps(config))
    return Path("ds.json")


def test_a_file_names_all_its_problems(place: Path) -> None:
    """A section that is switched off is none."""
    text = refusal(import_file, write(place, BROKEN), ImportOptions(presets=PRESETS))
    assert text == ALL


def test_a_command_names_all_its_problems(place: Path) -> None:
    """Unknown flags and values of another kind; an unknown script has no flags to compare."""
    text = "accelerate launch train_dreambooth_flux.py --pretrained_model_name_or_path a/b"
    with pytest.raises(PipelineError) as caught:
        import_command(
            f"{text} --rang 4 --learning_rate high --scale_lr", ImportOptions(presets=PRESETS)
        )
    assert "4 problems" not in str(caught.value)
    for found in ("3 problems", "unknown key rang", "(found 'high')", "scale_lr: True"):
        assert found in str(caught.value)
    with pytest.raises(PipelineError) as caught:
        import_command(
            "accelerate launch mine.py --speed 4 --size 3", ImportOptions(presets=PRESETS)
        )
    assert "mine.py: not a script that is read" in str(caught.value)


def test_skipped_keys_are_taken_out_and_reported(place: Path) -> None:
    """As if the file did not have them; the report and the configuration say so."""
    skip = frozenset(
        {"zero_optimization.overlap_com", "pipeline", "gradient_accumulation_steps", "elasticity"}
    )
    found = import_file(write(place, BROKEN), ImportOptions(presets=PRESETS, skip=skip))
    plain = import_file(
        write(place, {"zero_optimization": {"stage": 2}}), ImportOptions(presets=PRESETS)
    )
    assert found.values == plain.values
    assert {note.key for note in found.notes if note.outcome == "skipped by you"} == skip
    assert (
        "skipped by you gradient_accumulation_steps many  "
        "(--skip: the result may differ from the source's)"
    ) in report(found.notes)
    assert "# Skipped by you (--skip): the training may be another without it:" in config_text(
        found
    )


def test_a_skip_without_a_key_is_a_mistake(place: Path) -> None:
    """It may be a mistyped one, so that the key it means would be read after all."""
    path = write(place, {"zero_optimization": {"stage": 2}})
    with pytest.raises(PipelineError, match=r"--skip zero_optimization.stag: the source has no"):
        import_file(
            path, ImportOptions(presets=PRESETS, skip=frozenset({"zero_optimization.stag"}))
        )


def test_the_command_line_takes_skips(place: Path) -> None:
    """With or without dashes before the key, several."""
    write(place, {"zero_optimization": {"stage": 0}, "pipeline": {"stages": 2}, "elastic": 1})
    words = ("ds.json", "--skip", "pipeline", "--skip=--elastic")
    done = run_zerotrain("launch", "import", *words)
    assert done.returncode == 0, done.stderr
    assert "preset: torch" in done.stdout
    assert done.stderr.count("skipped by you") == 2


def test_off_is_not_the_default_everywhere() -> None:
    """A switch that is on by default asks for something when it is off."""
    on, off = (
        Key("a", "boolean", "refused", default=True),
        Key("b", "boolean", "dropped", default=False),
    )
    assert [asks_nothing(on, value) for value in (True, False)] == [True, False]
    assert [asks_nothing(off, value) for value in (True, False)] == [False, True]
    word = Key("c", "string", "refused", default="none")
    assert [asks_nothing(word, value) for value in ("", "None", "x")] == [True, True, False]


def test_of_thousands_of_unknown_keys_near_names_are_looked_up_for_the_first(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 20; a lookup for each took longer than a person waits."""
    looked: list[str] = []
    monkeypatch.setattr(keys, "near_keys", lambda name, known: looked.append(name) if known else [])
    config = {"zero_optimization": {"stage": 2}, **{f"k{number}": 1 for number in range(2000)}}
    file = write(place, config)
    assert "2000 problems" in refusal(import_file, file, ImportOptions(precision="bf16"))
    assert looked == [f"k{number}" for number in range(20)]
