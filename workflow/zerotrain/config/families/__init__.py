"""The model families: one module here for each, with all that is asked of it before torch.

What a family computes is in zerotrain.models.families, in a module of the same name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from zerotrain.config.families.spec import ROOT, FamilySpec

__all__ = ["CONDITIONS", "DEFAULT", "FAMILIES", "LANGUAGE_MODELS", "PRESETS", "ROOT", "FamilySpec"]

PRESETS = ("nano", "micro")
"""Small models of the real classes that `base` may name; `micro` has ten times the parameters."""
DEFAULT = "sdxl"
"""The family of a configuration that names none."""
CONDITIONS = ("flux_guidance_value",)
"""Keys of config.objective that the model receives; the others say how it is trained."""


def _read_specs() -> dict[str, FamilySpec]:
    names = [found.name for found in pkgutil.iter_modules(__path__) if found.name != "spec"]
    specs = [importlib.import_module(f"{__name__}.{name}").SPEC for name in names]
    return {spec.name: spec for spec in sorted(specs, key=_place)}


def _place(spec: FamilySpec) -> tuple[str, bool, str]:
    return spec.modality, spec.name != DEFAULT, spec.name


FAMILIES: Mapping[str, FamilySpec] = _read_specs()
"""Those that a configuration may name: of images, then of text."""
LANGUAGE_MODELS = tuple(name for name, spec in FAMILIES.items() if spec.modality == "text")
"""Those of text; the others are of images."""
