"""Language models: loaded, taught and written as transformers and peft do it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from tests.families.texts import LORA, SUMS, batch, build, logits

from zerotrain.artifact.tensor_file import open_tensors
from zerotrain.config.families import ROOT
from zerotrain.config.models import EvaluateConfig
from zerotrain.config.trained_part import is_frozen
from zerotrain.data.conversation import Message
from zerotrain.errors import PipelineError
from zerotrain.models.base import check_config, choose_files
from zerotrain.models.families import load_family, model_tensors
from zerotrain.models.families.lora import PEFT_ADAPTER, PEFT_CONFIG, add_adapter, save_adapter
from zerotrain.models.trainable import choose_trained, trained_parameters

FAMILIES = ("causal_lm", "seq2seq_lm")
EMBEDDINGS = {"causal_lm": "embed_tokens", "seq2seq_lm": "^shared"}
SETTINGS = {"rank": 2, "alpha": 8.0, "dropout": 0.0}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def base(name, tmp_path_factory) -> Path:
    return build(name, tmp_path_factory.mktemp(name))


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def test_a_nano_model_follows_from_its_seed(name, base, tmp_path):
    """Equal seeds give equal files, which the library loads; another seed gives other weights."""
    assert hashes(build(name, tmp_path / "again")) == hashes(base)
    loaded = getattr(transformers, load_family(name).spec.classes[ROOT]).from_pretrained(base)
    assert sum(p.numel() for p in loaded.parameters()) < 500_000


def test_any_text_comes_back_from_a_nano_tokenizer(name, base):
    """Every byte has a token, and digits have one each."""
    tokenizer = load_family(name).load_tokenizer(base)
    text = "Straße 12+30=42 日本\n  x"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode(i) for i in tokenizer("123", add_special_tokens=False).input_ids] == [
        *"123"
    ]


def test_the_loss_is_the_libraries_own(name, base):
    """Of one example; of a batch each sample has the loss that it has alone."""
    family = load_family(name)
    model = family.load_model(base).eval()
    given = batch(name, base)
    with torch.inference_mode():
        together = family.objective(base).loss(model, given)
        assert together.dtype == torch.float32
        for i in range(2):
            length = int(given["attention_mask"][i].sum())
            answer = given["labels"][i : i + 1]
            labels = answer[:, :length] if name == "causal_lm" else answer[answer != -100][None]
            own = model(input_ids=given["input_ids"][i : i + 1, :length], labels=labels).loss
            torch.testing.assert_close(together[i], own, atol=2e-6, rtol=0)


def test_an_empty_model_has_names_ties_and_buffers(name, base):
    """Parameters have no storage; buffers have the values that loading gives."""
    family = load_family(name)
    empty, loaded = family.empty_model(base), family.load_model(base)
    assert [n for n, _ in empty.named_parameters()] == [n for n, _ in loaded.named_parameters()]
    assert all(p.is_meta for p in empty.parameters())
    assert dict(empty.named_buffers()).keys() == dict(loaded.named_buffers()).keys()
    for (called, found), (_, expected) in zip(
        empty.named_buffers(), loaded.named_buffers(), strict=True
    ):
        assert torch.equal(found, expected), called
    assert empty.lm_head.weight is empty.get_input_embeddings().weight


@pytest.mark.parametrize("shard", ["10GB", "300KB"])
def test_written_weights_load_with_the_library(name, base, tmp_path, monkeypatch, shard):
    """Bit for bit, tied tensors once, in one file or in several."""
    monkeypatch.setattr(model_tensors, "MAX_SHARD_SIZE", shard)
    family = load_family(name)
    model = family.load_model(base)
    tensors = {n: p.detach() + 0.5 for n, p in model.named_parameters()}
    shapes = {n: list(t.shape) for n, t in tensors.items()}
    known = family.save_model(base, shapes, tensors.__getitem__, torch.float32, tmp_path)
    assert known == {n: h for n, h in hashes(tmp_path).items() if n.endswith(".safetensors")}
    assert (len(known) > 1) == (shard == "300KB")
    assert set(open_tensors(tmp_path / file for file in known)) == set(
        open_tensors([base / "model.safetensors"])
    )
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    loaded = getattr(transformers, family.spec.classes[ROOT]).from_pretrained(tmp_path)
    for called, parameter in loaded.named_parameters():
        assert torch.equal(parameter, tensors[called]), called


def test_frozen_tied_embeddings_stay_those_of_the_base(name, base, tmp_path):
    """Though the pattern names one of the tensor's names alone, all else is what was trained."""
    family, frozen = load_family(name), [EMBEDDINGS[name]]
    model = choose_trained(family.load_model(base), None, frozen, seed=0)
    for parameter in trained_parameters(model).values():
        parameter.data += 0.5
    tensors = trained_parameters(model)
    shapes = {n: list(p.shape) for n, p in tensors.items()}
    out = Path(shutil.copytree(base, tmp_path / "weights"))
    family.save_model(
        base, shapes, tensors.__getitem__, torch.float32, out,
        frozen=lambda name: is_frozen(name, frozen, []),
    )  # fmt: skip
    given = batch(name, base)
    loaded = getattr(transformers, family.spec.classes[ROOT]).from_pretrained(out)
    assert torch.equal(logits(loaded, given, name), logits(model, given, name))
    untrained = family.load_model(base).get_input_embeddings().weight
    assert torch.equal(loaded.get_input_embeddings().weight, untrained)


