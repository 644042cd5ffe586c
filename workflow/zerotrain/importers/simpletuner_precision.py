"""SimpleTuner's storage of the base during adapter training, and the layers that it excludes.

Source: simpletuner/helpers/training/quantisation/__init__.py at bc8e6ab7, _quanto_model. The base
is cast to bf16 and quantized before the adapter is added.
"""

from __future__ import annotations

from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig

QUANTO = ("int8-quanto", "int4-quanto", "int2-quanto")
EXCLUDED: dict[str, list[str]] = {
    "qwen_image": [],
    "flux": ["^proj_out", "x_embedder", "context_embedder"],
    "sd3": ["norm1.linear", "norm1_context.linear", "norm_out.linear", "proj_out",
            "context_embedder", "linear_1", "linear_2"],
}  # fmt: skip
"""Linear layers that its patterns match: patterns match whole names, so `*.norm1` does not match
norm1.linear of Flux. The missing family, SDXL, has convolutions, which quanto quantizes too."""


def put_precision(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set how the frozen base is stored.

    Raises:
        PipelineError: the weights are trained, or a low-bit method is not supported.
    """
    name = "base_model_precision"
    given = arguments.pop(name, None)
    via = arguments.pop("quantize_via", None)
    in_memory = arguments.pop("ramtorch", False)
    dtype = arguments.pop("base_model_default_dtype", None)
    if via is not None:
        result.ignore("quantize_via", via, "the device on which weights are quantized")
    if in_memory:
        result.drop("ramtorch", in_memory, "saves memory there; here a launch preset does")
    if given in (None, "no_change"):
        if given is not None:
            result.note("kept", name, given, "", "base")
        return
    if arguments.get("model_type") != "lora":
        raise PipelineError(
            f"{name}: {given!r}: weights that are trained are not quantized",
            hint="set it to no_change; a launch preset with offload needs less memory",
        )
    plain = arguments.get("lora_type", "standard") == "standard"
    family = result.values.get("family")
    if given in QUANTO and in_memory:
        result.ignore(name, given, "SimpleTuner quantizes no model whose layers ramtorch holds")
    elif given == "nf4-bnb" and plain:
        result.keep(name, given, name, "nf4")
    elif given in QUANTO and plain and family in EXCLUDED and via != "pipeline":
        result.keep(name, given, name)
        if EXCLUDED[family]:
            result.assume("base_model_exclude_modules", EXCLUDED[family], "in SimpleTuner's code")
        if dtype == "fp32":
            result.note("changed", "base_model_default_dtype", dtype,
                      "scales of quantized weights are bf16, not fp32", name)  # fmt: skip
    elif "8" in given:
        result.note(
            "changed", name, given,
            "the frozen base is not quantized: it takes more memory, and the adapter is trained "
            "next to the weights themselves, not next to their rounded copy",
        )  # fmt: skip
    else:
        raise PipelineError(
            f"{name}: {given!r}: of few bits there are nf4-bnb and, except for SDXL, int4-quanto "
            "and int2-quanto, under a standard LoRA; next to weights that are quantized otherwise "
            "another adapter is learned",
            hint=f"`--skip {name}` trains the adapter next to the weights themselves; "
            "it takes more memory, for which there is offload",
        )
