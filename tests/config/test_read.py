"""Wrong configurations are refused with file, key, value and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.builders.runs import make_config, make_run

from zerotrain.config.read import parse_config, read_config
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError

ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 2}


def raw(**changes: Any) -> dict[str, Any]:
    """The smallest configuration, with changes; None removes a key."""
    found: dict[str, Any] = make_run(run="flowers", phases=[{"name": "plain", "until": 300}])
    found |= changes
    return {key: value for key, value in found.items() if value is not None}


def parse(**changes: Any) -> RunConfig:
    return parse_config(raw(**changes), "config/flowers.yaml")


def refusal(**changes: Any) -> str:
    with pytest.raises(PipelineError) as caught:
        parse(**changes)
    text = str(caught.value)
    assert text.startswith("ERROR: config/flowers.yaml: ")
    assert "Value error" not in text
    return text


def test_unknown_key_of_a_phase_is_named_as_the_file_has_it() -> None:
    """A phase is flat in the file, and so it is in the message."""
    text = refusal(phases=[{"name": "plain", "until": 300, "learning_rte": 1}])
    assert "phases.0.learning_rte: unknown key (found 1)" in text
    assert "did you mean learning_rate?" in text


def test_missing_key_is_named() -> None:
    """What a file has to hold is named with the line to add."""
    text = refusal(base=None)
    assert "base: missing" in text
    assert "add `base:` to the file" in text


@pytest.mark.parametrize("amount", ["1234567", "12.34567"])
def test_until_keeps_every_digit(amount: str) -> None:
    """Epochs are not rounded on their way to steps."""
    phase = parse(phases=[{"name": "plain", "until": f"{amount} epochs"}]).phases[0]
    assert phase.until == f"{amount} epochs"


@pytest.mark.parametrize("section", ["cache", "train", "launch", "export", "evaluate"])
def test_section_of_comments_alone_is_an_empty_one(section: str) -> None:
    """Its keys may all be commented out, as `zerotrain new` writes them."""
    assert parse_config({**raw(), section: None}, "config/flowers.yaml") == parse()


def test_launch_of_comments_alone_is_the_runs_own() -> None:
    """In a phase too, an empty section changes nothing."""
    phases = [{"name": "plain", "until": 300, "launch": None}]
    config = parse(launch={"preset": "zero2_offload"}, phases=phases)
    assert config.phases[0].launch.preset == "zero2_offload"


def test_mistake_of_the_run_is_not_repeated_for_each_phase() -> None:
    """A value that phases only take over is named once."""
    assert refusal(train={"resolution": "big"}).count("resolution: ") == 1


def test_mistake_of_a_phase_is_named_next_to_the_same_one_of_the_run() -> None:
    """Another wrong value of the same key is a mistake of its own."""
    phase = {"name": "plain", "until": 300, "resolution": "huge"}
    text = refusal(train={"resolution": "big"}, phases=[phase])
    assert all(f"(found '{value}')" in text for value in ("big", "huge"))


def test_folder_is_no_configuration(tmp_path: Path) -> None:
    """What cannot be read is reported without a traceback."""
    with pytest.raises(PipelineError, match="cannot be read: is a folder, not a file"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "number"), [("1e-4", 1e-4), ("0.5", 0.5), ("1e-05", 1e-5), (1, 1.0)]
)
def test_number_like_text_is_a_number(text: str, number: float) -> None:
    """YAML 1.1 readers and command lines leave 1e-4 as text."""
    assert parse(train={"learning_rate": text}).train.learning_rate == number


@pytest.mark.parametrize("text", ["1e3", "1000", 1000.0, "1000.0"])
def test_number_like_text_is_a_whole_number(text: str | float) -> None:
    """Whole numbers too, and only where they are whole."""
    long = [{"name": "plain", "until": 1000}]
    assert parse(train={"save_every": text}, phases=long).train.save_every == 1000
    assert "train.save_every" in refusal(train={"save_every": "1000.5"})


@pytest.mark.parametrize(
    ("until", "meant"),
    [
        (300, "300 steps"),
        ("300", "300 steps"),
        ("1e3", "1000 steps"),
        ("1 step", "1 steps"),
        ("3 epochs", "3 epochs"),
        ("1 epoch", "1 epochs"),
        ("0.5 epochs", "0.5 epochs"),
        ("5000 samples", "5000 samples"),
    ],
)
def test_until_takes_steps_epochs_and_samples(until: str | int, meant: str) -> None:
    """However it is written, it comes to one spelling."""
    assert parse(phases=[{"name": "plain", "until": until}]).phases[0].until == meant


@pytest.mark.parametrize(
    "until",
    [0, -1, "0 epochs", "3 weeks", "1.5", "", None, True, ".", "inf epochs", "1e400"],
)
def test_until_refuses_what_ends_nowhere(until: object) -> None:
    """The message shows the three ways to write it."""
    text = refusal(phases=[{"name": "plain", "until": until}])
    assert 'phases.0.until: must be a step (300), "3 epochs" or "5000 samples"' in text


def test_launch_is_a_name_or_a_mapping() -> None:
    """Both spellings give one launch, on top of the run's own."""
    for launch in ("zero2_offload", {"preset": "zero2_offload"}):
        config = parse(
            launch={"mixed_precision": "bf16"},
            phases=[{"name": "plain", "until": 1, "launch": launch}],
        )
        assert config.phases[0].launch.preset == "zero2_offload"
        assert config.phases[0].launch.mixed_precision == "bf16"