def test_an_adapter_is_one_of_peft(name, base, tmp_path):
    """What was trained, transformers and peft load with equal outputs; alpha is not the rank."""
    family = load_family(name)
    model = family.load_model(base)
    targets = LORA[name]
    add_adapter(model, seed=0, target_modules=targets, **SETTINGS)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    source = torch.Generator().manual_seed(1)
    for called, parameter in trained.items():
        assert ".lora_" in called
        if ".lora_B." in called:
            parameter.data = torch.randn(parameter.shape, generator=source)
    shapes = {n: list(p.shape) for n, p in trained.items()}
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    known = save_adapter(
        family, base, shapes, trained.__getitem__, SETTINGS | {"target_modules": targets},
        dtype=torch.float32, out=tmp_path,
    )  # fmt: skip
    assert set(known) == {PEFT_ADAPTER, PEFT_CONFIG}
    given = batch(name, base)
    expected = logits(model, given, name)
    plain = family.load_model(base)
    assert not torch.equal(logits(plain, given, name), expected)
    by_peft = peft.PeftModel.from_pretrained(plain, tmp_path)
    by_folder = getattr(transformers, family.spec.classes[ROOT]).from_pretrained(tmp_path)
    for loaded in (by_peft, by_folder, family.load_trained(tmp_path)):
        assert torch.equal(logits(loaded, given, name), expected)


def test_an_answer_does_not_depend_on_what_is_generated_with_it(name, base):
    """Batches of one and of many give the same; the questions keep their order."""
    family = load_family(name)
    prompts = [one.messages[:-1] for one in SUMS[:6]] + [(Message("user", "a longer question?"),)]

    def answers(batch_size: int) -> list[str]:
        config = EvaluateConfig(batch_size=batch_size, max_new_tokens=5)
        return family.generate(base, prompts, config, max_length=32, device="cpu")

    assert answers(1) == answers(4)


def test_the_files_of_a_base_are_its_own(name, base):
    """Pickles, other precisions and notes stay where they are."""
    family = load_family(name)
    names = [path.name for path in base.iterdir()]
    others = ["pytorch_model.bin", "README.md", "onnx/model.onnx", "chat_template.jinja"]
    chosen = choose_files([*names, *others], family.spec, "here")
    assert set(chosen) == {*names, "chat_template.jinja"}


def test_what_is_no_base_is_refused(name, base, tmp_path):
    """An adapter, a folder without tokenizer, and a model of another kind."""
    family = load_family(name)
    names = [path.name for path in base.iterdir()]
    for files, said in (
        ([*names, "adapter_config.json"], "holds an adapter"),
        ([n for n in names if n != "tokenizer_config.json"], "the tokenizer is missing"),
        (["unet/config.json"], r"no config\.json"),
        ([n for n in names if n != "model.safetensors"], "no safetensors weights"),
    ):
        with pytest.raises(PipelineError, match=said):
            choose_files(files, family.spec, "here")
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(PipelineError, match="'clip', which AutoModelFor"):
        check_config(tmp_path / "config.json", family.spec, "here")
    check_config(base / "config.json", family.spec, "here")
