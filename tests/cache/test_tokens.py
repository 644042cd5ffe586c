"""The cache of text: rows, packing, reuse; packed examples do not see each other."""

from __future__ import annotations

import pytest
import torch
from tests.builders.talks import TALKS, cached, run_config
from tests.families.texts import build
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config

from zerotrain import artifact
from zerotrain.artifact import file_sha256
from zerotrain.cache.layout import pack
from zerotrain.cache.reader import read_cache, stacked
from zerotrain.data import dataset_folder
from zerotrain.data.conversation import TEXTS, Message, conversation
from zerotrain.errors import PipelineError
from zerotrain.models.base import part_digests
from zerotrain.models.families import load_family
from zerotrain.stages.cache_latents import CacheSettings, cache_latents


def test_a_row_is_what_the_family_tokenises(bases, tmp_path):
    """In the dataset's order, both splits; an epoch is the rows times repeats."""
    for name, base in bases.items():
        cache = cached(tmp_path / name, base, family=name)
        family = load_family(name)
        tokenizer = family.load_tokenizer(base)
        for i, (question, answer) in enumerate(TALKS):
            messages = [Message("user", question), Message("assistant", answer)]
            expected = family.tokenise(tokenizer, messages, 32)
            found = cache.sample(i)
            assert found["input_ids"].tolist() == expected.input_ids
            assert found["labels"].tolist() == expected.labels
            assert found["attention_mask"].tolist() == [1] * len(expected.input_ids)
        assert [row.split for row in cache.entries] == ["train"] * 4 + ["holdout"]
        assert cache.artifact.content["epoch_size"] == 8


def test_only_what_is_new_is_tokenised(bases, tmp_path, capsys):
    """Edit one conversation, tokenise one; the bytes are those of a fresh cache."""
    base = bases["causal_lm"]
    cached(tmp_path, base)
    changed = [("1+2=", "four"), *TALKS[1:]]
    capsys.readouterr()
    again = cached(tmp_path, base, changed)
    assert "tokenised 1 of 5 examples" in capsys.readouterr().out
    fresh = cached(tmp_path / "fresh", base, changed)
    assert again.artifact.files == fresh.artifact.files
    packed = cached(tmp_path, base, changed, packing=True)
    assert "tokenised 0 of 5 examples" in capsys.readouterr().out.splitlines()[-1]
    assert len(packed.entries) < len(again.entries)


def test_shards_stay_below_their_size(bases, tmp_path):
    talks = [(f"{a}+{b}=", "c") for a in range(10) for b in range(10)]
    cache = cached(tmp_path, bases["causal_lm"], talks, shard_size=8192)
    shards = [path for path in cache.artifact.folder.glob("*.safetensors")]
    assert len(shards) > 4
    assert all(path.stat().st_size <= 8192 for path in shards)


def test_what_has_no_room_for_an_answer_is_left_out_and_named(bases, tmp_path, capsys):
    talks = [("a very long question " * 20, "no"), ("x" * 60 + "?", "no"), *TALKS]
    cache = cached(tmp_path, bases["causal_lm"], talks)
    assert len(cache.entries) == len(TALKS)
    said = capsys.readouterr()
    assert (
        "WARNING: 2 of 7 examples are left out: no answer that is learned begins within "
        "max_length 32 (line 0, line 1)\n"
    ) in said.err
    cached(tmp_path, bases["causal_lm"], talks)
    said = capsys.readouterr()
    assert "tokenised 0 of 7 examples" in said.out
    assert "2 of 7 examples are left out" in said.err
    with pytest.raises(PipelineError, match="leave no answer of any example"):
        cached(tmp_path / "none", bases["causal_lm"], talks[:2])


@pytest.mark.parametrize(("takes", "count"), [(False, 2), (True, 0)])
def test_thoughts_that_the_chat_template_does_not_take_are_named(tmp_path, capsys, takes, count):
    """Each time, also where all is in the cache; a template that takes them gets them."""
    thought = Message("assistant", "3", '{"reasoning_content": "hm"}')
    talks = [[Message("user", "1+2="), thought], [Message("user", "2+1="), thought]]
    samples = [conversation(f"line {n}", talk, 0.0) for n, talk in enumerate(talks)]
    dataset_folder.publish_dataset(tmp_path / "data", TEXTS, samples, repeats=1)
    shown = "{{ m.reasoning_content }}" if takes else ""
    with artifact.publish(tmp_path / "base", "base") as draft:
        build("causal_lm", draft.folder)
        (draft.folder / "chat_template.jinja").write_text(
            f"{{% for m in messages %}}{shown}{{{{ m.content }}}}\n{{% endfor %}}"
        )
        draft.known = {p.name: file_sha256(p) for p in draft.folder.iterdir()}
        draft.content = {"family": "causal_lm", "parts": part_digests(draft.known)}
    settings = CacheSettings.of(run_config())
    for _ in range(2):
        cache_latents(settings, 32, tmp_path / "data", tmp_path / "base", tmp_path / "cache")
        said = capsys.readouterr().err
        warning = (
            f"WARNING: left out: reasoning_content of {count} turns: the chat template does not "
            "take it\n"
        )
        assert (warning in said) is not takes
        assert said.count("left out") == (not takes)
    tokens = read_cache(tmp_path / "cache").sample(0)
    assert len(tokens["input_ids"]) == len("1+2=\n3\n") + 2 * takes


