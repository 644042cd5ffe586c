"""cache_latents with encoders that count what they are asked, and once with real ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from tests.builders.caching import SIDE, StopError, contents, stop_encoding

from zerotrain import artifact
from zerotrain.cache import encoding
from zerotrain.cache.reader import read_cache, stacked
from zerotrain.cache.record import LONG_CAPTIONS, Prompts
from zerotrain.data.buckets import crop_and_resize, to_pixels
from zerotrain.data.dataset import read_dataset
from zerotrain.data.open import open_source
from zerotrain.errors import PipelineError
from zerotrain.models.families import autoencoders
from zerotrain.models.families.sdxl import FAMILY as SDXL
from zerotrain.stages import cache_latents as stage
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset


def test_the_reader_gives_what_the_encoders_gave(run, family):
    cache = read_cache(run.cache())
    dataset = read_dataset(run.folder / "dataset")
    source = open_source(run.config({}).data)
    assert [entry.file for entry in cache.entries] == [s.file for s in dataset.samples]
    for i, (entry, sample) in enumerate(zip(cache.entries, dataset.samples, strict=True)):
        assert entry.image_sha256 == sample.image_sha256
        assert entry.caption_sha256 == sample.caption_sha256
        assert entry.split == sample.split
        cut = crop_and_resize(source.image_of(sample.file, sample.image_sha256), sample.crop, SIDE)
        pixels = torch.from_numpy(to_pixels(cut))
        expected = torch.nn.functional.avg_pool2d(pixels[None], 4)[0]
        torch.testing.assert_close(cache.sample(i)["latents"], expected, rtol=0, atol=0)
        text = family.encode_prompts([sample.caption])
        assert {name: cache.sample(i)[name].tolist() for name in text} == {
            name: t[0].tolist() for name, t in text.items()
        }
    empty = family.encode_prompts([""])
    assert torch.equal(cache.sample(0, captioned=False)["pooled"], empty["pooled"][0])
    assert {entry.split for entry in cache.entries} == {"train", "holdout"}


def test_sizes_are_those_that_sdxl_gets(run, family):
    cache = read_cache(run.cache(data={"max_pixels": 300, "repeats": 4}))
    last = cache.entries[19]  # 43 wide, 30 high: cut 6 pixels from the left
    assert last.original_size == (14, 20)
    assert last.crop_top_left == (0, round(6 * SIDE / 30))
    assert last.target_size == (SIDE, SIDE)
    first = cache.entries[0]  # 24 wide, 30 high: cut 3 pixels from the top
    assert first.crop_top_left == (round(3 * SIDE / 24), 0)
    assert cache.repeats == 4
    assert cache.resolution == SIDE


def test_captions_are_encoded_once_each_and_the_empty_one_always(run, family, capsys):
    run.cache()
    prompts = {prompt for batch in family.prompt_batches for prompt in batch}
    assert prompts == {"", "house 0", "house 1", "house 2"}
    assert capsys.readouterr().out.endswith(
        "encoded 20 of 20 latents, 4 of 4 captions; the rest was in the cache\n"
    )


def test_editing_some_samples_encodes_those_and_gives_the_bytes_of_a_fresh_cache(
    run, family, capsys
):
    (run.cache() / "manifest.json").unlink()  # as Snakemake does before it reruns a rule
    for name in ("03", "11"):
        Image.new("RGB", (20, 20), (int(name), 0, 0)).save(run.images / f"{name}.png")
    (run.images / "05.txt").write_text("a tower")
    Image.new("RGB", (20, 20)).save(run.images / "99.png")
    (run.images / "99.txt").write_text("house 1")
    (run.images / "07.png").unlink()
    (run.images / "07.txt").unlink()
    edited = run.cache()
    assert capsys.readouterr().out.endswith(
        "encoded 3 of 20 latents, 1 of 5 captions; the rest was in the cache\n"
    )
    assert contents(edited) == contents(run.cache("fresh"))


def test_a_rename_and_a_duplicate_encode_nothing_and_a_new_encoder_everything(run, family, capsys):
    """Keys are of contents; images and captions are counted apart."""
    run.cache()
    for suffix in (".png", ".txt"):
        (run.images / f"04{suffix}").rename(run.images / f"renamed{suffix}")
        shutil.copy(run.images / f"06{suffix}", run.images / f"copied{suffix}")
    capsys.readouterr()
    run.cache()
    assert "encoded 0 of 20 latents, 0 of 4 captions" in capsys.readouterr().out
    for name in ("00", "01", "02"):
        (run.images / f"{name}.txt").write_text(f"castle {name}")
    run.cache()
    assert "encoded 0 of 20 latents, 3 of 7 captions" in capsys.readouterr().out
    for number in range(5):
        Image.new("RGB", (20, 20), (number, 9, 9)).save(run.images / f"{10 + number}.png")
    run.cache()
    assert "encoded 5 of 20 latents, 0 of 7 captions" in capsys.readouterr().out
    run.base(vae="2", text_encoder="2")
    run.cache()
    assert "encoded 20 of 20 latents, 7 of 7 captions" in capsys.readouterr().out


def test_nothing_new_loads_no_encoders(run, family, capsys):
    first = contents(run.cache())
    loads = family.loads
    again = run.cache(data={"repeats": 2, "max_pixels": 400})
    assert family.loads == loads
    assert capsys.readouterr().out.endswith("encoded 0 of 20 latents, 0 of 4 captions; the rest "
                                            "was in the cache\n")  # fmt: skip
    assert {n: b for n, b in contents(again).items() if n.endswith("safetensors")} == {
        n: b for n, b in first.items() if n.endswith("safetensors")
    }


def test_prompts_of_validations_are_encoded_alone_and_are_no_part_of_the_identity(run, family):
    """The empty one is there, too; a caption among them is taken from the captions. A training that
    goes by the cache's identity continues when they change."""
    before = artifact.read(run.cache(), "cache").identity
    family.prompt_batches.clear()
    run.prompts = ["a cat", "house 1"]
    found = artifact.read(run.cache(), "cache")
    assert {prompt for batch in family.prompt_batches for prompt in batch} == {"a cat"}
    expected = family.encode_prompts(["a cat", "house 1", ""])
    for row, prompt in enumerate(["a cat", "house 1", ""]):
        for name, tensor in Prompts(found).tensors(prompt).text.items():
            assert torch.equal(tensor, expected[name][row])
    assert found.identity == before
    family.prompt_batches.clear()
    run.prompts = ["a dog", "a cat"]
    changed = artifact.read(run.cache(), "cache")
    assert {prompt for batch in family.prompt_batches for prompt in batch} == {"a dog"}
    assert changed.identity == before
    with pytest.raises(PipelineError, match="no embeddings of the validation prompt 'house 1'"):
        Prompts(changed).tensors("house 1")


