"""single_file: the trained part's tensors in one safetensors file, with a prefix or without.

DiffSynth-Studio reads such files; its `--remove_prefix_in_ckpt "pipe.dit."` is the default here,
and `--prefix pipe.dit.` what it writes without that.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from zerotrain.families.lora import METADATA
from zerotrain.formats import Options
from zerotrain.formats.diffusers_lora import hold_adapter_to
from zerotrain.formats.tensors import hold_to, write_tensors
from zerotrain.formats.weights import ExportedWeights, model_without_memory

FILE = "model.safetensors"


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the file, of an adapter's tensors where one was trained; its sha256 by name."""
    tensors, said = weights.trained, weights.lineage()
    if weights.adapter is not None:
        tensors = weights.adapter.tensors
        settings = {f"{options.prefix}{k}": v for k, v in weights.adapter.settings.items()}
        said[METADATA] = json.dumps(settings, sort_keys=True)
    named = {f"{options.prefix}{name}": tensor for name, tensor in tensors.items()}
    return {FILE: write_tensors(out / FILE, named, options.dtype, said)}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the file into the library's own model and compare it bit by bit."""
    if weights.adapter is not None:
        model = model_without_memory(weights)
        prefix = options.prefix.removesuffix(".") or None
        model.load_lora_adapter(  # type: ignore[operator]
            str(out), prefix=prefix, weight_name=FILE
        )
        hold_adapter_to(weights, model, options.dtype, out)
        return
    model = weights.family.empty_model(weights.folder)
    state = {n.removeprefix(options.prefix): t for n, t in load_file(out / FILE).items()}
    model.load_state_dict(state, strict=False, assign=True)
    # Of tied weights the file holds the first alone.
    tied = getattr(model, "all_tied_weights_keys", {})
    held = {n: t for n, t in model.state_dict().items() if n not in tied or not t.is_meta}
    hold_to(weights.trained, held, options.dtype, out)
