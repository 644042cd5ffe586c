"""Conditioning images in a cache: what is encoded, what an edit encodes again, and who reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import ipc
from tests.builders.caching import FakeFamily
from tests.builders.images import make_image_config

from zerotrain import artifact
from zerotrain.cache.reader import Cache, read_cache, stacked
from zerotrain.cache.record import Prompts
from zerotrain.config.training import TrainConfig
from zerotrain.data.buckets import View, choose_views, crop_and_resize, other_views, to_pixels
from zerotrain.data.dataset import read_dataset
from zerotrain.errors import PipelineError
from zerotrain.models.families.conditioning import Conditioning
from zerotrain.stages import cache_latents as stage
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.training.batches import Batches

SIDE, COUNT = 16, 6
CPU = torch.device("cpu")


class ConditionedFamily(FakeFamily):
    """Arithmetic that reads conditioning images; it counts them, too."""

    def __init__(self, reads: Conditioning) -> None:
        super().__init__()
        self.reads = reads
        self.conditioning_batches: list[int] = []

    def conditioning(self, base: Path) -> Conditioning | None:
        return self.reads

    def encode_conditioning(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.conditioning_batches.append(len(pixels))
        assert pixels.shape[1:3] == (2, 3)
        return {"conditioning_latents": pixels.unfold(3, 4, 4).unfold(4, 4, 4).mean((-1, -2))}

    def encode_prompts(
        self, prompts: Sequence[str], conditioning: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        found = super().encode_prompts(prompts)
        if conditioning is None:
            return found
        assert conditioning.shape[:3] == (len(prompts), 2, 3)
        return {**found, "pooled": found["pooled"] + conditioning.mean((1, 2, 3, 4))[:, None]}


PLAIN, IN_PROMPT = Conditioning(0, None), Conditioning(1, None, in_prompt=True)
IN_PROMPT_ALONE = Conditioning(1, None, in_prompt=True, in_latents=False)


class Edits:
    """Six images with two conditioning images each; image 4 and 5 have the same ones."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = monkeypatch
        draw = np.random.default_rng(0)
        for name in ("images", "edges", "depth"):
            (folder / name).mkdir()
            for number in range(COUNT):
                pixels = draw.integers(0, 256, (SIDE + number, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / name / f"{number}.png")
        for number in range(COUNT):
            (folder / "images" / f"{number}.txt").write_text(f"house {number % 2}")
        for name in ("edges", "depth"):
            (folder / name / "5.png").write_bytes((folder / name / "4.png").read_bytes())
        with artifact.publish(folder / "base", "base") as draft:
            draft.content = {"parts": {"vae": "1", "text_encoder": "1"}}

    def config(
        self,
        folders: Sequence[str] = ("edges", "depth"),
        validation: dict[str, Any] | None = None,
        **data: Any,
    ) -> Any:
        conditioning = [str(self.folder / name) for name in folders]
        named = {"conditioning_images": conditioning} if folders else {}
        shown = {"validation": validation} if validation else {}
        images = self.folder / "images"
        return make_image_config(images, family="flux", data=named | data, **shown)

    def cache(self, reads: Conditioning, **data: Any) -> tuple[Cache, ConditionedFamily]:
        """Run the stages; what is in the folder `cache` is reused."""
        family = ConditionedFamily(reads)
        self._patch.setattr(stage, "load_family", lambda name: family)
        config, dataset, output = self.config(**data), self.folder / "dataset", "cache"
        prepare_dataset(config.data, dataset)
        settings = CacheSettings.of(config)
        cache_latents(settings, SIDE, dataset, self.folder / "base", self.folder / output)
        found = read_cache(self.folder / output)
        assert isinstance(found, Cache)
        return found, family

    def pixels(self, number: int) -> torch.Tensor:
        """The conditioning pixels [2, 3, SIDE, SIDE] of an image: the upper square is cut."""
        top = number // 2
        squares = []
        for name in ("edges", "depth"):
            with Image.open(self.folder / name / f"{number}.png") as image:
                top = (image.height - SIDE) // 2
                squares.append(to_pixels(crop_and_resize(image, (0, top, SIDE), SIDE)))
        return torch.from_numpy(np.stack(squares))


@pytest.fixture
def edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edits:
    return Edits(tmp_path, monkeypatch)


def test_the_reader_gives_what_the_encoders_gave(edits, capsys):
    """Latents of all its images, in the order of the folders; equal sets are stored once."""
    cache, family = edits.cache(PLAIN)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "encoded 6 of 6 latents, 5 of 5 sets of conditioning images, 3 of 3 captions; the rest was "
        "in the cache"
    )
    for number in range(COUNT):
        pixels = edits.pixels(number)[None]
        expected = family.encode_conditioning(pixels)["conditioning_latents"][0]
        found = cache.sample(number)
        assert torch.equal(found["conditioning_latents"], expected)
        assert found["conditioning_latents"].shape == (2, 3, 4, 4)
        assert found["latents"].shape == (3, 4, 4)
        text = family.encode_prompts([f"house {number % 2}"])["pooled"][0]
        assert torch.equal(found["pooled"], text)
    batch = stacked([cache.sample(0), cache.sample(1)], CPU)
    assert batch["conditioning_latents"].shape == (2, 2, 3, 4, 4)
    assert cache.entries[4].conditioning == cache.entries[5].conditioning
    paths = [edits.folder / name / "3.png" for name in ("edges", "depth")]
    assert cache.entries[3].conditioning_sha256 == tuple(map(artifact.file_sha256, paths))