def test_captions_that_are_too_long_are_counted_and_listed_once(run, family, capsys):
    """One line for all, whatever was in the cache; the list is no part of the cache's identity."""
    before = artifact.read(run.cache(), "cache")
    assert "exceed" not in capsys.readouterr().out
    assert LONG_CAPTIONS not in before.files
    for number in range(3, 9):
        (run.images / f"{number:02d}.txt").write_text("word " * (7 + number))
    for encoded in ("6 of 10", "0 of 10"):
        output = run.cache()
        lines = capsys.readouterr().out.splitlines()[-2:]
        assert lines[0] == (
            f"6 of 20 captions exceed 8 tokens; the excess is ignored ({output / LONG_CAPTIONS})"
        )
        assert f"{encoded} captions" in lines[1]
    (listed,) = json.loads((output / LONG_CAPTIONS).read_text())
    assert (listed["limit"], listed["captions"]) == (8, 20)
    assert listed["exceeding"] == [
        {"file": f"{number:02d}.png", "tokens": 7 + number} for number in range(3, 9)
    ]
    found = artifact.read(output, "cache")
    assert found.files[LONG_CAPTIONS]
    (output / LONG_CAPTIONS).unlink()
    record = json.loads((output / "manifest.json").read_text())
    del record["files"][LONG_CAPTIONS]
    (output / "manifest.json").write_text(json.dumps(record))
    assert artifact.read(output, "cache").identity == found.identity


