"""What trainers' keys of the loss and of the adapter become, for each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.builders.refusals import refusal

from zerotrain.errors import PipelineError
from zerotrain.importers.command_line import import_command
from zerotrain.importers.diffusers_examples import is_example
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.reading import ImportOptions, import_file

PRESETS = Path(__file__).parents[2] / "config" / "launch"
ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}
SIMPLETUNER = {
    "--pretrained_model_name_or_path": "a/model",
    "--resolution": 1024,
    "--max_train_steps": 100,
    "--instance_data_dir": "images",
    "--lr_scheduler": "constant",
}


def simpletuner(place: Path, **given: Any) -> ImportedConfig:
    """A config.json with these keys."""
    own = {f"--{name}": value for name, value in given.items()}
    (place / "config.json").write_text(json.dumps({**SIMPLETUNER, **own}))
    return import_file(Path("config.json"), ImportOptions(presets=PRESETS))


def of_loss(found: ImportedConfig) -> dict[str, Any]:
    """The values that say what the loss is."""
    keys = (
        "weighting_scheme", "logit_mean", "logit_std", "mode_scale", "flow_shift",
        "flux_guidance_value", "snr_gamma", "noise_offset", "prediction_type",
        "rescale_betas_zero_snr", "precondition_outputs",
    )  # fmt: skip
    names = {name: name.rpartition(".")[2] for name in found.values}
    return {short: found.values[name] for name, short in names.items() if short in keys}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model_family": "sd3"}, {"weighting_scheme": "logit_normal", "flow_shift": 3.0}),
        (
            {"model_family": "qwen_image", "flow_sigmoid_scale": 1.5, "flow_schedule_shift": 1.73},
            {"weighting_scheme": "logit_normal", "logit_std": 1.5, "flow_shift": 1.73},
        ),
        (
            {"model_family": "flux", "flow_schedule_auto_shift": True, "flux_guidance_value": 3.5},
            {
                "weighting_scheme": "logit_normal",
                "flow_shift": 3.1582,  # e^1.15, as SimpleTuner's help says of 1024 pixels
                "flux_guidance_value": 3.5,
            },
        ),
        (
            {"model_family": "flux", "flow_use_uniform_schedule": True, "flow_schedule_shift": 0},
            {"weighting_scheme": "none", "flow_shift": 1.0, "flux_guidance_value": 1.0},
        ),
        (
            {"model_family": "sdxl", "snr_gamma": 5, "prediction_type": "v_prediction",
             "rescale_betas_zero_snr": True, "offset_noise": True, "noise_offset": 0.05,
             "noise_offset_probability": 1.0},
            {"snr_gamma": 5, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True,
             "noise_offset": 0.05},
        ),
        ({"model_family": "sdxl", "flow_schedule_shift": 3, "noise_offset": 0.1}, {}),
        (
            {"model_family": "flux", "snr_gamma": 5, "prediction_type": "flow_matching"},
            {"weighting_scheme": "logit_normal", "flow_shift": 3.0, "flux_guidance_value": 1.0},
        ),
    ],
)  # fmt: skip
def test_simpletuners_loss(place: Path, given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Its draw of timesteps is a logit-normal one; a key of another family changes nothing."""
    found = simpletuner(place, **given)
    assert of_loss(found) == expected
    noted = {note.key for note in found.notes}
    assert set(given) <= noted


