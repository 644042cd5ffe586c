"""diffusers' Kontext script: sizes, conditioning images and what it does with captions."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.errors import PipelineError
from zerotrain.importers.command_line import import_command

SCRIPT = "accelerate launch train_dreambooth_lora_flux_kontext.py --resolution 512"
PLACES = "--pretrained_model_name_or_path o/n --dataset_name o/pairs --image_column a"


def imported(flags: str) -> Any:
    """One command with these flags."""
    return import_command(f"{SCRIPT} {PLACES} {flags}")


def changed(found: Any) -> set[str]:
    """Keys that mean something else here."""
    return {note.key for note in found.notes if note.outcome == "changed"}


def test_a_column_of_conditioning_images_is_ours(place: Any) -> None:
    """With captions, which the script may give to other images; its latents are the mode."""
    found = imported("--cond_image_column before --caption_column told --guidance_scale 1")
    assert found.values["data.conditioning_columns"] == ["before"]
    assert found.values["train.flux_guidance_value"] == 1.0
    assert changed(found) == {"captions", "caption_column", "center_crop", "dataset_name"}
    (note,) = [note for note in found.notes if note.key == "cond_image_column"]
    assert note.reason.endswith("the columns file_name and text or image and prompt")
    found = imported("--cond_image_column file_name --caption_column told")
    reasons = {note.key: note.reason for note in found.notes}
    assert reasons["cond_image_column"].endswith("the columns image and prompt")
    assert reasons["caption_column"] == "metadata.csv has it as prompt"
    assert not {"captions", "latents"} & changed(imported("--instance_prompt dog"))


def test_a_dataset_without_conditioning_images_is_read_from_the_hub(place: Any) -> None:
    """By the script's own columns; a path of this machine is a folder."""
    data = imported("--instance_prompt dog").nested()["data"]
    assert data == {
        "source": "huggingface", "path": "o/pairs", "image_column": "a",
        "caption_strategy": "instanceprompt", "instance_prompt": "dog",
    }  # fmt: skip
    local = imported("--dataset_name ./dogs --instance_prompt dog").nested()["data"]
    assert (local["source"], local["images"]) == ("folder", "./dogs")


@pytest.mark.parametrize("flags", ["--mixed_precision bf16", "--mixed_precision fp16", ""])
def test_factors_in_bf16_are_a_change(place: Any, flags: str) -> None:
    """The scripts of LoRAs cast factors to float32 for fp16 alone."""
    assert ("trained weights" in changed(imported(flags))) == ("bf16" in flags)


@pytest.mark.parametrize("flags", ["", "--aspect_ratio_buckets '384,640; 512,512'"])
def test_buckets_frame_images_that_are_no_squares(place: Any, flags: str) -> None:
    """Squares have the size that is trained here."""
    found = imported(f"--use_aspect_ratio_buckets {flags}")
    assert "use_aspect_ratio_buckets" in changed(found)
    assert found.values["train.resolution"] == 512


def test_buckets_without_the_square_are_refused(place: Any) -> None:
    """Square images would have another size there."""
    with pytest.raises(PipelineError, match="has no 512,512, and all images are squares"):
        imported("--use_aspect_ratio_buckets --aspect_ratio_buckets 384,640;640,384")


def test_a_constant_rate_has_no_warm_up(place: Any) -> None:
    """get_scheduler of diffusers leaves it out; with another schedule it is kept."""
    assert "train.lr_warmup_steps" not in imported("--lr_warmup_steps 200").values
    found = imported("--lr_warmup_steps 200 --lr_scheduler cosine")
    assert found.values["train.lr_warmup_steps"] == 200
