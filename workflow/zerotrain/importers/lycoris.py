"""SimpleTuner's lycoris_config.json: LyCORIS' LoKr, trained with peft's equivalent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.key_values import read_keys
from zerotrain.importers.keys import LYCORIS

FULL = 10000
"""A rank beyond which LyCORIS and peft train both factors in full, without a scale."""
_JOINT = ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]
_OWN = ["to_k", "to_q", "to_v", "to_out.0"]
LAYERS = {
    "sdxl": _OWN, "sd3": [*_OWN, *_JOINT], "flux": [*_OWN, *_JOINT], "qwen_image": [*_OWN, *_JOINT],
}  # fmt: skip
"""The linear layers of diffusers' class Attention in each family."""
NAME = "lycoris_config"


def read_lycoris(
    config: Mapping[str, Any], where: str, family: str, result: ImportedConfig
) -> None:
    """Set `peft:` from LyCORIS' configuration.

    Sources: lycoris/modules/lokr.py and peft/tuners/lokr/layer.py, both with `factorization`, and
    peft's init_weights "lycoris".

    Raises:
        PipelineError: another algorithm, or layers other than attention's.
    """
    with result.collect():
        flat = read_keys({NAME: config}, LYCORIS, where, result)
        found = {key.removeprefix(f"{NAME}."): value for key, value in flat.items()}
        algorithm = found.get("algo")
        if algorithm != "lokr":
            raise PipelineError(
                f"{where}: {NAME}.algo is {algorithm}", hint="lokr is trained as peft's LoKr"
            )
        modules = found.get("apply_preset.target_module", [])
        if modules != ["Attention"]:
            raise PipelineError(
                f"{where}: {NAME}.apply_preset.target_module is {modules}",
                hint="Attention alone is known; name other layers in peft.target_modules",
            )
        factor = found.get("factor", -1)
        own = found.get("apply_preset.module_algo_map", {}).get("Attention", {})
        if {**own, "factor": factor} != {"factor": own.get("factor", factor)}:
            raise PipelineError(
                f"{where}: {NAME}.apply_preset.module_algo_map gives Attention {own}",
                hint=f"factor {factor} holds for all layers here",
            )
        rank, alpha = found.get("linear_dim", FULL), found.get("linear_alpha", 1)
        full = found.get("full_matrix", False) or rank >= FULL
        key = f"{NAME}.linear_dim"
        result.keep(f"{NAME}.algo", algorithm, "peft.peft_type", "LOKR")
        result.keep(
            key, rank, "peft.r", FULL if full else rank, "both factors whole" if full else ""
        )
        result.keep(
            f"{NAME}.linear_alpha", alpha, "peft.alpha", FULL if full else alpha,
            "LyCORIS scales whole factors by 1" if full else "",
        )  # fmt: skip
        result.keep(f"{NAME}.factor", factor, "peft.decompose_factor")
        if found.get("decompose_both"):
            result.keep(f"{NAME}.decompose_both", True, "peft.decompose_both")
        result.keep(
            f"{NAME}.apply_preset.target_module", modules, "peft.target_modules", LAYERS[family],
            "the linear layers of Attention",
        )  # fmt: skip
        result.assume("peft.init_weights", "lycoris", "LyCORIS' own first values")
