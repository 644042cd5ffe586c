"""What gpu.py trains: configurations, bases without weights, caches of random tensors.

A training is what a user runs: launch files that the configuration resolves to. Only the weights
are not read from files: they are drawn on the device for the true architecture, so that no base of
many GB must be downloaded or written.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLES = 16
SEED = 7
BASES = {
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "sd3": "stabilityai/stable-diffusion-3-medium-diffusers",
    "qwen_image": "Qwen/Qwen-Image",
    "causal_lm": "Qwen/Qwen1.5-7B",
}
LORA_RANK = 32
NANO_SIZE = 32
"""Pixels, and tokens, of a dry run."""
NOT_DETERMINISTIC = "GPU_BENCHMARK_NOT_DETERMINISTIC"
SMALL_UNET = {"block_out_channels": [96, 192, 384], "attention_head_dim": [3, 6, 12]}
"""SDXL's U-Net with 0.3 of its channels."""


@dataclass(frozen=True)
class Training:
    """A training to measure."""

    family: str
    preset: str
    size: int
    """Pixels of a side, or tokens."""
    batch: int
    steps: int = 7
    lora: bool = False
    checkpointing: bool = True
    precision: str = "bf16"
    change: dict[str, Any] = field(default_factory=dict)
    """Of the architecture."""
    zero: dict[str, Any] = field(default_factory=dict)
    """Values of DeepSpeed's zero_optimization."""
    launch: dict[str, Any] = field(default_factory=dict)
    """Further keys of `launch`."""
    reading: dict[str, int] = field(default_factory=dict)
    """Constants of zerotrain.training.batches."""


def raw_config(case: Training, nano: bool, until: int) -> dict[str, Any]:
    """Return a run's configuration as a user would write it."""
    text = case.family == "causal_lm"
    size = NANO_SIZE if nano else case.size
    train: dict[str, Any] = {
        "global_batch_size": min(2, case.batch) if nano else case.batch,
        "gradient_checkpointing": case.checkpointing,
        "learning_rate": 1e-5,
        "log_every": 1,
        "save_every": until,
        ("max_length" if text else "resolution"): size,
    }
    return {
        "run": "benchmark",
        "family": case.family,
        "base": "nano" if nano else BASES[case.family],
        "seed": SEED,
        "data": {"source": "sums"} if text else {"images": "photographs"},
        **({"lora": {"rank": LORA_RANK, "alpha": LORA_RANK}} if case.lora else {}),
        "train": train,
        "launch": {
            "mixed_precision": case.precision,
            "full_determinism": not os.environ.get(NOT_DETERMINISTIC),
            **({"deepspeed": {"zero_optimization": case.zero}} if case.zero else {}),
            **case.launch,
        },
        "phases": [{"name": "measured", "until": until, "launch": case.preset}],
    }


def write_base(folder: Path, case: Training, nano: bool) -> None:
    """Publish a base model of the true architecture, without its weights."""
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

    from zerotrain import artifact
    from zerotrain.config.families import FAMILIES
    from zerotrain.launch.planner.architecture import find_architecture

    base = "nano" if nano else BASES[case.family]
    known = find_architecture(case.family, base, NANO_SIZE if nano else case.size)
    part, name = known.trained, FAMILIES[case.family].trained_part
    config = {**part.config, **({} if nano else case.change)}
    with artifact.publish(folder, "base") as draft:
        if case.family == "causal_lm":
            model_type = {"Qwen2ForCausalLM": "qwen2"}.get(part.class_name)
            named = {"architectures": [part.class_name], "model_type": model_type}
            home = draft.folder
        else:
            named, home = {"_class_name": part.class_name}, draft.folder / name
            scheduler = (
                DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
                if case.family == "sdxl"
                else FlowMatchEulerDiscreteScheduler(shift=3.0)
            )
            scheduler.save_pretrained(draft.folder / "scheduler")
        home.mkdir(parents=True, exist_ok=True)
        words = {**{k: v for k, v in named.items() if v}, **{k: v for k, v in config.items()}}
        (home / "config.json").write_text(json.dumps(words, default=str))
        draft.content = {"family": case.family, "parts": {name: "drawn by a benchmark"}}


def text_tensors(case: Training, config: dict[str, Any], nano: bool) -> dict[str, Any]:
    """Draw the embeddings of a caption."""
    import torch

    if case.family == "sdxl":
        pooled = config["projection_class_embeddings_input_dim"]
        pooled -= 6 * config["addition_time_embed_dim"]
        width, tokens = config["cross_attention_dim"], 77
    elif case.family == "sd3":
        width, tokens, pooled = config["joint_attention_dim"], 333, config["pooled_projection_dim"]
    else:
        return {"prompt_embeds": torch.randn(64, config["joint_attention_dim"])}
    return {
        "prompt_embeds": torch.randn(NANO_SIZE if nano else tokens, width),
        "pooled_prompt_embeds": torch.randn(pooled),
    }