def test_simpletuners_adapter(place: Path) -> None:
    """DoRA, first values, and Flux's names for sets of layers."""
    given = {"model_type": "lora", "use_dora": True, "lora_init_type": "gaussian"}
    nested = simpletuner(place, model_family="flux", lora_alpha=32, **given).nested()
    assert nested["lora"] == {
        "rank": 16, "alpha": 32.0, "dropout": 0.1, "use_dora": True,
        "init_lora_weights": "gaussian",
        "target_modules": [
            "to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj",
            "to_add_out",
        ],
    }  # fmt: skip
    nested = simpletuner(place, model_family="flux", flux_lora_target="nano", **given).nested()
    assert nested["lora"]["target_modules"] == ["single_transformer_blocks.7.proj_out"]
    full = simpletuner(place, model_family="flux", flux_lora_target="nano", use_dora=True)
    assert "lora" not in full.nested()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_type": "lora", "lora_type": "lycoris"}, "names config/lycoris_config.json"),
        ({"model_type": "full", "base_model_precision": "int8-quanto"}, "are not quantized"),
        ({"model_flavour": "kontext"}, "reference tokens have the timestep 0"),
        ({"model_flavour": "fluxbooru"}, "flavours that do: krea, dev, schnell"),
        ({"optimizer": "soap"}, "SimpleTuner's soap computes what none of ours does"),
        ({"lr_scheduler": "cosine_with_restarts"}, "is not one of zerotrain's"),
        ({"tread_config": {"routes": []}}, "tread_config: names no routes"),
        ({"tread_config": "{'routes': "}, "tread_config: must be keys with values"),
        (
            {"tread_config": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2}]}},
            "tread_config.routes.0.end_layer_idx: missing",
        ),
        (
            {"tread_config": {"routes": [{**ROUTE, "selection_ratio": 1.0}]}},
            "tread_config.routes.0.selection_ratio: must be below 1 (found 1.0)",
        ),
        (
            {"tread_config": {"routes": [{**ROUTE, "noise": 1}]}},
            "tread_config.routes.0.noise: unknown key",
        ),
        ({"model_type": "lora", "lora_init_type": "pissa"}, "changes the base's own weights"),
        ({"model_type": "lora", "flux_lora_target": "some"}, "known: all, context"),
        ({"flow_use_beta_schedule": True}, "timesteps are drawn evenly, by logit_normal"),
        ({"flux_guidance_mode": "random-range"}, "the guidance is one value"),
        ({"flow_sigmoid_scale": 0}, "flow_sigmoid_scale is 0"),
        ({"loss_type": "huber"}, "rises with the noise"),
        ({"loss_type": "smooth_l1", "huber_schedule": "snr"}, "rises with the noise"),
        (
            {"model_type": "lora", "model_flavour": "schnell"},
            "ostris/FLUX.1-schnell-training-adapter",
        ),
    ],
)
def test_what_would_be_another_training_is_refused(
    place: Path, given: dict[str, Any], message: str
) -> None:
    """With the reason."""
    assert message in refusal(simpletuner, place, model_family="flux", **given)


@pytest.mark.parametrize("given", [{}, {"noise_offset_probability": 0.5}])
def test_an_offset_of_some_batches_is_refused(place: Path, given: dict[str, Any]) -> None:
    """SimpleTuner draws whether a batch has it, a quarter of them by default; here all have it."""
    text = refusal(simpletuner, place, model_family="sdxl", offset_noise=True, **given)
    probability = given.get("noise_offset_probability", 0.25)
    assert f"noise_offset_probability is {probability}" in text
    without = simpletuner(place, model_family="sdxl", **given)
    assert "train.noise_offset" not in without.values


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model_family": "flux", "loss_type": "huber", "huber_schedule": "constant"},
         ("huber", "constant")),
        ({"model_family": "sd3", "loss_type": "smooth_l1", "huber_schedule": "exponential"},
         ("smooth_l1", "exponential")),
        ({"model_family": "sdxl", "loss_type": "huber"}, ("huber", "snr")),
    ],
)  # fmt: skip
def test_huber_losses_of_simpletuner(
    place: Path, given: dict[str, Any], expected: tuple[str, str]
) -> None:
    """Schedules of the threshold that run the same way in both programs."""
    found = simpletuner(place, **given).values
    schedule = found.get("train.huber_schedule", "snr")
    assert (found["train.loss_type"], schedule) == expected


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({"model_family": "flux"}, 512),
        ({"model_family": "flux", "tokenizer_max_length": 256}, 512),
        ({"model_family": "flux", "model_flavour": "schnell"}, 256),
        ({"model_family": "flux", "model_flavour": "schnell", "model_type": "lora",
          "disable_assistant_lora": True}, 256),
        ({"model_family": "qwen_image", "tokenizer_max_length": 256}, 1024),
        ({"model_family": "sd3"}, 154),
        ({"model_family": "sd3", "tokenizer_max_length": 77}, 77),
        ({"model_family": "sd3", "tokenizer_max_length": 256}, 154),
        ({"model_family": "sd3", "tokenizer_max_length": 256, "i_know_what_i_am_doing": True}, 256),
    ],
)  # fmt: skip
def test_text_lengths_of_simpletuner(place: Path, given: dict[str, Any], length: int) -> None:
    """Flux and Qwen-Image ignore tokenizer_max_length, SD3 takes it up to 154."""
    found = simpletuner(place, **given)
    assert found.values["cache.max_sequence_length"] == length
    assert set(given) <= {note.key for note in found.notes}


