"""An adapter that is no LoRA: what becomes of its weights folder, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.builders.adapters import difference
from tests.formats.commands import distance, sample_images
from tests.formats.conftest import publish as card
from tests.formats.conftest import published

from zerotrain.errors import PipelineError
from zerotrain.export.command import convert
from zerotrain.export.formats import FORMATS
from zerotrain.models.families import adapters
from zerotrain.models.families.sdxl import FAMILY

LOHA = {"peft_type": "LOHA", "r": 2, "alpha": 6, "target_modules": ["to_q", "conv1"]}


def save(base: Path, out: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Write an adapter with values of chance, and give the model that has it."""
    model = adapters.add(FAMILY.load_model(base), LOHA, 3).eval()
    source = torch.Generator().manual_seed(1)
    held = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in held.values():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=source)
    tensors = {name: changes.get("value", lambda p: p)(p) for name, p in held.items()}
    shapes = {name: list(p.shape) for name, p in tensors.items()}
    adapters.save(FAMILY, base, shapes, tensors.__getitem__, LOHA, dtype=dtype, out=out)
    return model


@pytest.fixture(scope="module")
def trained(base: Path) -> torch.nn.Module:
    return save(base, base.parent / "loha-adapter")


@pytest.fixture(scope="module")
def loha(base: Path, trained: torch.nn.Module) -> Path:
    """Weights of a LoHa."""
    return published(base, base.parent / "loha", base.parent / "loha-adapter")


def test_the_weights_folder_is_the_trained_model(base, loha, trained):
    assert difference(FAMILY.load_trained(loha), trained) == 0.0
    assert difference(FAMILY.load_model(loha).eval(), trained) > 1e-3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_pefts_folder_answers_as_the_trained_model(base, loha, trained, tmp_path, dtype):
    convert(loha, "peft", tmp_path / "out", dtype=dtype)
    model = peft.PeftModel.from_pretrained(FAMILY.load_model(base), tmp_path / "out").eval()
    assert difference(model, trained) <= (0.0 if dtype == "fp32" else 0.1)
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    expected = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert {tensor.dtype for tensor in stored.values()} == {expected}


@pytest.mark.parametrize("form", ["weights", "peft"])
def test_the_card_says_how_to_load_it(base, loha, trained, tmp_path, form, monkeypatch):
    """Its code runs, and gives the model that was trained; its tag is the method's."""
    source = loha
    if form == "peft":
        convert(loha, "peft", source := tmp_path / "out")
    card(source, "owner/cats", "--dry-run", "--card", tmp_path / "card")
    text = (tmp_path / "card" / "README.md").read_text()
    assert "- loha\n" in text
    assert "- lora\n" not in text
    code = text.split("```")[1].removeprefix("python\n").replace("BASE", str(base))
    code = code.replace('snapshot_download("owner/cats")', repr(str(source)))
    scope: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)  # it writes an image there
    exec(code.replace("owner/cats", str(source)), scope)
    model = scope["model"] if form == "peft" else scope["pipeline"].unet
    assert difference(model.eval(), trained) == 0.0


def test_merged_weights_answer_as_the_trained_model(loha, trained, tmp_path):
    """A whole model: no adapter is left, and every other format follows from it."""
    convert(loha, "merged", tmp_path / "out")
    assert not (tmp_path / "out" / "adapter").exists()
    assert difference(FAMILY.load_model(tmp_path / "out").eval(), trained) <= 1e-5


@pytest.mark.slow
def test_images_are_those_of_the_adapter(loha, base, tmp_path):
    """Of the weights folder, of peft's folder next to its base, and of merged weights."""
    expected = sample_images(loha, tmp_path / "a")
    assert expected != sample_images(base, tmp_path / "b")
    convert(loha, "peft", tmp_path / "peft")
    assert sample_images(tmp_path / "peft", tmp_path / "c", "--base", base) == expected
    convert(loha, "merged", tmp_path / "merged")
    assert distance(sample_images(tmp_path / "merged", tmp_path / "d")[0], expected[0]) <= 1


@pytest.mark.parametrize("form", [name for name in FORMATS if name not in ("peft", "merged")])
def test_other_forms_are_refused(loha, tmp_path, form):
    """They would hold the base alone, or call its tensors a LoRA's."""
    with pytest.raises(PipelineError) as refused:
        convert(loha, form, tmp_path / "out")
    assert f"--to {form}: an adapter by LoHa is no LoRA, and this form" in refused.value.what
    assert refused.value.hint == "choose --to peft or --to merged"
    assert not (tmp_path / "out").exists()


def test_another_type_wants_a_form(loha, tmp_path):
    """The library's own folder, which is meant without one, holds no adapter of this method."""
    with pytest.raises(PipelineError) as refused:
        convert(loha, None, tmp_path / "out", dtype="bf16")
    assert refused.value.what == "--to is missing: an adapter by LoHa is converted to its own forms"
    assert refused.value.hint == "choose --to peft or --to merged"


def test_an_adapter_that_was_not_trained_is_refused(base, tmp_path):
    model = adapters.add(FAMILY.load_model(base), LOHA, 3)
    held = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: list(p.shape) for name, p in held.items()}
    words = {"dtype": torch.float32, "out": tmp_path}
    with pytest.raises(PipelineError, match=r"\(LoHa\) does nothing: .*hada_w2_b"):
        adapters.save(FAMILY, base, shapes, held.__getitem__, LOHA, **words)
    with pytest.raises(PipelineError, match=r"\(LoHa\) is empty: the training has no tensors"):
        adapters.save(FAMILY, base, {}, held.__getitem__, LOHA, **words)
    assert not list(tmp_path.iterdir())


def test_tensors_of_another_adapter_are_refused(base, tmp_path):
    with pytest.raises(PipelineError, match=r"by the base model and the section `peft`"):
        save(base, tmp_path, value=lambda p: p[:1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_modules": ["to_qq"]}, "peft.target_modules: no layer of UNet2DConditionModel"),
        ({"target_modules": "nothing.*"}, "'nothing.*' is the whole name of no layer"),
        (
            {"peft_type": "C3A", "block_size": 7, "target_modules": ["to_q"]},
            "C3A cannot adapt this model so: The block size should be a factor of",
        ),
        (
            {"peft_type": "MISS", "target_modules": ["conv1"]},
            "'conv1' names Conv2d in UNet2DConditionModel, no linear layer",
        ),
    ],
)
def test_what_the_layers_cannot_have_is_reported_in_pefts_words(base, settings, said):
    with pytest.raises(PipelineError) as refused:
        adapters.add(FAMILY.empty_model(base), {"peft_type": "LOHA", **settings}, 0)
    assert said in refused.value.what