def test_mixed_precision_no_is_not_false() -> None:
    """YAML 1.1 reads a bare no as false."""
    assert parse(launch={"mixed_precision": False}).launch.mixed_precision == "no"


def test_phase_inherits_and_changes_training_values() -> None:
    """A phase names only what it changes."""
    config = parse(
        train={"learning_rate": 1e-3, "global_batch_size": 32},
        phases=[
            {"name": "plain", "until": 1},
            {"name": "large", "until": 2, "global_batch_size": 64},
        ],
    )
    assert [phase.train.global_batch_size for phase in config.phases] == [32, 64]
    assert [phase.train.learning_rate for phase in config.phases] == [1e-3, 1e-3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": [{"name": "base", "until": 1}]}, "'base' is a folder of the run"),
        ({"phases": []}, "phases: "),
        ({"phases": "plain"}, "phases: "),
        ({"phases": ["plain"]}, "phases.0: "),
        ({"run": "data"}, "'data' is the folder of the datasets"),
        (
            {"train": {"save_every": 11}, "phases": [{"name": "a", "until": 10}]},
            "phase a: save_every 11, but the run ends at step 10: nothing would be saved",
        ),
        ({"train": {"ema_decay": 0.99}}, "ema_decay says how a moving average is kept"),
        ({"validation": {}}, "phase plain: validation measures held-out samples"),
        (
            {"validation": {"prompts": ["x"], "early_stopping_patience": 2}},
            "phase plain: validation measures held-out samples",
        ),
        (
            {"validation": {"prompts": ["x"], "metric_for_best_model": "val_loss_ema"}},
            "val_loss_ema is that of averaged weights",
        ),
        (
            {"validation": {"prompts": ["x"], "early_stopping_threshold": 1}},
            "early_stopping_patience, which is not set",
        ),
        (
            {"family": "sd3", "validation": {"prompts": ["x"], "scheduler": "euler"}},
            "validation.scheduler: euler is a sampler of sdxl",
        ),
        ({"validation": {"eval_step": 5}}, "validation.eval_step: unknown key"),
        ({"run": "../up"}, "run: "),
        ({"data": {}}, "data: source: folder needs `images`"),
        ({"data": {"source": "digits", "images": "x"}}, "digits brings its own images"),
        ({"data": {"images": "x", "holdout": 1}}, "data.holdout: "),
        ({"train": {"lr_warmup_steps": 5, "lr_warmup_ratio": 0.1}}, "not both"),
        ({"train": {"global_batch_size": 3, "gradient_accumulation_steps": 2}}, "no multiple of"),
        ({"train": {"learning_rate": "nan"}}, "train.learning_rate: "),
        ({"evaluate": {"judge": "nearest_neighbour"}}, "set data.holdout"),
        (
            {"family": "sd3", "evaluate": {"scheduler": "euler"}},
            "euler is a sampler of sdxl; the family sd3 has its base's alone",
        ),
        ({"train": {"resolution": 20}}, "train.resolution: "),
        ({"run": 2024}, "run: must be text; put it in quotes"),
        ({"cache": 3}, "cache: must be keys with values"),
        ({"vae": "identity", "base": "nano"}, "the nano model of sdxl takes the latents of its"),
        ({"vae": "identity", "family": "causal_lm"}, "vae: the family causal_lm has no images"),
        (
            {"cache": {"max_sequence_length": 64}},
            "is a key of flux, qwen_image, sd3; the family sdxl has no such choice",
        ),
        (
            {"family": "sd3", "train": {"long_captions": "chunk"}},
            "chunk is sdxl's; sd3 has a text encoder that reads more: set cache.max_s",
        ),
        (
            {
                "phases": [
                    {"name": "a", "until": 1},
                    {"name": "b", "until": 2, "long_captions": "chunk"},
                ]
            },
            "long_captions is the same in all phases: they share a cache",
        ),
        (
            {"family": "qwen_image", "train": {"tread_config": {"routes": [ROUTE]}}},
            "tread_config is a key of flux, sd3; remove it: in the blocks of qwen_image",
        ),
        (
            {"family": "flux", "train": {"tread_config": {"routes": []}}},
            "train.tread_config.routes: ",
        ),
        ({"lora": {"use_dora": True}, "launch": {"zero3_init": True}}, "has not read yet"),
        ({"lora": {"fused_layers": True}}, "lora.fused_layers is for flux: the layers of sdxl are"),
        (
            {"family": "flux", "lora": {"fused_layers": True, "dropout": 0.1}},
            "dropout 0.1 would drop other values for each of the fused_layers",
        ),
        (
            {"family": "flux", "lora": {"fused_layers": True, "use_dora": True}},
            "use_dora is for layers one by one",
        ),
        ({"data": {"images": "x", "max_pixels": 4096}}, "resolution 1024 needs 1048576 pixels"),
        (
            {"data": {"images": "x", "aspect_buckets": {"alignment": 2048}}},
            "alignment: 2048 is more than the resolution of phase plain, 1024",
        ),
        (
            {"data": {"images": "x", "aspect_buckets": {"sizes": [[2048, 1024]]}}},
            "the smallest, 2048x1024, has more pixels than 1024x1024",
        ),
        (
            {
                "family": "flux",
                "data": {"images": "x", "conditioning_images": "y", "aspect_buckets": True},
                "evaluate": {"sizes": [[1216, 832]]},
            },
            "with conditioning images all sampled images are squares",
        ),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], message: str) -> None:
    """Values that cannot work, alone or together, are refused before anything runs."""
    assert message in refusal(**changes)