def test_a_text_encoder_that_sees_the_images_gets_those_of_each_caption(edits):
    """The empty caption, too, is encoded with the images of its sample."""
    cache, family = edits.cache(IN_PROMPT)
    for number in range(COUNT):
        pixels = edits.pixels(number)[None]
        for captioned, caption in ((True, f"house {number % 2}"), (False, "")):
            expected = family.encode_prompts([caption], pixels)["pooled"][0]
            assert torch.equal(cache.sample(number, captioned=captioned)["pooled"], expected)
    texts = {entry.text for entry in cache.entries} | {e.empty_text for e in cache.entries}
    assert len(texts) == 6 + 5  # images 4 and 5 share conditioning images, not captions
    index = json.loads((edits.folder / "cache" / "index.json").read_text())
    assert index["empty_text"] is None


@pytest.mark.parametrize(("reads", "texts"), [(PLAIN, 0), (IN_PROMPT, 2)])
def test_an_edited_conditioning_image_encodes_its_sample_alone(edits, reads, texts):
    """Where the text encoder sees it, the caption and the empty caption, too."""
    before, _ = edits.cache(reads)
    path = edits.folder / "depth" / "2.png"
    Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    after, family = edits.cache(reads)
    changed = [
        i
        for i, (one, other) in enumerate(zip(before.entries, after.entries, strict=True))
        if one != other
    ]
    assert changed == [2]
    assert family.conditioning_batches == [32 // 2]
    assert family.image_batches == []
    assert sum(map(len, family.prompt_batches)) == texts
    assert torch.equal(
        after.sample(2)["conditioning_latents"],
        family.encode_conditioning(edits.pixels(2)[None])["conditioning_latents"][0],
    )


def test_images_that_are_read_as_text_alone_have_no_latents(edits, capsys, monkeypatch):
    """The same embeddings as where both are read; an edit encodes its sample's texts alone."""
    cache, _ = edits.cache(IN_PROMPT)
    both = [cache.sample(number) for number in range(COUNT)]
    files = [edits.folder / name / "0.png" for name in ("edges", "depth")]
    shutil.rmtree(edits.folder / "cache")
    shown = {"prompts": ["house"], "conditioning_images": [[str(file) for file in files]]}
    monkeypatch.setattr(stage, "check_sampling", lambda *_: None)  # the base has no index
    capsys.readouterr()
    cache, family = edits.cache(IN_PROMPT_ALONE, validation=shown)
    assert "conditioning" not in capsys.readouterr().out.splitlines()[-1]
    assert family.conditioning_batches == []
    for number in range(COUNT):
        found, other = cache.sample(number), both[number]
        assert "conditioning_latents" not in found
        assert torch.equal(found["pooled"], other["pooled"])
    asked = Prompts(cache.artifact).tensors(("house", tuple(map(str, files))))
    assert asked.conditioning is None
    expected = family.encode_prompts(["house"], edits.pixels(0)[None])
    assert torch.equal(asked.text["pooled"], expected["pooled"][0])
    path = edits.folder / "depth" / "2.png"
    Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    _, family = edits.cache(IN_PROMPT_ALONE, validation=shown)
    assert (family.image_batches, family.conditioning_batches) == ([], [])
    assert sum(map(len, family.prompt_batches)) == 2


def test_the_pipeline_that_reads_the_images_is_part_of_the_text_keys(edits):
    """Another class puts another template around the same prompt."""

    def text(pipeline: str) -> str:
        index = {"_class_name": pipeline}
        (edits.folder / "base" / "model_index.json").write_text(json.dumps(index))
        return edits.cache(IN_PROMPT)[0].entries[0].text

    first, second = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
    assert text(first) != text(second)


def test_a_renamed_pair_encodes_nothing(edits):
    """Keys name no file."""
    edits.cache(IN_PROMPT)
    for name in ("images", "edges", "depth"):
        (edits.folder / name / "0.png").rename(edits.folder / name / "zero.png")
    (edits.folder / "images" / "0.txt").rename(edits.folder / "images" / "zero.txt")
    cache, family = edits.cache(IN_PROMPT)
    assert cache.entries[-1].file == "zero.png"
    assert family.loads == 0


def test_latents_and_captions_have_the_keys_that_they_have_without_conditioning(edits):
    """So a dataset to which conditioning images come is not encoded again."""
    plain, _ = edits.cache(PLAIN, folders=())
    assert "conditioning" not in (edits.folder / "cache" / "index.json").read_text()
    with ipc.open_file(edits.folder / "cache" / "index.arrow") as columns:
        assert sorted(columns.schema.names) == [
            *("caption_sha256", "crop_top_left", "file", "image_sha256", "latents"),
            *("original_size", "split", "target_size", "text"),
        ]
    conditioned, family = edits.cache(PLAIN)
    assert [(e.latents, e.text) for e in plain.entries] == [
        (e.latents, e.text) for e in conditioned.entries
    ]
    assert family.image_batches == []
    assert family.prompt_batches == []


def test_every_cause_of_other_pixels_changes_the_key(edits):
    """The order of the images is one: the model reads them in it."""
    keys = {edits.cache(PLAIN)[0].entries[0].conditioning}
    keys.add(edits.cache(PLAIN, folders=("depth", "edges"))[0].entries[0].conditioning)
    with artifact.publish(edits.folder / "base", "base") as draft:
        draft.content = {"parts": {"vae": "2", "text_encoder": "1"}}
    keys.add(edits.cache(PLAIN)[0].entries[0].conditioning)
    assert len(keys) == 3


def test_batches_bring_the_conditioning_images_of_their_samples(edits):
    """By position, as latents come."""
    cache, _ = edits.cache(PLAIN)
    phase: Any = SimpleNamespace(
        seed=3,
        derived=SimpleNamespace(epoch_size=COUNT, objective={}),
        train=TrainConfig(caption_dropout_probability=0.0),
    )
    batches = Batches(cache, phase)
    batch = batches.batch(0, COUNT, CPU)
    assert batch["conditioning_latents"].shape == (COUNT, 2, 3, 4, 4)
    assert batch["noise"].shape == batch["latents"].shape == (COUNT, 3, 4, 4)
    for row in range(COUNT):
        number = int(batches.name(row).removesuffix(".png"))
        assert torch.equal(
            batch["conditioning_latents"][row], cache.sample(number)["conditioning_latents"]
        )


BUCKETS = {"alignment": 8, "min_aspect": 0.25, "max_aspect": 4.0}
CROPS = {**BUCKETS, "crop": "random", "crop_variants": 3}
SHAPES = [(16, 16), (30, 16), (16, 70), (17, 16), (80, 24), (20, 60)]


def write_shapes(edits: Edits) -> None:
    """Images of six shapes whose colours are columns and rows: `edges` has copies, `depth` images
    of twice the size, another number in each third colour."""
    for number, (width, height) in enumerate(SHAPES):
        for name, by in (("images", 1), ("edges", 1), ("depth", 2)):
            columns, rows = np.meshgrid(np.arange(by * width), np.arange(by * height))
            third = np.full_like(rows, 7 * number + by)
            pixels = np.stack([columns, rows, third], axis=-1).astype(np.uint8)
            Image.fromarray(pixels).save(edits.folder / name / f"{number}.png")


def views_of(edits: Edits, **data: Any) -> list[list[View]]:
    """All parts of each image in the dataset."""
    samples = read_dataset(edits.folder / "dataset").samples
    buckets = edits.config(**data).data.aspect_buckets
    views = choose_views(samples, SIDE, buckets)
    return [
        [view, *other_views(sample, view, buckets)]
        for sample, view in zip(samples, views, strict=True)
    ]


@pytest.mark.parametrize("crop", ["center", "random", "none"])
def test_a_bucket_cuts_conditioning_images_as_their_image(edits, crop):
    """Each stored part: of a copy the same box, of an image of twice the size twice the box."""
    write_shapes(edits)
    data = {"aspect_buckets": {**CROPS, "crop": crop, "crop_variants": 1 + 2 * (crop == "random")}}
    cache, family = edits.cache(PLAIN, **data)
    views = views_of(edits, **data)
    assert len({view.size for [view, *_] in views}) > 3
    for number, parts in enumerate(views):
        assert cache.variants(number) == (1, len(parts))
        for place, view in enumerate(parts):
            found = cache.sample(number, view=place)
            sets = []
            for name, by in (("edges", 1), ("depth", 2)):
                left, top, width, height = (by * one for one in view.box)
                with Image.open(edits.folder / name / f"{number}.png") as image:
                    box = (left, top, left + width, top + height)
                    cut = image.resize(view.size, Image.Resampling.LANCZOS, box=box)
                    sets.append(torch.from_numpy(to_pixels(cut)))
            expected = family.encode_conditioning(torch.stack(sets)[None])["conditioning_latents"]
            torch.testing.assert_close(
                found["conditioning_latents"], expected[0], atol=1e-6, rtol=0
            )
            torch.testing.assert_close(  # columns and rows of the image
                found["conditioning_latents"][0, :2], found["latents"][:2], atol=1e-6, rtol=0
            )


def test_text_that_depends_on_the_images_is_encoded_with_the_part_in_the_bucket(edits):
    """The caption and the empty one."""
    write_shapes(edits)
    cache, family = edits.cache(IN_PROMPT, aspect_buckets=BUCKETS)
    for number, [view] in enumerate(views_of(edits, aspect_buckets=BUCKETS)):
        sets = []
        for name in ("edges", "depth"):
            with Image.open(edits.folder / name / f"{number}.png") as image:
                part = view.of_other(SHAPES[number], image.size)
                sets.append(torch.from_numpy(to_pixels(part.cut(image))))
        for captioned, caption in ((True, f"house {number % 2}"), (False, "")):
            [expected] = family.encode_prompts([caption], torch.stack(sets)[None])["pooled"]
            assert torch.equal(cache.sample(number, captioned=captioned)["pooled"], expected)


def test_only_conditioning_images_that_are_cut_otherwise_are_encoded_again(edits, capsys):
    """A square image keeps its keys when buckets are switched on; of one that is a pixel wider, the
    image of twice the size is cut as twice the box, which is no longer its own centre square."""
    write_shapes(edits)

    def encoded(**data: Any) -> str:
        capsys.readouterr()
        edits.cache(PLAIN, **data)
        return capsys.readouterr().out.splitlines()[-1].partition(", 3 of 3")[0].split(", 0 of")[0]

    assert encoded() == "encoded 6 of 6 latents, 6 of 6 sets of conditioning images"
    bucketed = encoded(aspect_buckets=BUCKETS)
    assert bucketed.startswith("encoded 4 of 6 latents, 5 of 6 sets of conditioning images")
    assert encoded(aspect_buckets=BUCKETS) == "encoded 0 of 6 latents"
    images = edits.cache(PLAIN, aspect_buckets=CROPS)[0].entries
    assert all(len(entry.other_conditioning) == 2 for entry in images)
    kept = edits.cache(PLAIN, aspect_buckets={**CROPS, "crop_variants": 1})[0].entries
    assert [entry.conditioning for entry in kept] == [entry.conditioning for entry in images]
    assert all(entry.other_conditioning is None for entry in kept)


def test_a_batch_of_a_bucket_is_its_samples_one_by_one(edits):
    """Bit for bit, with the part that each turn draws."""
    write_shapes(edits)
    cache, _ = edits.cache(PLAIN, aspect_buckets=CROPS)
    phase: Any = SimpleNamespace(
        seed=3,
        derived=SimpleNamespace(epoch_size=COUNT, objective={}),
        train=TrainConfig(caption_dropout_probability=0.0, global_batch_size=2),
    )
    batches, shapes = Batches(cache, phase), set()
    for first in range(0, 24, 2):
        together = batches.batch(first, 2, CPU)
        shape = together["latents"].shape[-2:]
        shapes.add(shape)
        assert together["conditioning_latents"].shape == (2, 2, 3, *shape)
        for row in range(2):
            alone = batches.batch(first + row, 1, CPU)
            for name in ("latents", "conditioning_latents", "noise"):
                assert torch.equal(together[name][row], alone[name][0])
            assert torch.allclose(  # columns and rows of the same part
                alone["conditioning_latents"][0, 0, :2], alone["latents"][0, :2], atol=1e-6
            )
    assert len(shapes) > 2


def test_several_crops_are_refused_where_captions_depend_on_the_images(edits):
    """Each caption would have to be encoded with each of them."""
    write_shapes(edits)
    with pytest.raises(PipelineError, match="crop_variants: 3, and the text encoder of base: nano"):
        edits.cache(IN_PROMPT, aspect_buckets=CROPS)


@pytest.mark.parametrize(
    ("reads", "folders", "message"),
    [
        (None, ("edges",), "base: nano has no input for conditioning images, and the data has 1 "
         "for each sample"),
        (IN_PROMPT, (), "base: nano takes at least 1 conditioning image for each sample, and the "
         "data has none"),
        (Conditioning(1, 1), ("edges", "depth"), "base: nano takes 1 conditioning image for each "
         "sample, and the data has 2"),
        (Conditioning(2, 2), ("edges",), "base: nano takes 2 conditioning images for each sample, "
         "and the data has 1"),
    ],
)  # fmt: skip
def test_a_number_that_the_base_does_not_take_is_refused(edits, reads, folders, message):
    with pytest.raises(PipelineError) as caught:
        edits.cache(reads, folders=folders)
    assert caught.value.what == message
    assert not (edits.folder / "cache").exists()


def test_an_image_that_changed_meanwhile_is_refused(edits):
    """Its hash stands in the dataset."""
    edits.cache(PLAIN)
    path = edits.folder / "edges" / "1.png"
    prepare_dataset(edits.config().data, edits.folder / "dataset")
    path.write_bytes((edits.folder / "edges" / "2.png").read_bytes() + b" ")
    with artifact.publish(edits.folder / "base", "base") as draft:
        draft.content = {"parts": {"vae": "2", "text_encoder": "1"}}
    config, dataset = edits.config(), edits.folder / "dataset"
    settings = CacheSettings.of(config)
    with pytest.raises(PipelineError) as caught:
        cache_latents(settings, SIDE, dataset, edits.folder / "base", edits.folder / "cache")
    assert caught.value.what == f"{edits.folder}/edges: 1.png changed since prepare_dataset"
