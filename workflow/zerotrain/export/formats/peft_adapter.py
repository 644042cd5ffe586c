"""peft: adapter_config.json and adapter_model.safetensors, for PeftModel.from_pretrained."""

from __future__ import annotations

from pathlib import Path

from zerotrain.artifact import file_sha256, write_json
from zerotrain.export.formats import Options
from zerotrain.export.formats.diffusers_lora import verify_adapter
from zerotrain.export.formats.tensors import write_tensors
from zerotrain.export.formats.weights import ExportedWeights, model_without_memory
from zerotrain.export.provenance import find_origin
from zerotrain.models.families.lora import PEFT_ADAPTER, PEFT_CONFIG, PEFT_PREFIX


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write both files, and return their sha256 by name."""
    adapter = weights.adapter
    assert adapter is not None
    config = adapter.config().to_dict() | {"inference_mode": True}
    origin = find_origin(weights.artifact)
    if origin.hub_id:
        config |= {"base_model_name_or_path": origin.hub_id, "revision": origin.commit}
    elif origin.base_folder is not None:
        config["base_model_name_or_path"] = str(origin.base_folder)
    # peft's own writer writes sets in random order.
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    write_json(out / PEFT_CONFIG, plain)
    named = {f"{PEFT_PREFIX}{name}": tensor for name, tensor in adapter.tensors.items()}
    sha256 = write_tensors(out / PEFT_ADAPTER, named, options.dtype, weights.lineage())
    return {PEFT_CONFIG: file_sha256(out / PEFT_CONFIG), PEFT_ADAPTER: sha256}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the folder with peft and compare factors and scales."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(model_without_memory(weights), str(out))
    assert weights.adapter is not None
    verify_adapter(weights.adapter, weights.scales, model, options.dtype, out)
