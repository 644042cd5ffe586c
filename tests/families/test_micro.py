"""`micro`, the larger of the presets, is built like `nano`."""

from __future__ import annotations

import pytest
from tests.builders.images import CAPTIONS, make_pictures
from tests.families.texts import SUMS

from zerotrain.config.families import FAMILIES, LANGUAGE_MODELS
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.model import trained_model
from zerotrain.models.families import autoencoders, load_family
from zerotrain.models.families.nano import build_language_model, build_pipeline


@pytest.mark.parametrize(
    "name",
    [
        *LANGUAGE_MODELS,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in FAMILIES
            if name not in LANGUAGE_MODELS
        ),
    ],
)
def test_micro_is_what_was_planned(name, tmp_path, monkeypatch):
    """It loads, and every tensor has the shape that the planner computed; the vocabulary is
    smaller."""
    # Its autoencoder is that of nano, and fitting changes no shape.
    monkeypatch.setattr(autoencoders, "_fit", lambda *_: (0.0, 1.0))
    if FAMILIES[name].modality == "text":
        build_language_model(load_family(name), SUMS, 0, tmp_path, preset="micro")
    else:
        pictures = make_pictures(256, 2)
        build_pipeline(load_family(name), CAPTIONS, pictures, 0, tmp_path, preset="micro")
    model = load_family(name).load_model(tmp_path)
    planned = trained_model(find_architecture(name, "micro")).shapes
    found = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    tables = {key for key in found if key.endswith(("embed_tokens.weight", "shared.weight"))}
    assert found.keys() == planned.keys()
    assert {key for key in found if found[key] != planned[key]} <= tables