def write_image_cache(folder: Path, case: Training, config: dict[str, Any], nano: bool) -> None:
    """Publish a cache of random latents and embeddings."""
    import torch
    from memory import publish_cache

    from zerotrain.cache.layout import LATENTS
    from zerotrain.launch.planner.architecture import find_architecture
    from zerotrain.launch.planner.shape import pixels_per_latent

    torch.manual_seed(SEED)
    size = NANO_SIZE if nano else case.size
    known = find_architecture(case.family, "nano" if nano else BASES[case.family], size)
    scale = pixels_per_latent(known)
    channels = config["out_channels" if case.family == "qwen_image" else "in_channels"]
    latents = (
        {LATENTS: torch.randn(channels, size // scale, size // scale)} for _ in range(SAMPLES)
    )
    texts = (text_tensors(case, config, nano) for _ in range(SAMPLES + 1))
    publish_cache(folder, size, latents, texts, SAMPLES)


def write_token_cache(folder: Path, case: Training, config: dict[str, Any], nano: bool) -> None:
    """Publish a cache of random rows, all of full length."""
    import torch

    from zerotrain import artifact
    from zerotrain.cache.layout import TOKENS, Row, TokenIndex, write_token_index
    from zerotrain.cache.writer import StoredShards, place, write_series

    torch.manual_seed(SEED)
    size = NANO_SIZE if nano else case.size
    keys = [artifact.digest(number) for number in range(SAMPLES)]
    drawn = (torch.randint(3, config["vocab_size"], (size,)) for _ in keys)
    rows = ({"input_ids": row.to(torch.int32), "labels": row.to(torch.int32)} for row in drawn)
    written = write_series(
        TOKENS, keys, lambda _: rows, StoredShards(folder), folder=folder, shard_size=2**28
    )
    with artifact.publish(folder, "cache") as draft:
        draft.known |= place(written, draft.folder)
        every = tuple(Row((key,), "train") for key in keys)
        write_token_index(draft.folder, TokenIndex(size, False, 1, every, written.series))
        draft.content = {"modality": "text", "max_length": size, "packing": False}


def draw_weights(model: Any) -> Any:
    """Fill a model on the meta device with drawn weights: in float32, on the CPU.

    They are drawn on the device, which takes a second for 10 GB. Norms are the identity, biases 0.
    """
    import torch

    from zerotrain.machine.device import process_device

    device = process_device()
    generator = torch.Generator(device).manual_seed(SEED)
    made: dict[int, Any] = {}

    def drawn(name: str, old: Any) -> Any:
        if old.dim() == 1:
            return torch.full(old.shape, float(name == "weight"))
        values = torch.empty(old.shape, device=device)
        return values.normal_(0.0, 0.02, generator=generator).cpu()

    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            if id(old) not in made:
                made[id(old)] = torch.nn.Parameter(drawn(name, old))
            setattr(module, name, made[id(old)])
        for name, old in module.named_buffers(recurse=False):
            if old.is_meta:
                module._buffers[name] = drawn(name, old)
    if device.type == "cuda":  # the training's own memory is measured
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def prepare(folder: Path, case: Training, nano: bool, until: int) -> tuple[Any, Any]:
    """Write base, cache and launch files; return the phase and the family, whose model is drawn."""
    from memory import publish_launch

    from zerotrain.config.read import parse_config
    from zerotrain.config.stage_settings import LaunchSettings
    from zerotrain.launch.preset import read_preset
    from zerotrain.launch.resolve import resolve_phase
    from zerotrain.models.families import load_family
    from zerotrain.models.sizes import model_sizes

    base, cache = folder / "base", folder / "cache"
    family = load_family(case.family)
    if not base.exists():
        write_base(base, case, nano)
        config = json.loads((base / family.trained_part / "config.json").read_text())
        write = write_token_cache if case.family == "causal_lm" else write_image_cache
        write(cache, case, config, nano)
    shapes = {n: tuple(p.shape) for n, p in family.empty_model(base).named_parameters()}
    config = parse_config(raw_config(case, nano, until), "gpu.py")
    preset = read_preset(Path(f"config/launch/{case.preset}.yaml"))
    settings = LaunchSettings.of(config, "measured")
    sizes = model_sizes(shapes, config.adapter_values())
    phase = resolve_phase(settings, preset, SAMPLES, sizes)
    (folder / "launch").parent.mkdir(parents=True, exist_ok=True)
    publish_launch(folder / "launch", phase)

    def load_model(base: Path, dtype: Any = None) -> Any:
        model = draw_weights(family.empty_model(base))
        return model if dtype is None else model.to(dtype)

    family.load_model = load_model  # type: ignore[method-assign]
    return phase, family
