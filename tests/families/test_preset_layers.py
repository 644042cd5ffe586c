"""The names that `zerotrain check` knows of the small models are those of the models."""

from __future__ import annotations

import pytest

from zerotrain.config.families import FAMILIES, PRESETS
from zerotrain.graph.checks.base import preset_layers
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.model import trained_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_word_of_a_layers_name_is_known(family: str) -> None:
    """Both presets have the same; numbers are left away."""
    for preset in PRESETS:
        names = dict(trained_model(find_architecture(family, preset)).module.named_modules())
        words = {word for name in names for word in name.split(".") if not word.isdigit()}
        assert words - {""} == {*preset_layers()[family]}
