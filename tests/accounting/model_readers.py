"""Readers of models, adapters and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.accounting.reader import NAMED, REFUSED, Reader, Tell, more, refusal
from tests.hostile.foreign_readers import (
    LORA,
    TRAINED,
    write_adapters,
    write_checkpoints,
)

from zerotrain.config.families import FAMILIES
from zerotrain.export.formats.opening import prefix_before
from zerotrain.export.formats.original_base import list_unread
from zerotrain.models.base import choose_files, list_others
from zerotrain.state.external import open_external
from zerotrain.state.external.adapter_files import check_all_used, from_kohya
from zerotrain.state.external.fitting import fit


def _adapter(form: str, own: Callable[[str], str]) -> Tell:
    def tell(folder: Path, name: str | None) -> str:
        write_adapters(folder)
        file = next((folder / form).glob("*.safetensors"))
        if name is not None:
            first = next(iter(load_file(file).values()))
            save_file({**load_file(file), own(name): first.clone()}, file)
        found = open_external(file if form == "kohya" else folder / form)
        if form == "kohya":
            return refusal(from_kohya, found, TRAINED, {layer: (layer,) for layer in LORA})
        return refusal(check_all_used, found, TRAINED) + "\n".join(
            line for line in found.lost if "alpha" not in line
        )

    return tell


def _settings(folder: Path, name: str | None) -> str:
    write_adapters(folder)
    path = folder / "peft/adapter_config.json"
    path.write_text(json.dumps(more(json.loads(path.read_text()), name)))
    return "\n".join(open_external(folder / "peft").lost)


def _checkpoint(form: str, change: Callable[[Path, str], None]) -> Tell:
    def tell(folder: Path, name: str | None) -> str:
        write_checkpoints(folder)
        if name is not None:
            change(folder / form, name)
        return "\n".join(open_external(folder / form).lost)

    return tell


def _add_file(folder: Path, name: str) -> None:
    (folder / f"{name}.pkl").touch()


def _add_key(folder: Path, name: str) -> None:
    for path in folder.glob("*/*_model_states.pt"):
        torch.save({**torch.load(path, weights_only=False), name: 1}, path)


def _add_slot(folder: Path, name: str) -> None:
    path = folder / "optimizer.bin"
    found = torch.load(path)
    for slots in found["state"].values():
        slots[name] = slots["exp_avg"].clone()
    torch.save(found, path)


def _add_slot_file(folder: Path, name: str) -> None:
    for path in [*folder.glob("*/zero/*/exp_avg.pt")]:
        path.with_name(f"{name}.pt").write_bytes(path.read_bytes())


def _weights(folder: Path, name: str | None) -> str:
    save_file(more({"a.weight": torch.ones(2)}, name, torch.ones(2)), folder / "step-1.safetensors")
    found = open_external(folder / "step-1.safetensors")
    return "\n".join(fit(found, {"a.weight": [2]}, lambda _: None).lost)


def _base(folder: Path, name: str | None) -> str:
    family = FAMILIES["causal_lm"]
    names = ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]
    if name is not None:
        names += [f"{name}.txt"]
    return "\n".join(list_others(names, choose_files(names, family, "x").values(), family))


def _parts(folder: Path, name: str | None) -> str:
    family = FAMILIES["sdxl"]
    names = ["model_index.json", "scheduler/scheduler_config.json"]
    for part in family.parts:
        names += [f"{part}/config.json", f"{part}/tokenizer_config.json"]
        names += [f"{part}/{stem}.safetensors" for stem in ("model", "diffusion_pytorch_model")]
    if name is not None:
        names += [f"{name}/config.json"]
    return "\n".join(list_others(names, choose_files(names, family, "x").values(), family))


def _single_file(_: Path, name: str | None) -> str:
    names = ["model.diffusion_model.out.2.weight", "first_stage_model.encoder.conv_in.weight"]
    return "\n".join(list_unread([*names, *([name] if name else [])]))


def _part(folder: Path, name: str | None) -> str:
    names = ["transformer.a.weight", *([f"transformer.{name}.weight"] if name else [])]
    return refusal(prefix_before, names, {"a.weight"}, folder / "a.safetensors")


IMPORTED = "`import_checkpoint`, `zerotrain state show`"
BUILT = "`build_base`"
MODEL_READERS: dict[str, Reader] = {
    "base in transformers' layout": Reader("files", NAMED, BUILT, _base),
    "base in diffusers' layout": Reader("files and parts", NAMED, BUILT, _parts),
    "base in one file": Reader("tensors", NAMED, BUILT, _single_file),
    "adapter of peft": Reader(
        "tensors", REFUSED, "`import_checkpoint`",
        _adapter("peft", lambda name: f"base_model.model.{name}.lora_A.weight"),
    ),
    "adapter of diffusers": Reader(
        "tensors", REFUSED, "`import_checkpoint`",
        _adapter("diffusers", lambda name: f"unet.{name}.lora_A.weight"),
    ),
    "adapter of kohya": Reader(
        "tensors", REFUSED, "`import_checkpoint`",
        _adapter("kohya", lambda name: f"lora_unet_{name}.lora_down.weight"),
    ),
    "adapter_config.json": Reader("settings", NAMED, IMPORTED, _settings),
    "file of weights": Reader("tensors", NAMED, "`import_checkpoint`", _weights),
    "checkpoint of accelerate": Reader(
        "files", NAMED, IMPORTED, _checkpoint("accelerate", _add_file)
    ),
    "checkpoint of HF's Trainer": Reader(
        "files", NAMED, IMPORTED, _checkpoint("trainer", _add_file)
    ),
    "optimizer of accelerate": Reader(
        "slots", NAMED, IMPORTED, _checkpoint("accelerate", _add_slot)
    ),
    "checkpoint of DeepSpeed": Reader(
        "files", NAMED, IMPORTED, _checkpoint("universal", _add_file)
    ),
    "model file of DeepSpeed": Reader(
        "keys", NAMED, IMPORTED, _checkpoint("universal", _add_key)
    ),
    "optimizer of DeepSpeed": Reader(
        "slots", NAMED, IMPORTED, _checkpoint("universal", _add_slot_file)
    ),
    "part of a model for `sample`": Reader("tensors", REFUSED, "`sample`", _part),
}  # fmt: skip