def test_captions_in_chunks_are_encoded_again_and_images_are_not(run, family, capsys):
    """Back to the first choice, nothing is: its captions were kept."""
    before = contents(run.cache())
    run.train["long_captions"] = "chunk"
    capsys.readouterr()
    run.cache()
    assert "encoded 0 of 20 latents, 4 of 4 captions" in capsys.readouterr().out
    assert family.long_captions == "chunk"
    del run.train["long_captions"]
    assert contents(run.cache()) == before
    assert "encoded 0 of 20 latents, 0 of 4 captions" in capsys.readouterr().out


def test_another_length_of_captions_encodes_them_again(run, family, capsys):
    """The family gets it; images stay as they are."""
    run.family = "sd3"
    run.cache()
    assert family.max_sequence_length is None
    run.cache(max_sequence_length=8)
    assert family.max_sequence_length == 8
    assert capsys.readouterr().out.endswith(
        "encoded 0 of 20 latents, 4 of 4 captions; the rest was in the cache\n"
    )


@pytest.mark.parametrize(
    ("change", "latents", "captions"),
    [
        ({"vae": "2", "text_encoder": "1"}, 20, 0),
        ({"vae": "1", "text_encoder": "2"}, 0, 4),
        ({"vae": "1", "text_encoder": "1", "unet": "2"}, 0, 0),
    ],
)
def test_another_base_encodes_what_its_parts_change(run, family, capsys, change, latents, captions):
    run.cache()
    run.base(**change)
    run.cache()
    assert capsys.readouterr().out.endswith(
        f"encoded {latents} of 20 latents, {captions} of 4 captions; the rest was in the cache\n"
    )


def test_bytes_do_not_depend_on_workers(run, family):
    """None, one and four."""
    expected = contents(run.cache("none"))
    for count in (1, 4):
        assert contents(run.cache(f"{count}", data={"num_workers": count})) == expected


def test_batches_are_always_full(run, family):
    run.cache(batch_size=8)
    assert family.image_batches == [8, 8, 8]
    assert {len(batch) for batch in family.prompt_batches} == {encoding.PROMPTS_AT_A_TIME}


def test_large_images_are_encoded_one_at_a_time(run, family, monkeypatch):
    monkeypatch.setattr(encoding, "PIXELS_AT_A_TIME", SIDE * SIDE)
    run.cache()
    assert family.image_batches == [1] * 20


