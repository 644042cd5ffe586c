"""Header entries that describe a file's model, for programs that sort files by them.

Stability AI's model metadata standard, https://github.com/Stability-AI/ModelSpec; and for a LoRA,
kohya's own ss_ keys, which A1111 and similar programs show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotrain.config.families import FAMILIES
from zerotrain.config.families.spec import Titles
from zerotrain.export.formats.weights import ExportedWeights

DEFAULT_SAMPLE_SIZE = 128
"""Side in latents of models without a native size (such as FluxPipeline)."""


def architecture(weights: ExportedWeights, suffix: str = "") -> dict[str, str]:
    """Return modelspec's entries for a file.

    Args:
        weights: The weights that the file is made from.
        suffix: "/lora" for an adapter.
    """
    lineage = weights.lineage()
    run = lineage.get("zerotrain.run", weights.family.name)
    side = resolution(weights)
    name = weights.family.name
    kind, known = prediction(weights)[0], titles_of(name)
    return {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": base_name(name, weights.config(weights.part)) + suffix,
        "modelspec.implementation": known.implementation,
        "modelspec.title": f"{run}, step {lineage['zerotrain.step']}",
        "modelspec.resolution": f"{side}x{side}",
        **({"modelspec.prediction_type": kind} if kind else {}),
    }


def titles_of(family: str) -> Titles:
    """Return the names of an image family in other programs."""
    titles = FAMILIES[family].titles
    assert titles is not None
    return titles


def base_name(family: str, config: Mapping[str, Any]) -> str:
    """Return modelspec's name of a base, by its family and the config.json of its denoiser."""
    titles = titles_of(family)
    for key, name in titles.variants.items():
        if bool(config.get(key.removeprefix("not "))) != key.startswith("not "):
            return name
    return titles.architecture


def network(weights: ExportedWeights) -> dict[str, str]:
    """Return kohya's entries for a LoRA, except dates and file names, which differ in each run."""
    assert weights.adapter is not None
    settings = weights.adapter.settings
    kind, zero_snr = prediction(weights)
    known = titles_of(weights.family.name)
    return {
        "ss_base_model_version": known.base_version,
        "ss_network_module": known.network,
        "ss_network_dim": str(settings["r"]),
        "ss_network_alpha": str(float(settings["lora_alpha"])),
        "ss_v2": "False",
        "ss_v_parameterization": str(kind == "v"),
        "ss_zero_terminal_snr": str(zero_snr),
        "ss_steps": weights.lineage()["zerotrain.step"],
    }


def prediction(weights: ExportedWeights) -> tuple[str | None, bool]:
    """Return `epsilon`, `v`, or None for a flow, and whether the last timestep is pure noise."""
    config = weights.config("scheduler")
    if config["_class_name"].startswith("FlowMatch"):
        return None, False
    kind = "v" if config.get("prediction_type") == "v_prediction" else "epsilon"
    return kind, bool(config.get("rescale_betas_zero_snr"))


def resolution(weights: ExportedWeights) -> int:
    """Return the model's native image side in pixels."""
    latent: int = weights.config(weights.part).get("sample_size", DEFAULT_SAMPLE_SIZE)
    vae = weights.config("vae")
    halved = vae.get("temperal_downsample", vae.get("block_out_channels", [0])[1:])
    pixels: int = latent * 2 ** len(halved)
    return pixels
