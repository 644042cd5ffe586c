"""Resolved phases of every family, with the sizes of its public model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerotrain.config.read import parse_config
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import ModelSizes

ROOT = Path(__file__).parents[2]
UNET = ModelSizes(
    everything=2_567_463_684, trained=2_567_463_684, largest=29_491_200,
    largest_name="up_blocks.0.resnets.0.conv1.weight", largest_trained=29_491_200,
    largest_vector=10_240,
)  # fmt: skip
"""Of SDXL's U-Net."""
SD3 = ModelSizes(
    everything=2_028_328_000, trained=2_028_328_000, largest=14_155_776,
    largest_name="transformer_blocks.0.norm1.linear.weight", largest_trained=14_155_776,
    largest_vector=9_216,
)  # fmt: skip
"""Of SD3 Medium's transformer."""
FLUX = ModelSizes(
    everything=11_927_557_184, trained=26_148_864, largest=56_623_104,
    largest_name="transformer_blocks.0.norm1.linear.weight", largest_trained=49_152,
    largest_vector=18_432,
)  # fmt: skip
"""Of FLUX.1-dev's transformer with the adapter of config/flux-lora-24gb.yaml."""
QWEN_IMAGE = ModelSizes(
    everything=20_666_330_688, trained=235_929_600, largest=56_623_104,
    largest_name="transformer_blocks.0.img_mod.1.base_layer.weight", largest_trained=589_824,
    largest_vector=18_432,
)  # fmt: skip
"""Of Qwen-Image's transformer with the adapter of config/qwen-image-lora-24gb.yaml."""
QWEN = ModelSizes(
    everything=7_615_616_512, trained=7_615_616_512, largest=544_997_376,
    largest_name="model.embed_tokens.weight", largest_trained=544_997_376, largest_vector=3_584,
)  # fmt: skip
"""Of Qwen2.5-7B."""
T5 = ModelSizes(
    everything=2_859_194_368, trained=9_437_184, largest=65_798_144, largest_name="shared.weight",
    largest_trained=16_384, largest_vector=2_048,
)  # fmt: skip
"""Of flan-t5-xl with the adapter of config/t5-3b-lora-24gb.yaml."""
FAMILIES = {
    "sdxl": UNET, "sd3": SD3, "flux": FLUX, "qwen_image": QWEN_IMAGE, "causal_lm": QWEN,
    "seq2seq_lm": T5,
}  # fmt: skip
TEXT = {"data": {"source": "text", "path": "rows.json"}}
OWN: dict[str, dict[str, Any]] = {
    "flux": {"lora": {"rank": 16}},
    "qwen_image": {"lora": {"rank": 32, "target_modules": ["to_q", "img_mod.1"]}},
    "causal_lm": {**TEXT, "train": {"packing": True, "max_length": 2048}},
    "seq2seq_lm": {**TEXT, "lora": {"rank": 8, "alpha": 32}},
}
"""What a family's run has of its own."""
EPOCH_SIZE = 906
"""Half of the scanned digits."""


def resolved(
    preset: str, family: str = "sdxl", *, train: Any = None, **launch: Any
) -> ResolvedPhase:
    """A phase of a training under a preset."""
    nvme = {"offload_path": "/nvme"} if preset == "zero3_nvme" else {}
    own = OWN.get(family, {})
    batch = {"global_batch_size": 8, "gradient_accumulation_steps": 2}
    raw = {
        "run": "flowers",
        "family": family,
        "base": "nano",
        "data": {"images": "photos"},
        **own,
        "train": {**batch, **own.get("train", {}), **(train or {})},
        "launch": {
            "preset": preset, "mixed_precision": "bf16", "num_processes": 2,
            "num_cpu_threads_per_process": 1, **nvme, **launch,
        },
        "phases": [{"name": "a", "until": 10}],
    }  # fmt: skip
    chosen = read_preset(ROOT / f"config/launch/{preset}.yaml")
    return resolve_phase(
        LaunchSettings.of(parse_config(raw, "c"), "a"), chosen, EPOCH_SIZE, FAMILIES[family]
    )
