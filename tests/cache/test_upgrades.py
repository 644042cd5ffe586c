"""A cache after an upgrade: kept where its numbers are those computed now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image
from tests.builders.caching import FakeFamily, StopError, contents, stop_encoding
from tests.builders.talks import cached

from zerotrain import artifact
from zerotrain.cache import encoding, record, reuse, sample_keys
from zerotrain.cache.encoding import full_precision
from zerotrain.cache.record import ENCODING, read_record
from zerotrain.cache.reuse import first_deviation, spread
from zerotrain.cache.tokenising import Tokenising
from zerotrain.machine.device import software
from zerotrain.stages import cache_latents

DONE = "encoded {} of 20 latents, {} of 4 captions; the rest was in the cache"


@pytest.fixture
def upgrade(monkeypatch):
    """Call it to let the installed versions be others."""

    def upgraded(number: str = "9.9.9") -> None:
        changed = {"versions.torch": number, "versions.diffusers": number}
        monkeypatch.setattr(record, "software", lambda packages: software(packages) | changed)

    return upgraded


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()[2:]


def test_an_upgrade_that_changes_no_number_changes_no_byte(run, family, upgrade, capsys):
    """Eight items of each series are encoded again; the manifest keeps naming what encoded."""
    before = contents(run.cache())
    lines(capsys)
    family.image_batches.clear()
    family.prompt_batches.clear()
    upgrade()
    (run.folder / "cache/manifest.json").unlink()  # as Snakemake did before it reran a rule
    assert contents(run.cache()) == before
    assert family.image_batches == [encoding.MOST_IMAGES_AT_A_TIME]
    assert len(family.prompt_batches) == 1
    said = lines(capsys)
    assert said[0].startswith("software changed (versions.diffusers ")
    assert said[0].endswith(" -> 9.9.9): 20 latents are kept; 8 of them, encoded again, are equal")
    assert said[1].endswith(": 4 captions are kept; 4 of them, encoded again, are equal")
    assert said[2:] == [DONE.format(0, 0)]


def test_a_raised_version_of_the_stage_is_compared(run, family, monkeypatch, capsys):
    """As other software is: what is equal is kept."""
    before = contents(run.cache())
    lines(capsys)
    monkeypatch.setattr(cache_latents, "present", partial(raised, cache_latents.present))
    assert contents(run.cache()) == before
    said = lines(capsys)
    assert said[0] == (
        "software changed (cache_latents version 1 -> version 2): 20 latents are kept; "
        "8 of them, encoded again, are equal"
    )
    assert "): 4 captions are kept" in said[1]


def raised(present, *words, **given):
    """Return the record of a process whose stage has the next version."""
    found = present(*words, **given)
    return replace(found, stage=found.stage + 1)


def test_other_numbers_are_encoded_again_with_one_sentence(run, family, upgrade, capsys):
    """Of images alone where captions are as before; the next run compares nothing."""
    run.cache()
    lines(capsys)
    family.scale = 1.01
    upgrade()
    after = contents(run.cache())
    said = lines(capsys)
    assert ": 20 latents are encoded again; those of 00.png differ: latents moved by" in said[0]
    assert ": 4 captions are kept" in said[1]
    assert said[2:] == [DONE.format(20, 0)]
    found = read_record(run.folder / "cache" / ENCODING)
    assert found is not None
    assert found.software["versions.torch"] == "9.9.9"
    assert contents(run.cache()) == after == contents(run.cache("fresh"))
    assert lines(capsys)[0] == DONE.format(0, 0)


def test_new_images_join_what_is_kept(run, family, upgrade, capsys):
    """The record then names the present versions, which encode to equal numbers."""
    run.cache()
    lines(capsys)
    upgrade()
    Image.new("RGB", (20, 20)).save(run.images / "07.png")
    run.cache()
    said = lines(capsys)
    assert ": 19 latents are kept" in said[0]
    assert said[-1] == DONE.format(1, 0)
    found = read_record(run.folder / "cache" / ENCODING)
    assert found is not None
    assert found.software["versions.torch"] == "9.9.9"


def test_a_kill_while_encoding_again_keeps_what_is_new_and_nothing_that_is_old(
    run, family, upgrade, monkeypatch, capsys
):
    """The old shards are compared again, and not mixed with the new ones."""
    monkeypatch.setattr(encoding, "PIXELS_AT_A_TIME", 256)
    run.cache()
    family.scale = 1.5
    upgrade()
    with monkeypatch.context() as patch:
        stop_encoding(family, 20 + 8 + 12, patch)
        with pytest.raises(StopError):
            run.cache()
    lines(capsys)
    resumed = contents(run.cache())
    said = lines(capsys)
    assert 0 < int(said[-1].split()[1]) < 14
    assert resumed == contents(run.cache("fresh"))


@pytest.mark.parametrize(("scale", "most"), [(1.0, 13), (1.5, 20)])
def test_what_waits_of_a_killed_run_is_compared_too(
    run, family, upgrade, monkeypatch, capsys, scale, most
):
    """A killed encoding, an upgrade: its shards are kept where their numbers are those of now."""
    monkeypatch.setattr(encoding, "PIXELS_AT_A_TIME", 256)
    with monkeypatch.context() as patch:
        stop_encoding(family, 12, patch)
        with pytest.raises(StopError):
            run.cache()
    upgrade()
    family.scale = scale
    lines(capsys)
    resumed = contents(run.cache())
    assert most - 6 < int(lines(capsys)[-1].split()[1]) <= most
    assert resumed == contents(run.cache("fresh"))


def test_another_kind_of_device_has_its_own_cache(run, family, monkeypatch, capsys):
    """Its numbers differ in more than the last bits of one kernel."""
    run.cache()
    lines(capsys)
    monkeypatch.setattr(sample_keys, "device_type", lambda: "mps")
    found = artifact.read(run.cache(), "cache")
    assert lines(capsys)[-1] == DONE.format(20, 4)
    assert found.made_by["device"] == "mps"


def test_float32_is_float32_while_encoding(run, family, monkeypatch):
    """TF32 is off in convolutions and products, whatever it was, and as before afterwards."""
    seen = []

    def flags() -> tuple[bool, bool]:
        return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32

    def encode_images(pixels: torch.Tensor) -> torch.Tensor:
        seen.append(flags())
        return FakeFamily.encode_images(family, pixels)

    def encode_prompts(prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        seen.append(flags())
        return FakeFamily.encode_prompts(family, prompts)

    monkeypatch.setattr(family, "encode_images", encode_images)
    monkeypatch.setattr(family, "encode_prompts", encode_prompts)
    before = flags()
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        run.cache()
        assert set(seen) == {(False, False)}
        assert flags() == (True, True)
        with pytest.raises(KeyError), full_precision():
            raise KeyError
        assert flags() == (True, True)
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def deviation(before: torch.Tensor, after: torch.Tensor, computed: str = "fp32") -> str | None:
    found = first_deviation(["k"], iter([{"x": before}]), iter([{"x": after}]), computed)
    return found and found.what


def test_rounding_is_no_deviation_and_tf32_is_one():
    """A convolution in another order, in TF32, and in 16 bits, each against its tolerance."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, 64, 24, 24, generator=draw)
    weights = torch.randn(64, 64, 3, 3, generator=draw) / 24

    def tf32(tensor: torch.Tensor) -> torch.Tensor:
        return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    def layers(rounded=lambda tensor: tensor) -> torch.Tensor:
        found = pixels
        for _ in range(4):
            found = torch.nn.functional.conv2d(rounded(found), rounded(weights), padding=1)
        return found

    exact, order = layers(), torch.randperm(64, generator=draw)
    shuffled = pixels
    for _ in range(4):
        moved = shuffled[:, order], weights[:, order]
        shuffled = torch.nn.functional.conv2d(*moved, padding=1)
    assert not torch.equal(exact, shuffled)
    assert deviation(exact, shuffled) is None
    assert "moved by up to" in str(deviation(exact, layers(tf32)))
    assert deviation(exact.bfloat16(), shuffled.bfloat16()) is None
    assert deviation(exact.bfloat16(), layers(torch.Tensor.bfloat16).bfloat16(), "bf16") is None
    assert deviation(exact.bfloat16(), (exact * 1.1).bfloat16(), "bf16") is not None


