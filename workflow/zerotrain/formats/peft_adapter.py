"""peft: adapter_config.json and adapter_model.safetensors, as PeftModel.from_pretrained reads."""

from __future__ import annotations

from pathlib import Path

from zerotrain.artifact import file_sha256, write_json
from zerotrain.formats import Options
from zerotrain.formats.diffusers_lora import hold_adapter_to
from zerotrain.formats.tensors import write_tensors
from zerotrain.formats.weights import ExportedWeights, model_without_memory

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PeftModel puts before the names of the model that it wraps."""


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write both files; their sha256 by name."""
    adapter = weights.adapter
    assert adapter is not None
    config = adapter.config().to_dict() | {"inference_mode": True}
    # peft's own writer puts sets in an order of chance.
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    write_json(out / CONFIG, plain)
    named = {f"{PREFIX}{name}": tensor for name, tensor in adapter.tensors.items()}
    sha256 = write_tensors(out / FILE, named, options.dtype, weights.lineage())
    return {CONFIG: file_sha256(out / CONFIG), FILE: sha256}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the folder with peft and compare factors and scales."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(model_without_memory(weights), str(out))
    hold_adapter_to(weights, model, options.dtype, out)
