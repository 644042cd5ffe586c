"""Language models under every engine: one training, switched twice, is the training without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tests.families.texts import LORA, batch
from tests.training.conftest import Training, trained_model
from tests.training.inputs import text_inputs

from zerotrain import artifact
from zerotrain.config.families import FAMILIES, ROOT

EMBEDDINGS = {"causal_lm": "embed_tokens", "seq2seq_lm": "^shared"}
"""One of the names of the tied embeddings."""
CASES = [("causal_lm", "lora"), ("seq2seq_lm", "full"), ("causal_lm", "frozen")]
"""An adapter, all of the model, or all but the tied embeddings."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "what"), [*CASES[:2], pytest.param(*CASES[2], marks=pytest.mark.soak)]
)
def test_a_training_of_text_continues_over_two_switches(family, what, server, tmp_path):
    """The losses are those of plain PyTorch, and the real library loads each phase's weights."""
    inputs = text_inputs(family, tmp_path / "inputs")
    training = Training(tmp_path, inputs, server)
    rows = artifact.read(inputs / "cache", "cache").content["epoch_size"] // 2
    lora = {"rank": 2, "alpha": 8.0, "dropout": 0.0, "target_modules": list(LORA[family])}
    changes = {
        "family": family,
        "objective": {},
        "epoch_size": rows,
        "lora": lora if what == "lora" else None,
        "frozen_parameters": [EMBEDDINGS[family]] if what == "frozen" else [],
    }
    chosen = {key: changes[key] for key in ("lora", "frozen_parameters")}
    training.run("whole", "torch", 9, **changes)
    state = None
    for number, (preset, own) in enumerate(
        [("torch", {}), ("zero2_offload", {}), ("zero3_offload", {"zero3_init": True})], 1
    ):
        name = f"part-{number}"
        training.run(name, preset, 3 * number, state=state, **changes, **own)
        folder = training.rolling(name, 3 * number)
        weights, state = training.export(name, 3 * number, family, **chosen)
        transformers.AutoTokenizer.from_pretrained(weights)
        given = batch(family, inputs / "base")
        trained = _logits(trained_model(family, inputs / "base", folder, *chosen.values()), given)
        assert torch.equal(_logits(_loaded(family, weights), given), trained)
        untrained = _loaded(family, inputs / "base")
        assert not torch.equal(_logits(untrained, given), trained)
        if what == "lora":
            by_peft = peft.PeftModel.from_pretrained(untrained, weights)
            assert torch.equal(_logits(by_peft, given), trained)
    whole, parts = training.losses("whole"), training.losses("part-3")
    assert whole[-1] < whole[0]
    assert parts == pytest.approx(whole, abs=2e-5)


def _loaded(family: str, folder: Path) -> Any:
    return getattr(transformers, FAMILIES[family].classes[ROOT]).from_pretrained(folder)


def _logits(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(**given).logits
