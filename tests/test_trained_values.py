"""What a rolling checkpoint was trained with is known without the run's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotrain import artifact
from zerotrain.export.provenance import trained_values
from zerotrain.training.checkpointing.conditions import manifest_content

LORA = {"rank": 4, "alpha": 4.0}
NOTHING = {"lora": None, "peft": None, "frozen_parameters": [], "trainable_parameters": []}


@pytest.fixture
def rolling(tmp_path: Path) -> Path:
    """A rolling checkpoint of a run whose data has two caches."""
    for pixels, length in (("32", None), ("64", 300)):
        made_by = {"stage": "cache_latents", "max_sequence_length": length}
        with artifact.publish(
            tmp_path / "results" / "data" / "cats" / "cache" / pixels, "cache", made_by=made_by
        ) as draft:
            draft.content = {"resolution": int(pixels)}
    folder = tmp_path / "results" / "flowers" / "plain" / "progress" / "step-00000002"
    with artifact.publish(folder, "checkpoint"):
        pass
    return folder


def write_trains(rolling: Path, cache: str, **trains: object) -> None:
    """What a checkpoint says itself."""
    with artifact.publish(rolling, "checkpoint") as draft:
        draft.content = manifest_content({**NOTHING, **trains})
        artifact.write_json(draft.folder / "checkpoint.json", {"ran_on": {"cache": cache}})


@pytest.mark.parametrize(("pixels", "length"), [("32", None), ("64", 300)])
def test_checkpoint_and_cache_say_what_was_trained(rolling, pixels, length, monkeypatch):
    """The cache is found by its identity, wherever the command is called."""
    results = rolling.parents[3]
    cache = artifact.read(results / "data" / "cats" / "cache" / pixels, "cache")
    write_trains(rolling, lora=LORA, long_captions="chunk", cache=cache.identity)
    expected = {**NOTHING, "lora": LORA, "long_captions": "chunk", "max_sequence_length": length}
    assert trained_values(rolling) == expected
    monkeypatch.chdir(rolling.parent)
    assert trained_values(Path(rolling.name)) == expected


def test_the_length_of_prompts_is_left_open_where_the_cache_is_gone(rolling):
    write_trains(rolling, frozen_parameters=["^a"], cache="0" * 64)
    expected = {**NOTHING, "frozen_parameters": ["^a"], "long_captions": "truncate"}
    assert trained_values(rolling) == expected


def test_another_folder_has_no_such_values(tmp_path):
    assert trained_values(tmp_path) is None
