"""peft: adapter_config.json and adapter_model.safetensors, for PeftModel.from_pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerotrain.artifact import file_sha256, link_or_copy, write_json
from zerotrain.export.formats import Options
from zerotrain.export.formats.diffusers_lora import verify_adapter
from zerotrain.export.formats.tensors import verify_tensors, write_tensors
from zerotrain.export.formats.weights import Adapter, ExportedWeights, model_without_memory
from zerotrain.export.provenance import find_origin
from zerotrain.models.adapter_config import PEFT_PREFIX
from zerotrain.models.families.adapters import FOLDER, apply_peft, tensors_of
from zerotrain.models.families.lora import PEFT_ADAPTER, PEFT_CONFIG
from zerotrain.models.pretrained import load_peft


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write both files, and return their sha256 by name."""
    if weights.method is not None:
        link_or_copy(weights.artifact.path(f"{FOLDER}/{PEFT_CONFIG}"), out / PEFT_CONFIG)
        named = weights.method_tensors()
    else:
        assert weights.adapter is not None
        write_json(out / PEFT_CONFIG, _lora_config(weights, weights.adapter))
        named = {f"{PEFT_PREFIX}{name}": t for name, t in weights.adapter.tensors.items()}
    sha256 = write_tensors(out / PEFT_ADAPTER, named, options.dtype, weights.lineage())
    return {PEFT_CONFIG: file_sha256(out / PEFT_CONFIG), PEFT_ADAPTER: sha256}


def _lora_config(weights: ExportedWeights, adapter: Adapter) -> dict[str, Any]:
    config = adapter.config().to_dict() | {"inference_mode": True}
    origin = find_origin(weights.artifact)
    if origin.hub_id:
        config |= {"base_model_name_or_path": origin.hub_id, "revision": origin.commit}
    elif origin.base_folder is not None:
        config["base_model_name_or_path"] = str(origin.base_folder.absolute())
    # peft's own writer writes sets in random order.
    return {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the folder with peft and compare its tensors, and the scales of a LoRA."""
    model = model_without_memory(weights)
    if weights.method is not None:
        expected = {n.removeprefix(PEFT_PREFIX): t for n, t in weights.method_tensors().items()}
        verify_tensors(expected, tensors_of(apply_peft(model, out)), options.dtype, out)
        return
    assert weights.adapter is not None
    loaded = load_peft(model, out)
    verify_adapter(weights.adapter, weights.scales, loaded, options.dtype, out)
