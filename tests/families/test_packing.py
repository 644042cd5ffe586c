"""Packing is refused where a model would let the examples of a row see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from zerotrain.errors import PipelineError
from zerotrain.models.families.positions import check_packable

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 80}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 96}
APART = {
    "Qwen2": GROUPED,
    "Llama": {**GROUPED, "pad_token_id": 70},
    "Mixtral": {**GROUPED, "num_local_experts": 2},
    "Gemma2": {**GROUPED, "head_dim": 8},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
}
TOGETHER = {
    "Bloom": ({"hidden_size": 32, "n_head": 4}, "BloomForCausalLM takes no position_ids"),
    "Mpt": ({"d_model": 32, "n_heads": 4}, "MptForCausalLM takes no position_ids"),
    "Falcon": (SIZES, "in FalconForCausalLM the examples of a row see each other"),
    "OPT": (
        {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
        "in OPTForCausalLM the examples of a row see each other: the logits of a second one differ",
    ),
}


def saved(name: str, values: dict[str, Any], folder: Path) -> Path:
    getattr(transformers, f"{name}Config")(**values).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", APART)
def test_models_that_mask_by_positions_take_packed_rows(name, tmp_path):
    """Whatever layers and heads they have; no generator is disturbed."""
    base = saved(name, APART[name], tmp_path)
    before = torch.get_rng_state()
    check_packable(base)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", TOGETHER)
def test_models_that_do_not_are_refused(name, tmp_path):
    """With what they do; it is measured where their arguments do not tell."""
    values, said = TOGETHER[name]
    with pytest.raises(PipelineError, match=f"train.packing: {said}") as refused:
        check_packable(saved(name, values, tmp_path))
    assert "set train.packing to false" in refused.value.hint


def test_a_model_that_cannot_be_asked_is_refused(tmp_path, monkeypatch):
    def broken(config: Any) -> float:
        raise ValueError("no such layer")

    monkeypatch.setattr("zerotrain.models.families.positions._difference", broken)
    with pytest.raises(PipelineError, match=r"could not be asked .* \(no such layer\)"):
        check_packable(saved("Qwen2", GROUPED, tmp_path))
