"""Language models of other classes than the nano ones: taught, written and asked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.builders.refusals import refusal
from tests.builders.runs import make_config
from tests.families.texts import batch, build_class, family_of, logits, taught

from zerotrain.config.families import ROOT
from zerotrain.config.models import EvaluateConfig
from zerotrain.data.conversation import Message
from zerotrain.models.families.language import LanguageFamily
from zerotrain.models.families.lora import add_adapter, save_adapter
from zerotrain.models.families.model_tensors import stored_tensors
from zerotrain.models.sizes import model_sizes
from zerotrain.stages.build_base import BuildSettings, build_base

LORA = {"rank": 2, "alpha": 8.0, "dropout": 0.0, "target_modules": None}
"""Of the attention's projections, whatever the class calls them."""


@pytest.fixture(scope="module", params=["gpt2", "bloom", "bart"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def base(kind, tmp_path_factory) -> Path:
    return build_class(kind, tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def family(kind) -> LanguageFamily:
    return family_of(kind)


def trained_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def test_the_loss_is_the_librarys_own(family, base):
    """Of one example, in eval mode."""
    model = family.load_model(base).eval()
    given = {name: tensor[:1] for name, tensor in batch(family.name, base).items()}
    length = int(given["attention_mask"].sum())
    labels = given["labels"][given["labels"] != -100][None]
    if family.name == "causal_lm":
        labels = given["labels"][:, :length]
    with torch.inference_mode():
        own = model(input_ids=given["input_ids"][:, :length], labels=labels).loss
        found = family.objective(base).loss(model, given)
    torch.testing.assert_close(found[0], own, atol=2e-6, rtol=0)


def test_what_was_trained_is_what_the_library_loads(family, base, tmp_path):
    """The whole model: equal outputs, and buffers that are none of the training."""
    model = family.load_model(base)
    taught(family, model, base)
    tensors = trained_tensors(model)
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    family.save_model(base, shapes, tensors.__getitem__, torch.float32, tmp_path)
    loaded = getattr(transformers, family.spec.classes[ROOT]).from_pretrained(tmp_path)
    given = batch(family.name, base)
    assert torch.equal(logits(loaded, given, family.name), logits(model, given, family.name))


def test_an_adapter_of_the_attention_is_applied(family, base, tmp_path):
    """With targets by themselves; loaded by transformers, outputs are those of the training."""
    model = family.load_model(base)
    add_adapter(model, seed=0, **LORA)
    taught(family, model, base)
    tensors = trained_tensors(model)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_adapter(family, base, shapes, tensors.__getitem__, LORA, dtype=torch.float32, out=tmp_path)
    given = batch(family.name, base)
    expected = logits(model, given, family.name)
    assert torch.equal(logits(family.load_trained(tmp_path), given, family.name), expected)
    assert not torch.equal(logits(family.load_model(base), given, family.name), expected)


def test_an_adapter_of_every_linear_layer_is_counted_as_trained(family, base):
    model, lora = family.load_model(base), LORA | {"target_modules": "all-linear"}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    add_adapter(model, seed=0, **lora)
    counted = model_sizes(shapes, lora).trained
    assert counted == sum(tensor.numel() for tensor in trained_tensors(model).values())


def test_answers_are_those_of_the_library(family, base):
    """Greedy, in a batch: what a user's own call of `generate` gives for each prompt alone."""
    model = getattr(transformers, family.spec.classes[ROOT]).from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    prompts = [[Message("user", text)] for text in ("1+2=", "what is 2+3=", "1+1=")]
    config = EvaluateConfig(batch_size=4, max_new_tokens=12)
    found = family.generate(base, prompts, config, max_length=32, device="cpu")
    for messages, answer in zip(prompts, found, strict=True):
        text = messages[-1].content
        ids = tokenizer(text + "\n" * (family.name == "causal_lm"), return_tensors="pt").input_ids
        own = model.generate(ids, max_new_tokens=12, do_sample=False)[0]
        own = own[ids.shape[1] :] if family.name == "causal_lm" else own
        assert answer == tokenizer.decode(own, skip_special_tokens=True).strip()
    assert found[0] == "3"


def without_head(kind: str, folder: Path, **changes: Any) -> Any:
    """Saved as the class without a head does: no prefix in the names, and no buffer of the head.

    Returns:
        The whole model.
    """
    build_class(kind, folder, steps=0, **changes)
    model = family_of(kind).load_model(folder)
    body = getattr(model, model.base_model_prefix)
    body.to(torch.bfloat16).save_pretrained(folder)
    return model.float()


def build_linked(kind: str, model: Path, base: Path) -> Path:
    build_base(
        BuildSettings.of(
            make_config(family=family_of(kind).name, base=str(model), data={"source": "sums"})
        ),
        None,
        base,
    )
    return base


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "bart"], scope="module")
def test_a_base_without_its_head_gets_the_names_of_its_class(kind, family, tmp_path):
    """So that a training with one frozen parameter is written; the user's folder stays."""
    model = without_head(kind, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    base = build_linked(kind, tmp_path / "model", tmp_path / "base")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    held = load_file(base / "model.safetensors")
    assert held.keys() == stored_tensors(family.empty_model(base)).keys()
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    tensors = trained_tensors(model)
    left = min(tensors)
    del tensors[left]
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    out = Path(shutil.copytree(base, tmp_path / "weights"))
    family.save_model(
        base, shapes, tensors.__getitem__, torch.float32, out, frozen=lambda name: name == left
    )
    given = batch(family.name, base)
    loaded = getattr(transformers, family.spec.classes[ROOT]).from_pretrained(out)
    assert torch.equal(logits(loaded, given, family.name), logits(model, given, family.name))


def test_a_base_with_its_class_s_names_is_linked(kind, base, tmp_path):
    assert (build_linked(kind, base, tmp_path / "base") / "model.safetensors").is_symlink()


@pytest.mark.parametrize("kind", ["llama"], scope="module")
def test_a_base_that_lacks_a_weight_is_refused(kind, tmp_path):
    """Its library would draw the head at random."""
    without_head(kind, tmp_path / "model", tie_word_embeddings=False)
    text = refusal(build_linked, kind, tmp_path / "model", tmp_path / "base")
    assert text == (
        f"ERROR: {tmp_path / 'model'}: no tensor lm_head.weight, which the model's config.json "
        "asks for\n"
        "  Hint: complete the folder, or download the model again"
    )
    assert not (tmp_path / "base").exists()