def example(script: str, **given: Any) -> ImportedConfig:
    """A command with one of diffusers' scripts."""
    flags = {"pretrained_model_name_or_path": "a/model", "max_train_steps": 9, **given}
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    command = f"accelerate launch --mixed_precision bf16 --num_processes 1 {script} {words}"
    return import_command(command, ImportOptions(presets=PRESETS))


@pytest.mark.parametrize(
    ("script", "given", "expected"),
    [
        ("train_dreambooth_lora_flux.py", {}, {"flux_guidance_value": 3.5, "flow_shift": 1.0}),
        (
            "train_dreambooth_flux.py",
            {"guidance_scale": 1},
            {"flux_guidance_value": 1.0, "flow_shift": 1.0},
        ),
        (
            "train_dreambooth_lora_sd3.py",
            {"weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 1.2},
            {
                "weighting_scheme": "logit_normal",
                "logit_mean": 0.5,
                "logit_std": 1.2,
                "precondition_outputs": True,
            },
        ),
        ("train_dreambooth_sd3.py", {"precondition_outputs": 0}, {"precondition_outputs": False}),
        (
            "train_dreambooth_lora_qwen_image.py",
            {"weighting_scheme": "mode", "mode_scale": 1.1},
            {"weighting_scheme": "mode", "mode_scale": 1.1, "flow_shift": 1.0},
        ),
        (
            "train_text_to_image_sdxl.py",
            {"snr_gamma": 5, "noise_offset": 0.05, "prediction_type": "v_prediction"},
            {"snr_gamma": 5, "noise_offset": 0.05, "prediction_type": "v_prediction"},
        ),
    ],
)
def test_losses_of_diffusers_scripts(
    script: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The family stands in the script's name; its guidance is reported, where none is given."""
    assert of_loss(example(script, **given)) == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("train_dreambooth_lora_sd3.py", ["latents", "random_flip"]),
        ("train_dreambooth_lora_flux_kontext.py", ["random_flip"]),
        ("train_text_to_image_lora_sdxl.py", ["latents"]),
        (
            "train_text_to_image_sdxl.py",
            ["latents", "random_flip", "proportion_empty_prompts"],
        ),
    ],
)
def test_draws_of_diffusers_scripts_are_reported(script: str, expected: list[str]) -> None:
    """They draw latents; the full SDXL script draws mirror images and empty captions once, those of
    dreambooth mirror images."""
    given = {"random_flip": "true", "proportion_empty_prompts": 0.2}
    if "dreambooth" in script:
        del given["proportion_empty_prompts"]
    found = example(script, **given)
    changed = [note.key for note in found.notes if note.outcome == "changed"]
    assert [key for key in changed if key in {"latents", *given}] == expected
    if len(expected) == 3:
        own = ("data.random_flip", "train.caption_dropout_probability")
        assert [found.values[key] for key in own] == [True, 0.2]


@pytest.mark.parametrize(
    ("script", "given", "times"),
    [
        ("train_text_to_image_sdxl.py", {"gradient_accumulation_steps": 4}, "takes 4 times"),
        ("train_text_to_image_lora_sdxl.py", {"lr_scheduler": "constant"}, None),
        (
            "train_text_to_image_sdxl.py",
            {
                "lr_scheduler": "constant_with_warmup",
                "lr_warmup_steps": 0,
                "gradient_accumulation_steps": 4,
            },
            None,
        ),
        ("train_dreambooth_lora_sdxl.py", {"gradient_accumulation_steps": 4}, None),
    ],
)
def test_a_stretched_schedule_is_reported(
    script: str, given: dict[str, Any], times: str | None
) -> None:
    """accelerate steps a schedule at updates only, and the scripts multiply its steps."""
    options = {"lr_scheduler": "cosine", "lr_warmup_steps": 500, "max_train_steps": 10_000}
    found = example(script, **options | given)
    reasons = [n.reason for n in found.notes if (n.outcome, n.key) == ("changed", "lr_scheduler")]
    assert len(reasons) == (times is not None)
    assert all(times in reason for reason in reasons if times)


