"""Formats of language models: what was trained is what transformers and peft load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.builders.exports import Export
from tests.builders.refusals import refused
from tests.families.texts import build
from tests.formats.conftest import header, tensors_below
from tests.formats.languages import ADAPTER, MESSAGES, Language, config_of, publish_base
from transformers import AddedToken

from zerotrain import artifact
from zerotrain.config.families import ROOT
from zerotrain.config.models import EvaluateConfig
from zerotrain.data.conversation import Message
from zerotrain.errors import PipelineError
from zerotrain.export.command import convert
from zerotrain.export.formats import FORMATS
from zerotrain.export.formats.weights import ExportedWeights
from zerotrain.models.families import load_family

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def load(language: Language, folder: Path, **options: Any) -> Any:
    """The model as a user's own line loads it."""
    auto = getattr(transformers, language.family.spec.classes[ROOT])
    return auto.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize(("dtype", "shard"), [("fp16", None), ("bf16", "100KB")])
def test_a_folder_is_what_transformers_loads(language, tmp_path, dtype, shard):
    """In the type that it was written in, by from_pretrained alone; with its tokenizer."""
    convert(language.whole, None, tmp_path / "out", dtype=dtype, max_shard_size=shard)
    model = load(language, tmp_path / "out")
    assert model.dtype == DTYPES[dtype]
    expected = load(language, language.whole, dtype=DTYPES[dtype])
    for parameter in expected.parameters():  # of a T5 in fp16 the library keeps some in fp32
        parameter.data = parameter.to(DTYPES[dtype]).to(parameter.dtype)
    assert torch.equal(language.logits(model), language.logits(expected))
    assert not torch.equal(
        language.logits(expected), language.logits(load(language, language.base))
    )
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == bool(shard)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer("1+2").input_ids == language.family.load_tokenizer(language.base)("1+2").input_ids
    )
    for file in ("generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / file).read_bytes() == (language.base / file).read_bytes()
    assert artifact.read(tmp_path / "out", "weights").content["dtype"] == dtype
    # Its own file: that of the base under a second name would have been changed with it.
    assert json.loads((language.base / "config.json").read_text())["dtype"] == "float32"


def chat_model(folder: Path) -> dict[str, torch.Tensor]:
    """A base whose chat template has tokens of its own, and what it was taught to answer by it."""
    family = load_family("causal_lm")
    with artifact.publish(folder, "base") as draft:
        build("causal_lm", draft.folder)
        model, tokenizer = family.load_model(draft.folder), family.load_tokenizer(draft.folder)
        tokenizer.add_tokens([AddedToken("<|end|>", special=True), AddedToken("<think>")])
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}<think>{% endif %}"
            "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model.save_pretrained(draft.folder)
        tokenizer.save_pretrained(draft.folder)
        draft.content = {"family": "causal_lm", "base": "nano", "revision": None, "commit": None}
    tokens = family.tokenise(tokenizer, [*MESSAGES, Message("assistant", "3")], 64)
    batch = {name: torch.tensor([getattr(tokens, name)]) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        family.objective(folder).loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_chat_model_ends_its_turn_in_every_program(tmp_path):
    """Not only in ours: the token that ends a turn by the template is none of the base's own ends.
    What the template has an answer begin with is no part of ours."""
    trained = chat_model(tmp_path / "base")
    export = Export(tmp_path / "whole", tmp_path / "base")
    export.settings = config_of("causal_lm", "whole")
    convert(export.export(trained), "transformers", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    turns = [message._asdict() for message in MESSAGES]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    generated = model.generate(**asked, max_new_tokens=60, do_sample=False)
    found = tokenizer.decode(generated[0, asked["input_ids"].shape[1] :])
    assert found == "<think>3<|end|>"
    base, out = (
        json.loads((folder / "generation_config.json").read_text())
        for folder in (tmp_path / "base", tmp_path / "out")
    )
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")]
    assert (base["eos_token_id"], out["eos_token_id"]) == (ends[0], ends)
    config = EvaluateConfig(max_new_tokens=60)
    family = load_family("causal_lm")
    assert family.generate(tmp_path / "out", [MESSAGES], config, max_length=64, device="cpu") == [
        "3"
    ]


def test_an_adapter_goes_with_its_base(language, tmp_path):
    """The folder of a LoRA, in another type: from_pretrained applies it to the base next to it."""
    convert(language.lora, None, tmp_path / "out", dtype="bf16")
    assert {
        t.dtype for t in load_file(tmp_path / "out" / "adapter_model.safetensors").values()
    } == {torch.bfloat16}
    assert ExportedWeights(tmp_path / "out").adapter is not None
    convert(language.lora, None, tmp_path / "fp32")
    found = language.logits(load(language, tmp_path / "fp32"))
    assert torch.equal(found, language.logits(load(language, language.lora)))
    assert not torch.equal(found, language.logits(load(language, language.base)))


def test_peft_finds_the_base_by_itself(language, tmp_path):
    """Rank and alpha are the training's; AutoPeftModel loads the base that the file names."""
    convert(language.lora, "peft", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (ADAPTER["rank"], ADAPTER["alpha"])
    assert config["base_model_name_or_path"] == str(language.base)
    auto = {
        "causal_lm": peft.AutoPeftModelForCausalLM,
        "seq2seq_lm": peft.AutoPeftModelForSeq2SeqLM,
    }
    model = auto[language.name].from_pretrained(tmp_path / "out").eval()
    expected = language.logits(load(language, language.lora))
    assert torch.equal(language.logits(model), expected)
    plain = load(language, language.base)
    by_hand = peft.PeftModel.from_pretrained(plain, tmp_path / "out").eval()
    assert torch.equal(language.logits(by_hand), expected)


def config_on(base, language, folder):
    """peft's configuration of an adapter whose manifest names this base."""
    source = artifact.read(language.lora, "weights")
    parents = {"base": artifact.read(base, "base")}
    with artifact.publish(folder / "weights", "weights", parents=parents) as draft:
        for name in source.files:
            artifact.link_or_copy(source.path(name), draft.folder / name)
        draft.content = source.content
    convert(folder / "weights", "peft", folder / "out")
    return json.loads((folder / "out" / "adapter_config.json").read_text())


def test_the_base_of_a_project_is_named_from_anywhere(language, tmp_path, monkeypatch):
    """A run's manifest has paths from the project; peft loads from any folder."""
    monkeypatch.chdir(language.base.parent)
    config = config_on(Path(language.base.name), language, tmp_path)
    assert config["base_model_name_or_path"] == str(language.base)


def test_a_base_of_the_hub_is_named_by_its_id(language, tmp_path):
    """With the commit that was trained."""
    base = publish_base(language.name, tmp_path / "base", "Qwen/Qwen2.5-7B")
    manifest = json.loads((base / "manifest.json").read_text())
    manifest["content"]["commit"] = "abc"
    (base / "manifest.json").write_text(json.dumps(manifest))
    config = config_on(base, language, tmp_path)
    assert config["base_model_name_or_path"] == "Qwen/Qwen2.5-7B"
    assert config["revision"] == "abc"


def test_merged_weights_are_those_that_peft_merges(language, tmp_path):
    """Bit by bit what merge_and_unload leaves; the model's answer stays, to rounding."""
    convert(language.lora, "merged", tmp_path / "out")
    convert(language.lora, "peft", tmp_path / "peft")
    by_peft = peft.PeftModel.from_pretrained(load(language, language.base), tmp_path / "peft")
    by_peft = by_peft.merge_and_unload()
    found = load(language, tmp_path / "out")
    expected = by_peft.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in found.state_dict().items())
    adapted = language.logits(load(language, language.lora))
    torch.testing.assert_close(language.logits(found), adapted, atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_a_single_file_has_each_tensor_once(language, tmp_path):
    """Under the library's names behind a prefix; tied weights under their first."""
    prefix = "text_encoder."
    convert(language.whole, "single_file", tmp_path / "out", dtype="bf16", prefix=prefix)
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = tensors_below(language.whole)
    assert found.keys() == {prefix + name for name in expected}
    assert all(torch.equal(found[prefix + n], t.bfloat16()) for n, t in expected.items())
    said = header(tmp_path / "out" / "model.safetensors")
    assert said["zerotrain.weights"] == artifact.read(language.whole, "weights").identity


@pytest.mark.parametrize(
    ("form", "what", "hint"),
    [
        *((name, "is a model of text, and", "transformers, merged, single_file, peft")
          for name, form in FORMATS.items() if form.modality == "image"),
        ("single_file", "holds an adapter, and programs of text", "--to peft"),
    ],
)  # fmt: skip
def test_formats_that_cannot_be_are_refused(language, tmp_path, form, what, hint):
    error = refused(convert, language.lora, form, tmp_path / "out")
    assert what in error.what
    assert hint in error.hint


def test_an_adapter_to_a_tied_head_alone_is_not_merged(language, tmp_path):
    """The head is the table of tokens, too, which would be changed without a word."""
    source = artifact.read(language.lora, "weights")
    with artifact.publish(tmp_path / "weights", "weights") as draft:
        for name in source.files:
            artifact.link_or_copy(source.path(name), draft.folder / name)
        config = json.loads((draft.folder / "adapter_config.json").read_text())
        (draft.folder / "adapter_config.json").unlink()
        config["target_modules"] = ["lm_head"]
        (draft.folder / "adapter_config.json").write_text(json.dumps(config))
        draft.content = source.content
    with pytest.raises(PipelineError, match="lm_head shares its weights with another layer"):
        convert(tmp_path / "weights", "merged", tmp_path / "out")
