"""Readers of other programs' files: models, adapters, checkpoints, launch files and commands."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.builders.processes import run_ranks
from tests.hostile.reader import Reader
from tests.hostile.template_readers import CHATML, use_tokenizer

from zerotrain.config.families import FAMILIES
from zerotrain.importers.command_line import import_command
from zerotrain.importers.files import reading_only
from zerotrain.importers.imported_config import config_text, report
from zerotrain.importers.reading import ImportOptions, import_file
from zerotrain.models.base import check_config, check_model_index
from zerotrain.models.families import load_family
from zerotrain.models.families.nano import train_byte_tokenizer
from zerotrain.models.pretrained import from_pretrained
from zerotrain.state.external import open_external, write_universal
from zerotrain.state.external.adapter_files import check_settings, from_kohya
from zerotrain.state.external.fitting import fit
from zerotrain.state.show import show

ROOT = Path(__file__).parents[2]
LANGUAGE, SDXL = load_family("causal_lm"), load_family("sdxl")


@functools.cache
def _tokenizer() -> Any:
    return train_byte_tokenizer([], seq2seq=False)


def _write_tokenizer(folder: Path) -> None:
    _tokenizer().chat_template = CHATML
    _tokenizer().save_pretrained(folder)


def _read_tokenizer(folder: Path, _: Path) -> None:
    use_tokenizer(LANGUAGE.load_tokenizer(folder))


def _write_base(folder: Path) -> None:
    index = {"_class_name": "StableDiffusionXLPipeline", "_diffusers_version": "0.36.0"}
    index |= {part: ["diffusers", name] for part, name in FAMILIES["sdxl"].classes.items()}
    (folder / "model_index.json").write_text(json.dumps(index))
    config = {"model_type": "qwen2", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 9,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
              "rope_theta": 1e4, "tie_word_embeddings": True, "dtype": "float32"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "unet").mkdir()
    unet = {"_class_name": "UNet2DConditionModel", "sample_size": 8, "block_out_channels": [8, 8],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"], "layers_per_block": 1,
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "cross_attention_dim": 8,
            "attention_head_dim": [1, 2], "transformer_layers_per_block": [1, 1],
            "norm_num_groups": 2}  # fmt: skip
    (folder / "unet/config.json").write_text(json.dumps(unet))
    (folder / "scheduler").mkdir()
    schedule = {"_class_name": "EulerDiscreteScheduler", "num_train_timesteps": 1000,
                "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012,
                "prediction_type": "epsilon", "timestep_spacing": "leading"}  # fmt: skip
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(schedule))


def _read_base(folder: Path, file: Path) -> None:
    from diffusers import EulerDiscreteScheduler

    if file.name == "model_index.json":
        check_model_index(file, FAMILIES["sdxl"], "the base")
    elif file.name == "scheduler_config.json":
        from_pretrained(EulerDiscreteScheduler, file.parent)
    elif file.parent.name == "unet":
        SDXL.empty_model(folder)
    else:
        check_config(file, LANGUAGE.spec, "the base")
        LANGUAGE.empty_model(folder)


LORA = {"blocks.0.to_q": (6, 4), "blocks.1.to_q": (4, 4)}
"""Rows and columns of the layers that an adapter adapts."""
TRAINED = {
    f"{layer}.{factor}.default.weight": shape
    for layer, (rows, columns) in LORA.items()
    for factor, shape in (("lora_A", [2, columns]), ("lora_B", [rows, 2]))
}


def write_adapters(folder: Path) -> None:
    for name in ("peft", "diffusers", "kohya"):
        (folder / name).mkdir()
    plain = {name.replace(".default", ""): torch.ones(shape) for name, shape in TRAINED.items()}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": False, "use_rslora": False,
              "rank_pattern": {}, "target_modules": ["to_q"], "modules_to_save": None}  # fmt: skip
    (folder / "peft/adapter_config.json").write_text(json.dumps(config))
    under = {f"base_model.model.{name}": tensor for name, tensor in plain.items()}
    save_file(under, folder / "peft/adapter_model.safetensors")
    header = {"lora_adapter_metadata": json.dumps({"unet.r": 2, "unet.lora_alpha": 4.0})}
    under = {f"unet.{name}": tensor for name, tensor in plain.items()}
    save_file(under, folder / "diffusers/pytorch_lora_weights.safetensors", header)
    kohya = {f"lora_unet_{layer.replace('.', '_')}.alpha": torch.tensor(4.0) for layer in LORA}
    for name, tensor in plain.items():
        layer, _, factor = name.removesuffix(".weight").rpartition(".")
        end = {"lora_A": "lora_down", "lora_B": "lora_up"}[factor]
        kohya[f"lora_unet_{layer.replace('.', '_')}.{end}.weight"] = tensor
    save_file(kohya, folder / "kohya/step-20.safetensors", {"ss_network_dim": "2"})


def _read_adapter(folder: Path, file: Path) -> None:
    form = file.relative_to(folder).parts[0]
    found = open_external(file if form == "kohya" else folder / form)
    check_settings(found.adapter or {}, {"r": 2, "lora_alpha": 4, "peft_type": "LORA"}, file)
    if form == "kohya":
        found = from_kohya(found, TRAINED, {layer: (layer,) for layer in LORA})
    else:
        found = fit(found, TRAINED, lambda name: None)
    list(show(found, tensors=True))


def write_checkpoints(folder: Path) -> None:
    """Folders of accelerate's save_state and HF's Trainer, and a universal checkpoint."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step(), schedule.step()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in ("accelerate", "trainer"):
        (folder / name).mkdir()
    save_file(state, folder / "accelerate/model.safetensors")
    torch.save(optimizer.state_dict(), folder / "accelerate/optimizer.bin")
    torch.save(schedule.state_dict(), folder / "accelerate/scheduler.bin")
    scaler = {"scale": 2.0**16, "growth_factor": 2.0, "_growth_tracker": 1}
    torch.save(scaler, folder / "accelerate/scaler.pt")
    torch.save(
        {"step": 1, "random_state": (3, (1, 2), None)}, folder / "accelerate/random_states_0.pkl"
    )
    torch.save(state, folder / "trainer/pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "trainer/optimizer.pt")
    torch.save(schedule.state_dict(), folder / "trainer/scheduler.pt")
    (folder / "trainer/trainer_state.json").write_text('{"global_step": 1, "epoch": 0.5}')
    shapes = {name: list(one.shape) for name, one in model.named_parameters()}
    found = fit(open_external(folder / "trainer"), shapes, lambda name: None)
    write_universal(folder / "universal", found)


def _write_deepspeed(folder: Path) -> None:
    """Checkpoints that DeepSpeed's engine writes, of ZeRO 2 and 3."""
    sys.path.append(str(ROOT))
    start = multiprocessing.get_context("forkserver").Process
    for stage in (2, 3):
        made = folder.parent / f"made{stage}"
        made.mkdir()
        run_ranks(start, _train, 1, made, stage, output=made / "output.txt")
        shutil.copytree(made / "checkpoint", folder / f"zero{stage}")


def _train(folder: Path, stage: int) -> None:
    from tests.foreign import maker

    torch.set_num_threads(1)
    maker.train_zero(folder, stage, {})
    os._exit(0)  # gloo's threads may wait for ranks that have ended


def _read_checkpoint(folder: Path, file: Path) -> None:
    list(show(open_external(folder / file.relative_to(folder).parts[0]), tensors=True))


def _written(**documents: Any) -> Callable[[Path], None]:
    """Write JSON and other texts; `_` in a name is the dot before its suffix."""

    def write(folder: Path) -> None:
        for name, document in documents.items():
            text = document if isinstance(document, str) else json.dumps(document)
            (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")

    return write


KOHYA: Mapping[str, Any] = {
    "general": {"caption_extension": ".txt", "batch_size": 2, "bucket_reso_steps": 8,
                "min_bucket_reso": 16, "max_bucket_reso": 64},
    "datasets": [
        {"resolution": 32, "enable_bucket": True,
         "subsets": [{"image_dir": "a/10_dog", "num_repeats": 10, "flip_aug": True,
                      "keep_tokens": 2}]},
        {"resolution": [16, 16], "enable_bucket": True,
         "subsets": [{"image_dir": "b", "is_reg": True, "caption_prefix": "x",
                      "shuffle_caption": True}]},
    ],
}  # fmt: skip
TOML = """
[general]
caption_extension = ".txt"
keep_tokens = 1
bucket_reso_steps = 8
min_bucket_reso = 16
[[datasets]]
resolution = [32, 32]
enable_bucket = true
  [[datasets.subsets]]
  image_dir = "a/10_dog"
  num_repeats = 10
[[datasets]]
resolution = 16
enable_bucket = true
  [[datasets.subsets]]
  image_dir = "b"
  is_reg = true
"""
BACKENDS = [
    {"id": "mine", "type": "local", "instance_data_dir": "photos", "crop": True, "repeats": 2,
     "crop_style": "center", "crop_aspect": "square", "resolution": 512, "minimum_image_size": 64,
     "resolution_type": "pixel", "caption_strategy": "filename", "cache_dir_vae": "c"},
    {"id": "texts", "type": "local", "dataset_type": "text_embeds", "cache_dir": "texts"},
]  # fmt: skip
SIMPLETUNER = {
    "model_family": "flux", "model_type": "lora", "pretrained_model_name_or_path": "a/model",
    "max_train_steps": 100, "num_train_epochs": 0, "data_backend_config": "sets.json",
    "lora_rank": 16, "learning_rate": 1e-4, "optimizer": "adamw_bf16", "lr_scheduler": "cosine",
    "lr_warmup_steps": 10, "train_batch_size": 2, "mixed_precision": "bf16", "validation_steps": 5,
    "base_model_precision": "int8-quanto", "gradient_checkpointing": "true", "resolution": 512,
    "validation_prompt": "a dog", "flux_guidance_value": 1, "caption_dropout_probability": 0.1,
}  # fmt: skip


def _write_launches(folder: Path) -> None:
    for path in (ROOT / "tests/importing/references").rglob("*.*"):
        shutil.copy(path, folder)


def _write_commands(folder: Path) -> None:
    _write_launches(folder)
    for program, every in (("diffsynth", 9), ("diffusers", 2)):
        cases = json.loads((ROOT / f"tests/importing/cases/{program}.json").read_bytes())["cases"]
        for number, case in enumerate(list(cases.values())[::every]):
            text = " \\\n  ".join(map(shlex.join, case["commands"])).replace(" --", " \\\n  --")
            (folder / f"{program}{number}.sh").write_text(text, encoding="utf-8")
            for name, document in case.get("files", {}).items():
                (folder / Path(name).name).write_text(json.dumps(document), encoding="utf-8")
    (folder / "simpletuner.sh").write_text("simpletuner train --env 'mine'", encoding="utf-8")


def _read_launch(folder: Path, file: Path) -> None:
    options = ImportOptions(precision="bf16")
    with reading_only(folder):
        if file.suffix == ".sh":
            found = import_command(file.read_text(encoding="utf-8", errors="replace"), options)
        else:
            found = import_file(file, options)
    config_text(found), report(found.notes)


FOREIGN_READERS: dict[str, Reader] = {
    "tokenizer": Reader(_write_tokenizer, _read_tokenizer),
    "base": Reader(_write_base, _read_base),
    "adapter": Reader(write_adapters, _read_adapter),
    "external checkpoint": Reader(write_checkpoints, _read_checkpoint),
    "DeepSpeed checkpoint": Reader(_write_deepspeed, _read_checkpoint),
    "launch files": Reader(_write_launches, _read_launch, "*.[jy]*"),
    "commands": Reader(_write_commands, _read_launch, "*.sh", opens=False),
    "kohya datasets": Reader(_written(a_json=KOHYA, b_toml=TOML), _read_launch),
    "SimpleTuner": Reader(_written(config_json=SIMPLETUNER, sets_json=BACKENDS), _read_launch),
}