def test_other_shapes_types_and_names_are_named():
    """They are deviations without a number."""
    one = torch.zeros(2, 3)
    assert deviation(one, torch.zeros(3, 3)) == "differ: x is float32 [2, 3], now float32 [3, 3]"
    assert deviation(one, one.half()) == "differ: x is float32 [2, 3], now float16 [2, 3]"
    ids = torch.tensor([1, 2], dtype=torch.int32)
    assert deviation(ids, ids + 1) == "differ: x has 2 other numbers"
    assert deviation(one, one + float("nan")) is not None
    found = first_deviation(["k"], iter([{"x": one}]), iter([{"y": one}]), "fp32")
    assert found == ("k", "hold x and would hold y")


def test_the_items_are_spread_over_the_dataset():
    """The first, the last and six between."""
    assert spread(range(1000)) == [0, 143, 285, 428, 571, 714, 856, 999]
    assert spread("abc") == list("abc")
    assert len(set(spread(range(9)))) == reuse.ITEMS


TALKS = [(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(4)]


def test_tokens_are_compared_exactly(bases, tmp_path, upgrade, monkeypatch, capsys):
    """An upgrade keeps them to the byte; one other token of eight examples tokenises all again."""
    before = cached(tmp_path, bases["causal_lm"], TALKS)
    capsys.readouterr()
    upgrade()
    after = cached(tmp_path, bases["causal_lm"], TALKS)
    assert after.artifact == before.artifact
    assert ": 20 examples are kept" in capsys.readouterr().out
    tensors = Tokenising.tensors

    def other(self: Tokenising, sample):
        found = tensors(self, sample)
        return {**found, "input_ids": found["input_ids"] + 1}

    monkeypatch.setattr(Tokenising, "tensors", other)
    cached(tmp_path, bases["causal_lm"], TALKS)
    said = capsys.readouterr().out
    assert ": 20 examples are encoded again; those of line " in said
    assert "tokenised 20 of 20 examples" in said
