"""FLUX.1 Redux, against the pipelines of diffusers that its users load the weights with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, FluxPriorReduxPipeline, ReduxImageEncoder
from PIL import Image
from tests.builders.exports import Export
from tests.builders.images import build_nano, draw_of, make_pictures
from tests.families.promises import first_call
from transformers import SiglipVisionModel
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from zerotrain import artifact
from zerotrain.config.models import EvaluateConfig
from zerotrain.data.buckets import to_pixels
from zerotrain.errors import PipelineError
from zerotrain.models.base import choose_files
from zerotrain.models.families.flux import FAMILY

PROMPT = "a red house"
VALUES = EvaluateConfig(num_inference_steps=2)
TEXT, IMAGE = 32, 4
"""Tokens of the nano model's text and of an image."""


@pytest.fixture(scope="module")
def redux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano FLUX.1 Redux for 16 px images, its autoencoder fitted for a few steps."""
    folder = tmp_path_factory.mktemp("redux") / "base"
    return build_nano("flux", folder, pipeline="FluxPriorReduxPipeline")


def pixels_of(image: Image.Image) -> torch.Tensor:
    """One conditioning image as training reads it, [1, 1, 3, H, W]."""
    return torch.from_numpy(to_pixels(image.convert("RGB")))[None, None]


def prior_of(folder: Path, *, text: bool = True) -> FluxPriorReduxPipeline:
    """diffusers' pipeline with the folder's parts."""
    plain = FluxPipeline.from_pretrained(folder)
    encoders = {
        name: getattr(plain, name)
        for name in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
        if text
    }
    return FluxPriorReduxPipeline(
        image_encoder=SiglipVisionModel.from_pretrained(folder, subfolder="image_encoder"),
        image_embedder=ReduxImageEncoder.from_pretrained(folder, subfolder="image_embedder"),
        feature_extractor=SiglipImageProcessorPil(size={"height": 32, "width": 32}),
        **encoders,
    )


def embeds_of(folder: Path, image: Image.Image) -> dict[str, torch.Tensor]:
    """What FluxPriorReduxPipeline makes of the prompt, its text cut to the nano model's tokens."""
    made = prior_of(folder)(image, prompt=PROMPT)
    whole, pooled = made.prompt_embeds, made.pooled_prompt_embeds
    text = FluxPipeline.from_pretrained(folder).encode_prompt(PROMPT, max_sequence_length=TEXT)[0]
    return {
        "prompt_embeds": torch.cat([text, whole[:, -IMAGE:]], dim=1).detach(),
        "pooled_prompt_embeds": pooled,
    }


def test_embeddings_are_those_of_the_pipeline(redux):
    """Of an image of another side: T5's tokens, then the image's; CLIP's pooled embedding."""
    image = make_pictures(48, 2)[1]
    found = FAMILY.load_encoders(redux, "cpu").encode_prompts([PROMPT], pixels_of(image))
    expected = embeds_of(redux, image)
    assert found["prompt_embeds"].shape[1] == TEXT + IMAGE
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_each_prompt_has_its_own_image(redux):
    """In a batch as alone, and the image's tokens do not depend on the text."""
    encoders, images = FAMILY.load_encoders(redux, "cpu"), make_pictures(32, 2)
    pixels = torch.cat([pixels_of(image) for image in images])
    together = encoders.encode_prompts([PROMPT, "a blue house"], pixels)["prompt_embeds"]
    alone = encoders.encode_prompts(["a green boat"], pixels[1:])["prompt_embeds"]
    torch.testing.assert_close(together[1, TEXT:], alone[0, TEXT:], rtol=1e-5, atol=1e-6)
    assert (together[0, TEXT:] - together[1, TEXT:]).abs().max() > 1e-3


def test_an_empty_prompt_is_zeros_before_the_image(redux):
    """As in the pipeline without text encoders, and as DiffSynth-Studio trains."""
    image = make_pictures(32, 1)[0]
    encoders = FAMILY.load_encoders(redux, "cpu")
    found, other = (encoders.encode_prompts([text], pixels_of(image)) for text in ("", PROMPT))
    assert not found["prompt_embeds"][:, :TEXT].any()
    assert not found["pooled_prompt_embeds"].any()
    assert torch.equal(found["prompt_embeds"][:, TEXT:], other["prompt_embeds"][:, TEXT:])


def test_the_model_reads_the_image_as_text(redux):
    """All positions of text and image tokens are zeros, and the answer depends on the image."""
    encoders, model = FAMILY.load_encoders(redux, "cpu"), FAMILY.load_model(redux)
    objective, timesteps = FAMILY.objective(redux), torch.tensor([500.0])
    noisy = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))

    def call(image: Image.Image) -> tuple[dict[str, Any], torch.Tensor]:
        batch: dict[str, Any] = dict(encoders.encode_prompts([PROMPT], pixels_of(image)))
        with torch.inference_mode():
            return first_call(model, lambda: objective.predict(model, noisy, timesteps, batch))

    (given, answer), (_, other) = (call(image) for image in make_pictures(32, 2))
    assert given["hidden_states"].shape[1] == 4
    assert torch.equal(given["txt_ids"], torch.zeros(TEXT + IMAGE, 3))
    assert (answer - other).abs().max() > 1e-4


