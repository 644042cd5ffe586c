"""The captions of SimpleTuner's datasets are trained as its options say, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.builders.images import write_pictures
from tests.builders.refusals import refusal

from zerotrain.config.read import parse_config
from zerotrain.data.dataset import read_dataset
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.reading import ImportOptions, import_file
from zerotrain.stages.prepare_dataset import prepare_dataset

DATASET: dict[str, Any] = {
    "id": "mine", "type": "local", "instance_data_dir": "photos", "resolution": 32,
    "resolution_type": "pixel", "caption_strategy": "textfile", "instance_prompt": "sks",
}  # fmt: skip
EMBEDS: dict[str, Any] = {"id": "texts", "dataset_type": "text_embeds", "default": True}


def read(
    datasets: list[dict[str, Any]], skip: frozenset[str] = frozenset(), **program: Any
) -> ImportedConfig:
    """A file of datasets, and for keys of the program a config.json that names it."""
    Path("sets.json").write_text(json.dumps(datasets), encoding="utf-8")
    if program:
        settings = {"model_type": "lora", "data_backend_config": "sets.json", **program}
        Path("config.json").write_text(json.dumps(settings), encoding="utf-8")
    return import_file(Path("config.json" if program else "sets.json"), ImportOptions(skip=skip))


def captions(found: ImportedConfig) -> dict[str, Any]:
    """What the section `data` says of captions."""
    others = {"images", "source", "metadata"}
    return {name: one for name, one in found.nested()["data"].items() if name not in others}


def test_filters_are_those_of_the_datasets_embeddings(place: Path) -> None:
    """By name or by default, from a list or a file; the captions are changed by them."""
    write_pictures(place / "photos", ["an arafed dog, blurry\na cat"], count=1)
    Path("filters.txt").write_text("blurry\n\ns/dog/hound/\n", encoding="utf-8")
    other = EMBEDS | {"id": "others", "default": False, "caption_filter_list": ["arafed "]}
    second = {"id": "second", "text_embeds": "others"}
    found = read(
        [DATASET, DATASET | second, EMBEDS | {"caption_filter_list": "filters.txt"}, other]
    )
    first, last = found.nested()["data"]["sources"]
    assert first["caption_filter_list"] == ["blurry"]
    assert first["caption_replacements"] == {"dog": "hound"}
    assert last["caption_filter_list"] == ["arafed"]
    run = {"run": "a", "base": "nano", "phases": [{"name": "a", "until": 1}], **found.nested()}
    prepare_dataset(parse_config(run, "imported").data, place / "made")
    assert [one.captions for one in read_dataset(place / "made").samples] == [
        ("an arafed hound", "a cat"), ("an dog, blurry", "a cat"),
    ]  # fmt: skip


def test_a_regular_expression_is_refused_and_skipped_by_name(place: Path) -> None:
    """It would remove other words here."""
    datasets = [DATASET, EMBEDS | {"caption_filter_list": ["this .* has a"]}]
    assert "'this .* has a' is a regular expression" in refusal(read, datasets)
    found = read(datasets, frozenset({"data_backend_config.caption_filter_list"}))
    assert "caption_filter_list" not in captions(found)


def test_the_programs_keys_are_those_of_datasets_without_them(place: Path) -> None:
    """And only_instance_prompt counts for all."""
    bare = {name: one for name, one in DATASET.items() if name != "instance_prompt"}
    found = read([bare, EMBEDS], prepend_instance_prompt=True, instance_prompt="sks")
    assert captions(found)["caption_prefix"] == "sks"
    own = DATASET | {"only_instance_prompt": False}
    found = read([own, EMBEDS], only_instance_prompt=True)
    assert captions(found) == {"caption_strategy": "instanceprompt", "instance_prompt": "sks"}


def test_the_part_of_a_hub_dataset_is_chosen(place: Path) -> None:
    """Else the wrong images would be trained on."""
    own = {"type": "huggingface", "dataset_name": "a/b", "caption_strategy": "huggingface"}
    hub = DATASET | own | {"split": "validation", "revision": "v1"}
    found = read([hub, EMBEDS])
    keys = ("path", "hub_split", "revision", "caption_column")
    assert [found.values[f"data.{key}"] for key in keys] == ["a/b", "validation", "v1", "caption"]
    # Each of several is a folder of its own, and the call which brings it has the part.
    found = read([hub, hub | {"id": "others", "split": "test"}, EMBEDS])
    assert [one["images"] for one in found.nested()["data"]["sources"]] == [
        "data/a-b-validation-v1", "data/a-b-test-v1",
    ]  # fmt: skip
    told = [one.reason for one in found.notes if one.key.endswith("dataset_name")]
    assert "load_dataset('a/b', split='validation', revision='v1')" in told[0]
    found = read([hub | {"dataset_name": "./dogs"}, EMBEDS])
    assert found.nested()["data"]["images"] == "./dogs"
    [note] = [one for one in found.notes if one.key.endswith(".split")]
    assert (note.outcome, note.reason) == ("changed", "every row in ./dogs is trained on")


def test_a_dataset_finds_its_embeddings_by_any_id(place: Path) -> None:
    """As text, as the filters are listed; else they would be left out unsaid."""
    embeds = EMBEDS | {"id": 1, "caption_filter_list": ["blurry"], "default": False}
    others = EMBEDS | {"id": "others"}
    found = read([DATASET | {"text_embeds": 1}, embeds, others])
    assert captions(found)["caption_filter_list"] == ["blurry"]
    read([DATASET | {"text_embeds": ["a list"]}, embeds, others])