def test_a_lora_of_layers_one_by_one_is_what_it_was_before_the_key() -> None:
    """fused_layers stands in run.yaml and in digests only where it is on."""
    found = [
        make_config(family="flux", base="x", data={"images": "x"}, lora=lora).adapter_values()
        for lora in ({"fused_layers": False}, {"fused_layers": True})
    ]  # fmt: skip
    assert found[1] == {**found[0], "fused_layers": True}
    assert "fused_layers" not in found[0]


EDITS: dict[str, Any] = {
    "family": "flux",
    "data": {"images": "x", "conditioning_images": "y", "holdout": 0.1},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate": {"prompts": ["a"]}}, "evaluate.prompts: samples have conditioning images"),
        (
            {"evaluate": {"prompts": ["a"], "conditioning_images": [["1.png"], ["2.png"]]}},
            "a list of files for each prompt; it has 2, and `prompts` has 1",
        ),
        ({"evaluate": {"conditioning_images": [["1.png"]]}}, "it has 1, and `prompts` has"),
        ({"evaluate": {"conditioning_images": [[]], "prompts": ["a"]}}, "conditioning_images.0"),
        (
            {"validation": {"prompts": ["a"]}},
            "phase plain: validation.prompts: samples have conditioning images",
        ),
        (
            {
                "data": {"images": "x", "holdout": 0.1},
                "validation": {"prompts": ["a"], "conditioning_images": [["1.png"]]},
            },
            "validation.conditioning_images: samples have no conditioning images; remove it",
        ),
    ],
)
def test_prompts_have_conditioning_images_where_samples_have_them(changes, message) -> None:
    assert message in refusal(**{**EDITS, **changes})