def by_hand(folder: Path, **arguments: Any) -> bytes:
    """Pixels of the 16 px image that a user's own call draws."""
    made = FluxPipeline.from_pretrained(folder)(
        height=16, width=16, num_inference_steps=2, generator=torch.Generator().manual_seed(7),
        **arguments,
    )  # fmt: skip
    pixels: bytes = made.images[0].tobytes()
    return pixels


def drawn(folder: Path, image: Image.Image, prompt: str = PROMPT, **changes: object) -> bytes:
    """Pixels of the 16 px image that `sample` draws with a conditioning image."""
    config = EvaluateConfig.model_validate({"num_inference_steps": 2, **changes})
    [made] = draw_of(
        FAMILY, folder, [prompt], [7], config, resolution=16, device="cpu", conditioning=[[image]]
    )
    pixels: bytes = made.tobytes()
    return pixels


def test_samples_are_the_pipelines_own(redux):
    """With the embeddings of FluxPriorReduxPipeline; guided by zeros and the same image."""
    image, other = make_pictures(16, 2)
    embeds = embeds_of(redux, image)
    assert drawn(redux, image) == by_hand(redux, **embeds)
    zeros = torch.zeros_like(embeds["prompt_embeds"][:, :TEXT])
    guided = {
        "negative_prompt_embeds": torch.cat([zeros, embeds["prompt_embeds"][:, TEXT:]], dim=1),
        "negative_pooled_prompt_embeds": torch.zeros_like(embeds["pooled_prompt_embeds"]),
    }
    own = by_hand(redux, **embeds, **guided, true_cfg_scale=3.0)
    assert drawn(redux, image, guidance_scale=3.0) == own
    assert len({own, drawn(redux, image), drawn(redux, other), drawn(redux, image, "")}) == 4


def test_latents_while_training_are_those_of_the_images_after_it(redux):
    """`sample_latents` with what the cache holds, against `sample` with the image."""
    image = make_pictures(16, 1)[0]
    encoders = FAMILY.load_encoders(redux, "cpu")
    embeds, empty = (encoders.encode_prompts([p], pixels_of(image)) for p in (PROMPT, ""))
    pipeline = FAMILY.live_pipeline(redux, FAMILY.load_model(redux).eval(), 16, (4, 4, 4), VALUES)
    latents = FAMILY.sample_latents(
        pipeline, embeds, empty, 7, VALUES, resolution=16, shape=(4, 4, 4)
    )
    [made] = FAMILY.decode_latents(redux, latents[None], "cpu")
    expected = drawn(redux, image)
    assert max(abs(a - b) for a, b in zip(made.tobytes(), expected, strict=True)) <= 1


def test_the_folder_is_one_that_diffusers_loads(redux):
    """As a FluxPipeline: model_index.json names none of the further parts."""
    assert type(DiffusionPipeline.from_pretrained(redux)) is FluxPipeline
    index = json.loads((redux / "model_index.json").read_text())
    assert index["image_encoder"] == [None, None]
    assert "image_embedder" not in index
    names = {path.name for path in redux.iterdir()}
    assert names == {*FAMILY.spec.parts, *FAMILY.spec.extra_parts, "model_index.json"}


def test_the_parts_of_redux_come_together(redux, tmp_path):
    """Those of a base with an embedder are taken, the encoder is missed; another model's encoder
    alone is left where it is."""
    folder = tmp_path / "base"
    shutil.copytree(redux, folder)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert {*choose_files(names, FAMILY.spec, "base")} == {*names}
    without = [name for name in names if not name.startswith("image_encoder")]
    with pytest.raises(PipelineError, match="the part image_encoder is missing"):
        choose_files(without, FAMILY.spec, "base")
    without = [name for name in names if not name.startswith("image_embedder")]
    chosen = choose_files(without, FAMILY.spec, "base")
    assert not [name for name in chosen if name.startswith("image_")]


def test_exported_weights_load_in_diffusers_and_sample(redux, tmp_path):
    """The image's encoders lie in the folder as well; its LoRA counts."""
    export = Export(tmp_path, tmp_path / "base")
    with artifact.publish(export.base, "base") as draft:
        shutil.copytree(redux, draft.folder, dirs_exist_ok=True)
        draft.content = {"family": "flux", "base": "nano", "commit": None, "parts": {}}
    export.settings = {"family": "flux", "lora": {"rank": 4, "target_modules": ["to_q"]}}
    image, folder = make_pictures(16, 1)[0], export.export()
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.load_lora_weights(folder)
    embeds = embeds_of(folder, image)
    made = pipeline(
        height=16, width=16, num_inference_steps=2, generator=torch.Generator().manual_seed(7),
        **embeds,
    ).images[0]  # fmt: skip
    assert made.tobytes() == drawn(folder, image) != drawn(redux, image)
