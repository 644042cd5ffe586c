"""Families that a configuration may name, and those that can be trained."""

from __future__ import annotations

from typing import get_args

import pytest

from zerotrain.config import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.families import FAMILIES, LANGUAGE_MODELS, load_family, refuse_untrainable
from zerotrain.plan.architecture import TRAINED_PARTS


def test_the_names_are_those_of_configuration_and_planner() -> None:
    """One list."""
    named = get_args(RunConfig.model_fields["family"].annotation)
    assert set(named) == set(FAMILIES) == set(TRAINED_PARTS)


def test_what_has_no_module_is_refused_in_a_sentence() -> None:
    """It can be planned; the message names those that can be trained."""
    trainable = {"sdxl", *LANGUAGE_MODELS}
    for name in trainable:
        refuse_untrainable(name)
    for name in set(FAMILIES) - trainable:
        with pytest.raises(PipelineError, match=r"can be planned .* but not trained yet") as caught:
            load_family(name)
        assert "families that can be trained: causal_lm, sdxl, seq2seq_lm" in str(caught.value)