def test_what_says_nothing_of_conditioning_images_is_as_before() -> None:
    """No new key in what rules and run.yaml compare."""
    found = parse(data={"images": "x", "holdout": 0.1}, validation={"prompts": ["a"]})
    assert "conditioning_images" not in found.evaluate.model_dump()
    assert found.phases[0].validation is not None
    assert "conditioning_images" not in found.phases[0].validation.model_dump()
    assert found.validation_prompts == ["a"]


TEXT = {"family": "causal_lm", "data": {"source": "sums"}}
TO_IMAGES, TO_TEXT = "means something to images alone", "means something to text alone"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (TEXT | {"evaluate": {"images_per_prompt": 4}}, f"evaluate.images_per_prompt {TO_IMAGES}"),
        (
            TEXT | {"evaluate": {"num_inference_steps": 9}},
            f"evaluate.num_inference_steps {TO_IMAGES}",
        ),
        (TEXT | {"evaluate": {"guidance_scale": 2}}, f"evaluate.guidance_scale {TO_IMAGES}"),
        (TEXT | {"cache": {"dtype": "fp32"}}, f"cache.dtype {TO_IMAGES}"),
        (TEXT | {"cache": {"batch_size": 2}}, f"cache.batch_size {TO_IMAGES}"),
        ({"evaluate": {"max_new_tokens": 8}}, f"evaluate.max_new_tokens {TO_TEXT}"),
        ({"evaluate": {"max_samples": 8}}, f"evaluate.max_samples {TO_TEXT}"),
        (
            {"family": "sd3", "train": {"mode_scale": 1.2}},
            "mode_scale is read by weighting_scheme: mode alone, and no phase has that",
        ),
        (
            {"train": {"huber_c": 0.2}},
            "huber_c is read by loss_type: huber and smooth_l1 alone, and no phase has them",
        ),
        (
            {"family": "flux", "train": {"loss_type": "l1", "huber_schedule": "constant"}},
            "huber_schedule is read by loss_type: huber and smooth_l1 alone",
        ),
        (
            TEXT | {"train": {"loss_type": "l1"}},
            "loss_type is a key of sdxl, flux, qwen_image, sd3",
        ),
        (
            {"family": "flux", "train": {"logit_mean": 1.0}},
            "logit_mean is read by weighting_scheme: logit_normal alone",
        ),
        (
            {"family": "sd3", "train": {"weighting_scheme": "mode", "logit_std": 2.0}},
            "logit_std is read by weighting_scheme: logit_normal alone",
        ),
        (
            {"rescale_betas_zero_snr": True, "prediction_type": "epsilon"},
            "rescale_betas_zero_snr leaves noise alone at the last timestep",
        ),
    ],
)
def test_a_key_without_a_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    """What would be ignored is no choice."""
    assert message in refusal(**changes)


def test_a_key_has_a_meaning_where_one_phase_reads_it() -> None:
    """The run's own train is that of every phase; sd3 draws logit_normal without being asked."""
    phases = [{"name": "a", "until": 1}, {"name": "b", "until": 2, "weighting_scheme": "mode"}]
    config = parse(family="sd3", train={"logit_mean": 0.5, "mode_scale": 1.0}, phases=phases)
    assert config.phases[0].train.logit_mean == 0.5


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A configuration that is not there is named, with the way to make one."""
    with pytest.raises(PipelineError, match=r"nowhere\.yaml: no such configuration file") as caught:
        read_config(tmp_path / "nowhere.yaml")
    assert "zerotrain new" in caught.value.hint


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"machines": 2, "num_processes": 3}, "num_processes 3 with machines 2: "),
        (
            {"machines": 2, "processes_per_machine": 2, "num_processes": 2},
            "num_processes 2 with machines 2 and processes_per_machine 2: ",
        ),
        ({"machines": 2}, "num_processes 1 with machines 2: "),
    ],
)
def test_processes_that_machines_cannot_share(launch: dict[str, Any], words: str) -> None:
    """Each machine has as many as the other."""
    text = refusal(launch=launch)
    assert f"launch: {words}the processes of all machines are" in text