@pytest.mark.parametrize(("dtype", "step"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_tensors_are_stored_in_the_type_asked_for_and_read_in_float32(run, family, dtype, step):
    full, half = read_cache(run.cache("full")), read_cache(run.cache("half", dtype=dtype))
    found, exact = (
        stacked([cache.sample(3)], torch.device("cpu"))["latents"] for cache in (half, full)
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=step, atol=0)
    sizes = [
        sum(f.stat().st_size for f in run.folder.glob(f"{n}/latents*")) for n in ("full", "half")
    ]
    assert sizes[0] - sizes[1] > 20 * 3 * 4 * 4 * 2 * 0.9


def test_numbers_that_the_type_cannot_hold_are_refused(run, family):
    family.scale = 1e6
    with pytest.raises(PipelineError) as caught:
        run.cache(dtype="fp16")
    assert "encoded to infinite or undefined numbers, stored as fp16" in caught.value.what
    assert ".png" in caught.value.what
    assert not (run.folder / "cache/manifest.json").exists()


def test_an_image_that_changed_since_is_refused_by_name(run, family):
    config = run.config({})
    prepare_dataset(config.data, run.folder / "dataset")
    Image.new("RGB", (20, 20)).save(run.images / "04.png")
    settings = CacheSettings.of(config)
    with pytest.raises(PipelineError) as caught:
        cache_latents(settings, SIDE, run.folder / "dataset", run.folder / "base", run.folder / "c")
    assert caught.value.what == f"{run.images}: 04.png changed since prepare_dataset"


def flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGE = {
    "bit": flip_last_bit,
    "torn": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),  # blocks that a power cut left unwritten
}


def keys_in(shard: Path) -> int:
    with safe_open(shard, framework="pt") as opened:
        return len({name.partition(".")[0] for name in opened.keys()})  # noqa: SIM118


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_alone_is_encoded_again(run, family, capsys, damage):
    """It is named and refused; the cache then has the bytes that it had."""
    whole = contents(run.cache())
    shard = sorted((run.folder / "cache").glob("latents*"))[0]
    lost = keys_in(shard)
    assert 0 < lost < 20
    shard.write_bytes(DAMAGE[damage](shard.read_bytes()))
    with pytest.raises(PipelineError, match=f"{shard.name}: "):
        read_cache(run.folder / "cache")
    capsys.readouterr()
    assert contents(run.cache()) == whole
    said = capsys.readouterr()
    assert f"WARNING: {shard} is damaged" in said.err
    assert said.out.endswith(
        f"encoded {lost} of 20 latents, 0 of 4 captions; the rest was in the cache\n"
    )


@pytest.mark.parametrize("damage", ["torn", "zeros"])
def test_a_torn_shard_of_a_killed_run_is_not_used(run, family, monkeypatch, capsys, damage):
    """One that a kill or a power cut left half on the disk: it and what was not reached are
    encoded, and the bytes are those of a run that was not killed."""
    stop_encoding(family, 12, monkeypatch)
    with pytest.raises(StopError):
        run.cache()
    monkeypatch.undo()
    monkeypatch.setattr(stage, "load_family", lambda name: family)
    partial = run.folder / "cache/partial"
    waiting = sorted(partial.glob("*.safetensors"))
    kept = sum(map(keys_in, waiting[1:]))
    assert len(waiting) > 1
    waiting[0].write_bytes(DAMAGE[damage](waiting[0].read_bytes()))
    (partial / "unfinished-1").write_bytes(b"half a shard")
    capsys.readouterr()
    resumed = run.cache()
    encoded = capsys.readouterr().out.splitlines()[-1]
    assert encoded.startswith(f"encoded {20 - kept} of 20 latents, ")
    assert contents(resumed) == contents(run.cache("fresh"))
    assert not (resumed / "partial").exists()


def test_a_cache_without_its_index_is_refused(run, family):
    folder = run.cache()
    size = (folder / "index.json").stat().st_size
    (folder / "index.json").write_text("{".ljust(size))
    with pytest.raises(PipelineError, match=r"index\.json: cannot be read"):
        read_cache(folder, verify=False)


def test_a_real_model_gives_the_same_bytes_whatever_was_reused(run, monkeypatch):
    monkeypatch.setattr(autoencoders, "VAE_STEPS", 2)
    run.shard_size = 30000
    config = run.config({})
    prepare_dataset(config.data, run.folder / "dataset")
    dataset, source = read_dataset(run.folder / "dataset"), open_source(config.data)
    crops = [
        crop_and_resize(source.image_of(sample.file, sample.image_sha256), sample.crop, SIDE)
        for sample in dataset.split("train")
    ]
    with artifact.publish(run.folder / "base", "base") as draft:
        SDXL.build_preset("nano", dataset, crops, 0, draft.folder)
        draft.content = {"parts": dict.fromkeys(SDXL.image_parts + SDXL.spec.text_parts, "1")}
    run.cache(batch_size=8)
    for name in ("02", "13", "17"):
        Image.effect_noise((40, 30), 60).save(run.images / f"{name}.png")
    (run.images / "05.txt").write_text("a tower by the sea")
    edited = run.cache(batch_size=8)
    assert contents(edited) == contents(run.cache("fresh", batch_size=8))
    cache = read_cache(edited)
    encoders = SDXL.load_encoders(run.folder / "base", "cpu")
    pixels = [
        torch.from_numpy(
            to_pixels(crop_and_resize(source.image_of(s.file, s.image_sha256), s.crop, SIDE))
        )
        for s in read_dataset(run.folder / "dataset").samples
    ]
    encoded = encoders.encode_images(torch.stack(pixels))
    stacked = torch.stack([cache.sample(i)["latents"] for i in range(20)])
    torch.testing.assert_close(stacked, encoded, rtol=1e-4, atol=1e-5)
    prompts = encoders.encode_prompts(["house 0", "a tower by the sea"])
    for i, row in ((0, 0), (5, 1)):
        for name, tensor in prompts.items():
            torch.testing.assert_close(cache.sample(i)[name], tensor[row], rtol=1e-4, atol=1e-5)
