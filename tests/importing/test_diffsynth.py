"""DiffSynth-Studio's commands: what its flags mean, and what it does without being asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from zerotrain import cli
from zerotrain.config.adapters import is_target
from zerotrain.config.data import BucketConfig
from zerotrain.config.read import parse_config
from zerotrain.data.buckets import Size, bucket_sizes, choose_bucket
from zerotrain.errors import PipelineError
from zerotrain.importers.command_line import import_command
from zerotrain.importers.diffsynth_model import LAYERS
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.reading import ImportOptions

QWEN = "Qwen/Qwen-Image"
BFL = "black-forest-labs"
FLUX = f"{BFL}/FLUX.1-dev"
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
STACKED = "a_to_qkv,b_to_qkv,ff_a.0,a_to_out,proj_out,to_qkv_mlp"


def imported(flags: str, base: str = f"{QWEN}:x", skip: str = "") -> ImportedConfig:
    """One command with these flags."""
    text = f"accelerate launch train.py --dataset_base_path d --model_id_with_origin_paths {base}"
    options = ImportOptions(skip=frozenset(skip.split()))
    return import_command(f"{text} {flags}", options)


def values(flags: str, base: str = f"{QWEN}:x", skip: str = "") -> dict[str, Any]:
    """Our values for it."""
    return imported(flags, base, skip).values


def changed(flags: str, base: str) -> dict[str, str]:
    """Reasons of what means something else here, by key."""
    return {n.key: n.reason for n in imported(flags, f"{base}:x").notes if n.outcome == "changed"}


@pytest.mark.parametrize(
    ("flags", "base", "rounded"),
    [
        ("--trainable_models dit", FLUX, True),
        ("--lora_base_model dit --lora_target_modules to_q", QWEN, True),
        ("--trainable_models unet --height 512 --width 512", SDXL, False),
    ],
)
def test_weights_that_it_rounds_are_a_change(
    place: Any, flags: str, base: str, rounded: bool
) -> None:
    """Of the models that it loads in bf16, unless DeepSpeed has float32 copies."""
    assert ("trained weights" in changed(flags, base)) == rounded
    text = "accelerate launch --use_deepspeed --zero_stage 2 train.py --dataset_base_path d"
    found = import_command(f"{text} --model_id_with_origin_paths {base}:x {flags}")
    assert "trained weights" not in {note.key for note in found.notes}


def trained_sizes(flags: str, base: str = QWEN) -> tuple[int, BucketConfig | None]:
    """The side and the buckets of the configuration, which is valid."""
    config = parse_config(imported(flags, f"{base}:x").nested(), "imported")
    return config.phases[0].train.resolution, config.data.aspect_buckets


@pytest.mark.parametrize(
    ("flags", "side", "shapes"),
    [
        ("", 1024, {(3000, 2000): (1248, 832), (2000, 3000): (832, 1248), (640, 480): (640, 480)}),
        ("--max_pixels 262144", 512, {(3000, 2000): (624, 416), (512, 512): (512, 512)}),
        ("--max_pixels 1000000", 992, {(4000, 4000): (992, 992), (512, 512): (512, 512)}),
    ],
)
def test_images_keep_their_shape_and_are_not_enlarged(
    place: Any, flags: str, side: int, shapes: dict[Size, Size]
) -> None:
    """About the size that DiffSynth-Studio computes, in multiples of 16; the report says so."""
    resolution, buckets = trained_sizes(flags)
    assert resolution == side
    assert buckets is not None
    sizes = bucket_sizes(side, buckets)
    assert (side, side) in sizes
    assert all(width % 16 == height % 16 == 0 for width, height in sizes)
    assert all(width * height <= side * side for width, height in sizes)
    assert {size: choose_bucket(size, side, buckets) for size in shapes} == shapes
    assert "the nearest shape of a list" in changed(flags, QWEN)["max_pixels"]


@pytest.mark.parametrize(
    ("height", "width", "base", "side"),
    [(832, 1216, QWEN, 1008), (1216, 832, QWEN, 1008), (600, 1000, SDXL, 776)],
)
def test_every_image_has_the_given_size(
    place: Any, height: int, width: int, base: str, side: int
) -> None:
    """The one bucket, also of images that are enlarged to it."""
    flags = f"--height {height} --width {width} --max_pixels 65536"
    resolution, buckets = trained_sizes(flags, base)
    assert (resolution, resolution % 8) == (side, 0)
    assert buckets is not None
    assert bucket_sizes(resolution, buckets) == ((width, height),)
    for original in ((3000, 2000), (100, 400)):
        assert choose_bucket(original, resolution, buckets) == (width, height)
    assert not {"height", "width", "max_pixels"} & {*changed(flags, base)}


@pytest.mark.parametrize(
    ("flags", "side"),
    [
        ("--height 512 --width 512", 512),
        ("--height 512 --width 512 --extra_inputs context_image", 512),
        ("--max_pixels 262144 --extra_inputs context_image", 512),
    ],
)
def test_squares(place: Any, flags: str, side: int) -> None:
    """By both sides, or with conditioning images, whose shape is not kept: the report says so."""
    assert trained_sizes(flags) == (side, None)
    assert ("max_pixels" in changed(flags, QWEN)) == ("max_pixels" in flags)


def test_the_preparing_command_decides_the_size(place: Any) -> None:
    """The other one reads images that are encoded already."""
    start = f"accelerate launch train.py --dataset_base_path d --model_id_with_origin_paths {QWEN}:"
    own = "--height 832 --width 1216"
    for prepare, train, side in ((own, "--max_pixels 65536", 1008), ("", own, 1024)):
        found = import_command(
            f"{start}x --task sft:data_process {prepare}\n{start}y --task sft:train {train}"
        )
        assert found.values["train.resolution"] == side
        notes = [note for note in found.notes if note.key == train.split()[0].strip("-")]
        assert ("no-op", "the preparing command decides the size") in {
            (note.outcome, note.reason) for note in notes
        }


TARGETS = "--lora_base_model dit --lora_target_modules to_q"


def test_two_trainings_are_two_runs(place: Any) -> None:
    """As the script of a differential training has them."""
    command = f"accelerate launch train.py --model_id_with_origin_paths {QWEN}:x --task sft\n"
    with pytest.raises(PipelineError, match="2 trainings are as many runs"):
        import_command(command * 2)


FIRST = (
    f"accelerate launch train.py --dataset_base_path d --model_id_with_origin_paths {QWEN}:x "
    f"{TARGETS} --num_epochs 5 --output_path ./models/train/plain\n"
)


def second(preset: str, model: str = "dit") -> str:
    """The second command of a differential training."""
    own = FIRST.replace("train/plain", "train/other").strip()
    return f"{own} --preset_lora_path {preset} --preset_lora_model {model}\n"


def test_a_lora_on_a_fused_lora_is_two_runs(place: Any) -> None:
    """The second's base is the first's merged weights, and the report has the command for it."""
    found = import_command(FIRST + second("models/train/plain/epoch-4.safetensors"))
    first = found.before
    assert first is not None
    assert (first.values["run"], first.values["base"]) == ("plain", f"{QWEN}:x")
    assert (found.values["run"], found.values["base"]) == ("other", "merged/plain")
    assert {**first.values, "run": "", "base": ""} == {**found.values, "run": "", "base": ""}
    (note,) = [note for note in found.notes if note.ours == "base"]
    assert "zerotrain export results/plain/train/weights --to merged --dtype bf16" in note.reason


def test_two_runs_are_two_files(place: Any, tmp_path: Path) -> None:
    """Without a name for the first there is none for the second, and nothing is written."""
    command = FIRST + second("models/train/plain/epoch-4.safetensors")
    words = ["launch", "import", "--command", command, "--precision", "bf16"]
    refused = CliRunner().invoke(cli.command_line(), words)
    assert "two trainings are two configurations" in str(refused.exception)
    result = CliRunner().invoke(
        cli.command_line(), [*words, "--output", str(tmp_path / "mine.yaml")]
    )
    assert result.exception is None, result.output
    assert "run: plain" in (tmp_path / "mine.yaml").read_text()
    text = (tmp_path / "mine-2.yaml").read_text()
    assert "run: other" in text
    assert yaml.safe_load(text)["base"] == "merged/plain"
    assert "--to merged --dtype bf16" in " ".join(text.replace("#", " ").split())


@pytest.mark.parametrize(
    "command",
    [second("models/train/plain/epoch-3.safetensors"), second("other/epoch-4.safetensors"),
     second("models/train/plain/epoch-4.safetensors", "text_encoder")],
)  # fmt: skip
def test_a_lora_that_the_first_training_does_not_end_with_is_refused(
    place: Any, command: str
) -> None:
    """An earlier epoch, another folder, another model."""
    with pytest.raises(PipelineError, match="2 problems"):
        import_command(FIRST + command)


def test_a_fused_layer_is_several_that_share_a_factor(place: Any) -> None:
    """Of the blocks that have it alone; both kinds of blocks together by the ends of names."""
    flags = "--lora_base_model dit --lora_rank 8 --lora_target_modules"
    found = values(f"{flags} {STACKED}", f"{FLUX}:x")
    targets = found["lora.target_modules"]
    assert {"to_q", "add_k_proj", "ff.net.0.proj", "to_out.0", "proj_mlp"} <= {*targets}
    assert is_target("single_transformer_blocks.37.proj_out", targets)
    assert not is_target("proj_out", targets)
    assert found["lora.fused_layers"] is True
    found = values(f"{flags} a_to_qkv", f"{FLUX}:x")
    assert is_target("transformer_blocks.18.attn.to_v", found["lora.target_modules"])
    assert not is_target("single_transformer_blocks.0.attn.to_v", found["lora.target_modules"])
    assert "lora.fused_layers" not in values(f"{flags} ff_a.0", f"{FLUX}:x")


def test_every_layer_of_flux_is_one_of_diffusers() -> None:
    """The names, on a model of the real depth without weights; none beyond the blocks."""
    import torch
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel()
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for name, ours in LAYERS.items():
        for target in ours:
            assert [layer for layer in linear if is_target(layer, [target])], (name, target)
    targets = [target for ours in LAYERS.values() for target in ours]
    chosen = [layer for layer in linear if is_target(layer, targets)]
    assert all("transformer_blocks." in layer for layer in chosen)
    assert sorted(set(linear) - set(chosen)) == sorted(n for n in linear if "blocks." not in n)