def test_what_a_chat_template_does_not_show_is_counted_and_what_it_refuses_is_named(
    bases, tmp_path, capsys
):
    """Answers that stand otherwise once more turns follow; the turns, by where they stand."""
    talk = [Message("user", "1+2="), Message("assistant", "3")] * 2
    dataset_folder.publish_dataset(
        tmp_path / "data", TEXTS, [conversation("line 1", talk, 0.0)], repeats=1
    )
    shown = "{{ m.content if loop.last or m.role == 'user' else '...' }}"
    turns = f"{{% for m in messages %}}{shown}\n{{% endfor %}}"

    def cache(name: str, template: str) -> None:
        with artifact.publish(tmp_path / name, "base") as draft:
            build("causal_lm", draft.folder)
            (draft.folder / "chat_template.jinja").write_text(template)
            draft.known = {p.name: file_sha256(p) for p in draft.folder.iterdir()}
            draft.content = {"family": "causal_lm", "parts": part_digests(draft.known)}
        settings = CacheSettings.of(run_config())
        cache_latents(settings, 32, tmp_path / "data", tmp_path / name, tmp_path / "cache")

    cache("forgets", turns)
    assert (
        "WARNING: 1 answers of the 1 examples tokenised now are not learned"
        in capsys.readouterr().err
    )
    with pytest.raises(PipelineError) as refused:
        cache("refuses", "{{ raise_exception('no turns today') }}")
    assert refused.value.what == (
        "line 1: the tokenizer's chat template takes no turns of user: no turns today"
    )


def test_packing_fills_rows_and_keeps_all():
    """No row is longer than it may be, each conversation is in one row, and few rows are needed."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (500,), generator=draw).tolist()
    rows = pack(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 64
    assert len(rows) <= 1.05 * sum(lengths) / 64 + 1
    assert rows == pack(lengths, 64)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_examples_do_not_see_each_other(bases, tmp_path, attention):
    """Logits of each example are those that it has alone, also where rows are filled up."""
    base = bases["causal_lm"]
    alone, packed = cached(tmp_path / "a", base), cached(tmp_path / "p", base, packing=True)
    train = [i for i, row in enumerate(packed.entries) if row.split == "train"]
    assert any(len(packed.entries[i].keys) > 1 for i in train)
    batch = stacked([packed.sample(i) for i in range(len(packed.entries))], torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # a seed's small weights would hide a difference
            parameter.mul_(3.0)
    single = {row.keys[0]: i for i, row in enumerate(alone.entries)}
    objective = load_family("causal_lm").objective(base)
    with torch.inference_mode():
        given = {name: batch[name] for name in ("input_ids", "position_ids")}
        together = model(**given, use_cache=False).logits
        leaking = model(input_ids=batch["input_ids"]).logits
        losses = objective.loss(model, batch)
        moved = 0.0
        for row, entry in enumerate(packed.entries):
            start, sums, counts = 0, 0.0, 0
            for key in entry.keys:
                own = alone.sample(single[key])
                length = len(own["input_ids"])
                expected = model(input_ids=own["input_ids"][None]).logits[0]
                found = together[row, start : start + length]
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
                seen = leaking[row, start : start + length] - expected
                moved = max(moved, float(seen.abs().max()))
                learned = int((own["labels"] != -100).sum())
                sums += learned * float(objective.loss(model, stacked([own], torch.device("cpu"))))
                counts += learned
                start += length
            assert float(losses[row]) == pytest.approx(sums / counts, abs=1e-5)
        assert moved > 0.1  # without positions they would


def test_packing_is_for_causal_models():
    with pytest.raises(PipelineError, match="packing is causal_lm's"):
        run_config("seq2seq_lm", packing=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BloomConfig(hidden_size=32, n_head=4), "BloomForCausalLM takes no position_ids"),
        (GPT2Config(n_embd=32, n_head=4, n_positions=31), "32 tokens, and .* has 31 positions"),
    ],
    ids=["bloom", "gpt2"],
)
def test_a_base_that_cannot_take_the_rows_is_refused_before_they_are_made(
    tmp_path, config, message
):
    """Packed ones of a model that takes no positions, longer ones than a table of positions."""
    base = tmp_path / "base"
    with artifact.publish(base, "base") as draft:
        build("causal_lm", draft.folder)
        config.save_pretrained(draft.folder)
        draft.known = {p.name: file_sha256(p) for p in draft.folder.iterdir()}
        draft.content = {"family": "causal_lm", "parts": part_digests(draft.known)}
    with pytest.raises(PipelineError, match=message):
        cached(tmp_path, base, packing=True)
    assert not (tmp_path / "cache").exists()
    if config.model_type == "bloom":
        assert len(cached(tmp_path, base).entries) == len(TALKS)
