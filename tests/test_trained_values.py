"""What a rolling checkpoint was trained with is known without the run's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.builders.runs import make_config

from zerotrain import artifact
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.export.trained_values import trained_values
from zerotrain.launch.files import write_run_yaml
from zerotrain.launch.preset import Preset
from zerotrain.launch.resolve import resolve_phase

LORA = {"rank": 4, "alpha": 4.0}
NOTHING = {"peft": None, "frozen_parameters": [], "trainable_parameters": []}


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


def write(rolling: Path, **fingerprint: object) -> None:
    """What an earlier version wrote next to the steps."""
    (rolling.parent / "fingerprint.json").write_text(json.dumps(fingerprint))


def write_trains(rolling: Path, cache: str, **trains: object) -> None:
    """What a checkpoint says itself."""
    with artifact.publish(rolling, "checkpoint") as draft:
        draft.content = {"trains": trains}
        artifact.write_json(draft.folder / "checkpoint.json", {"ran_on": {"cache": cache}})


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(("pixels", "length"), [("32", None), ("64", 300)])
def test_checkpoint_and_cache_say_what_was_trained(rolling, pixels, length, earlier, monkeypatch):
    """The cache is found by its identity, wherever the command is called."""
    results = rolling.parents[3]
    cache = artifact.read(results / "data" / "cats" / "cache" / pixels, "cache")
    (write if earlier else write_trains)(
        rolling, lora=LORA, long_captions="chunk", cache=cache.identity
    )
    expected = {"lora": LORA, **NOTHING, "long_captions": "chunk", "max_sequence_length": length}
    assert trained_values(rolling) == expected
    monkeypatch.chdir(rolling.parent)
    assert trained_values(Path(rolling.name)) == expected


def test_the_length_of_prompts_is_left_open_where_the_cache_is_gone(rolling):
    write(rolling, lora=None, frozen_parameters=["^a"], cache="0" * 64)
    expected = {"lora": None, **NOTHING, "frozen_parameters": ["^a"], "long_captions": "truncate"}
    assert trained_values(rolling) == expected


def test_of_accepted_progress_the_launch_counts(rolling):
    """Its own fingerprint is gone; without a launch nothing is known."""
    write(rolling, accepted=True)
    assert trained_values(rolling) is None
    config = make_config(
        run="flowers",
        data={"source": "digits"},
        lora=LORA,
        phases=[{"name": "plain", "until": 3}],
        train={"long_captions": "chunk"},
    )
    launch = rolling.parents[1] / "launch"
    launch.mkdir()
    phase = resolve_phase(LaunchSettings.of(config, "plain"), Preset("torch", "torch"), 10, None)
    write_run_yaml(phase, launch / "run.yaml")
    expected = {"lora": config.adapter_values(), **NOTHING, "long_captions": "chunk"}
    assert trained_values(rolling) == expected


def test_another_folder_has_no_such_values(tmp_path):
    assert trained_values(tmp_path) is None
