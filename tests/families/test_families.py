"""The table of families."""

from __future__ import annotations

import pytest
from tests.builders.runs import make_run

from zerotrain.config.families import FAMILIES
from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.models.families import load_family


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_says_what_the_module_says(name: str) -> None:
    """A configuration reads the table; stages read the module."""
    family, kind = load_family(name), FAMILIES[name]
    assert (family.spec, family.modality) == (kind, kind.modality)
    assert bool(getattr(family, "samplers", {})) == kind.noise_schedule


def test_an_unknown_family_is_refused_in_a_sentence() -> None:
    """The message names those that are there."""
    with pytest.raises(PipelineError, match="family: 'pixart' is not known") as caught:
        load_family("pixart")
    assert caught.value.hint == "families: " + ", ".join(FAMILIES)
    raw = make_run(family="pixart", data={"source": "digits"})
    with pytest.raises(PipelineError, match="family: must be one of sdxl, flux, qwen_image"):
        parse_config(raw, "test.yaml")
