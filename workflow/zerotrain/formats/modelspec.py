"""What a file's header says of the model, for those who sort files by it.

Stability AI's model metadata standard, https://github.com/Stability-AI/ModelSpec; and of a LoRA,
kohya's own ss_ keys, which A1111 and its kin show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from zerotrain.formats.weights import ExportedWeights

ARCHITECTURES: Mapping[str, str] = {"sdxl": "stable-diffusion-xl-v1-base"}
SS_BASE_VERSIONS: Mapping[str, str] = {"sdxl": "sdxl_base_v1-0"}


def architecture(weights: ExportedWeights, kind: str = "") -> dict[str, str]:
    """modelspec's entries of a file.

    Args:
        weights: What the file is made from.
        kind: "/lora" for an adapter.
    """
    lineage = weights.lineage()
    run = lineage.get("zerotrain.run", weights.family.name)
    side = resolution(weights)
    return {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": ARCHITECTURES[weights.family.name] + kind,
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        "modelspec.title": f"{run}, step {lineage['zerotrain.step']}",
        "modelspec.resolution": f"{side}x{side}",
        "modelspec.prediction_type": prediction(weights)[0],
    }


def network(weights: ExportedWeights) -> dict[str, str]:
    """kohya's entries of a LoRA, but for dates and file names, which would not be reproducible."""
    assert weights.adapter is not None
    settings = weights.adapter.settings
    kind, zero_snr = prediction(weights)
    return {
        "ss_base_model_version": SS_BASE_VERSIONS[weights.family.name],
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(settings["r"]),
        "ss_network_alpha": str(float(settings["lora_alpha"])),
        "ss_v2": "False",
        "ss_v_parameterization": str(kind == "v"),
        "ss_zero_terminal_snr": str(zero_snr),
        "ss_steps": weights.lineage()["zerotrain.step"],
    }


def prediction(weights: ExportedWeights) -> tuple[str, bool]:
    """`epsilon` or `v`, and whether no signal is left at the last timestep."""
    config = weights.config("scheduler")
    kind = "v" if config.get("prediction_type") == "v_prediction" else "epsilon"
    return kind, bool(config.get("rescale_betas_zero_snr"))


def resolution(weights: ExportedWeights) -> int:
    """Side in pixels of the images that the model was made for."""
    latent: int = weights.config(weights.part)["sample_size"]
    blocks: list[int] = weights.config("vae")["block_out_channels"]
    return latent * math.prod([2] * (len(blocks) - 1))