def test_defaults_of_diffusers_scripts() -> None:
    """Text lengths, batches and alphas differ from script to script, and from ours."""
    sd3 = example("train_dreambooth_lora_sd3.py", rank=16).values
    assert (sd3["cache.max_sequence_length"], sd3["lora.rank"], sd3["lora.alpha"]) == (77, 16, 16)
    assert (sd3["train.global_batch_size"], sd3["train.adam_weight_decay"]) == (4, 1e-4)
    assert sd3["lora.init_lora_weights"] == "gaussian"
    sdxl = example("train_text_to_image_lora_sdxl.py", rank=16, proportion_empty_prompts=0.2).values
    assert (sdxl["lora.alpha"], sdxl["train.global_batch_size"]) == (16, 16)
    assert sdxl["train.adam_weight_decay"] == 1e-2
    assert sdxl["train.caption_dropout_probability"] == 0.2
    assert "cache.max_sequence_length" not in sdxl
    full = example("train_dreambooth_flux.py").values
    assert full["cache.max_sequence_length"] == 77
    qwen = example("train_dreambooth_lora_qwen_image.py", max_sequence_length=256).values
    assert qwen["cache.max_sequence_length"] == 256
    assert qwen["train.caption_dropout_probability"] == 0.0
    dreambooth = example("train_dreambooth_lora_sdxl.py", rank=16).values
    assert (dreambooth["lora.alpha"], dreambooth["train.resolution"]) == (16, 1024)
    assert sd3["train.resolution"] == qwen["train.resolution"] == 512
    assert example("train_dreambooth_lora_sdxl.py", lora_alpha=4).values["lora.alpha"] == 4


@pytest.mark.parametrize(
    ("script", "given", "scheme"),
    [
        ("train_dreambooth_lora_flux.py", {"logit_mean": 0.5}, "logit_normal"),
        ("train_dreambooth_sd3.py", {"mode_scale": 1.2}, "mode"),
    ],
)
def test_what_no_scheme_reads_is_noted(script: str, given: dict[str, Any], scheme: str) -> None:
    """The scripts take and ignore it; sd3 alone draws logit_normal without being asked."""
    found = example(script, **given)
    (note,) = [note for note in found.notes if note.key in given]
    assert (note.outcome, note.reason) == ("no-op", f"weighting_scheme {scheme} alone reads it")


def test_crops_of_a_diffusers_script_are_noted() -> None:
    """The script tells the model a corner for all images; here each has that of its own crop."""
    found = example("train_dreambooth_lora_sdxl.py", crops_coords_top_left_h=0)
    (note,) = [note for note in found.notes if note.key == "crops_coords_top_left_h"]
    assert (note.outcome, note.reason) == ("no-op", "each image has the corner of its own crop")


@pytest.mark.parametrize(
    "script", ["train_dreambooth_sdxl.py", "train_text_to_image_flux.py", "train_flux.py"]
)
def test_a_script_that_diffusers_does_not_have_is_unknown(script: str) -> None:
    """Its flags may mean anything: launch and training values alone are read."""
    assert not is_example(script)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_text_encoder": "true"}, "text encoders are not trained"),
        ({"with_prior_preservation": "true"}, "the loss is that of the images alone"),
        ({"optimizer": "dadapt"}, "optimizer 'dadapt' is not known"),
        ({"rnk": 4}, "did you mean rank"),
    ],
)
def test_diffusers_flags_without_an_equal_are_refused(given: dict[str, Any], message: str) -> None:
    """By name."""
    assert message in refusal(example, "train_dreambooth_lora_flux.py", **given)


def test_averages_are_kept_as_simpletuner_keeps_them(tmp_path, monkeypatch):
    """With its own defaults; without use_ema its other keys are named as left alone."""
    monkeypatch.chdir(tmp_path)
    kept = simpletuner(tmp_path, use_ema=True, ema_update_interval=5)
    own = {"use_ema": True, "ema_decay": 0.995, "ema_device": "cpu", "ema_update_interval": 5}
    assert {k: kept.values.get(f"train.{k}") for k in own} == own
    none = simpletuner(tmp_path, ema_decay=0.9)
    assert not any("ema" in key for key in none.values)
    assert "without use_ema no average is kept" in str(none.notes)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_token_routes_are_simpletuners(place: Path, family: str) -> None:
    """As keys, and as the text that its command line takes."""
    for given in ({"routes": [ROUTE]}, str({"routes": [ROUTE]})):
        found = simpletuner(place, model_family=family, tread_config=given)
        assert found.values["train.tread_config"] == {"routes": [ROUTE]}
    with pytest.raises(PipelineError, match=r"tokens of qwen_image cannot be routed here"):
        simpletuner(place, model_family="qwen_image", tread_config={"routes": [ROUTE]})
