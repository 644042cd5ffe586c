"""Qwen-Image with conditioning images, against the pipelines of editing of diffusers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit_module
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus_module
from PIL import Image
from tests.builders.images import CAPTIONS, build_nano, draw_of, make_pictures
from tests.families.promises import (
    LORA,
    TARGETS,
    assert_same_call,
    changed,
    first_call,
    predicted_call,
)

from zerotrain.cache.reader import stacked
from zerotrain.config.models import EvaluateConfig
from zerotrain.config.training import TrainConfig
from zerotrain.data.buckets import to_pixels
from zerotrain.errors import PipelineError
from zerotrain.models.families.autoencoders import pixels_of
from zerotrain.models.families.lora import add_adapter
from zerotrain.models.families.nano import build_pipeline
from zerotrain.models.families.patches import pack, unpack
from zerotrain.models.families.qwen_image import FAMILY
from zerotrain.models.families.qwen_image_encoding import (
    EDIT,
    EDIT_PLUS,
    PLAIN,
    add_token_types,
    load_processor,
    to_images,
)

SIDE = 32
"""Pixels; the pipelines of editing scale to multiples of it."""
PROMPT = "a red house"
CLASSES = {EDIT: QwenImageEditPipeline, EDIT_PLUS: QwenImageEditPlusPipeline}


@pytest.fixture(scope="module")
def edit_plus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano model whose text encoder sees images; its autoencoder is fitted for a step."""
    folder = tmp_path_factory.mktemp("edit") / "base"
    return build_nano("qwen_image", folder, side=SIDE, steps=1, pipeline=EDIT_PLUS)


@pytest.fixture(scope="module")
def bases(edit_plus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same parts as a base of each kind."""
    place = tmp_path_factory.mktemp("bases")
    found = {
        name: changed(edit_plus, place / name, "model_index.json", _class_name=name)
        for name in (EDIT, PLAIN)
    }
    late = changed(edit_plus, place / "2511", "transformer/config.json", zero_cond_t=True)
    return {**found, EDIT_PLUS: edit_plus, "2511": late}


@pytest.fixture(autouse=True)
def _small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipelines scale images to 32 instead of 1024 pixels."""
    own = edit_module.calculate_dimensions
    monkeypatch.setattr(
        edit_module, "calculate_dimensions", lambda area, ratio: own(SIDE**2, ratio)
    )
    monkeypatch.setattr(edit_plus_module, "VAE_IMAGE_SIZE", SIDE**2)


def pipeline_of(base: Path, kind: str) -> Any:
    """The pipeline as a user with torchvision and a corrected diffusers has it."""
    pipeline = CLASSES[kind].from_pretrained(base, **load_processor(kind, base))
    add_token_types(pipeline.text_encoder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def count_of(kind: str) -> int:
    """Conditioning images of a test of this kind of base."""
    return 1 if kind == EDIT else 2


def draw(
    pipeline: Any,
    images: list[Image.Image],
    scale: float = 3.0,
    size: tuple[int, int] = (SIDE, SIDE),
    **given: Any,
) -> bytes:
    """Pixels of the image that a user's own call draws, of seed 7."""
    pixels: bytes = (
        pipeline(
            image=images[0] if isinstance(pipeline, QwenImageEditPipeline) else images,
            width=size[0],
            height=size[1],
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(7),
            true_cfg_scale=scale,
            **given,
        )
        .images[0]
        .tobytes()
    )
    return pixels


def sample(base: Path, images: list[Image.Image], **changes: object) -> bytes:
    """Pixels of the image that the family draws, of seed 7."""
    config = EvaluateConfig.model_validate({"num_inference_steps": 2, **changes})
    [made] = draw_of(
        FAMILY, base, [PROMPT], [7], config, resolution=SIDE, device="cpu", conditioning=[images]
    )
    pixels: bytes = made.tobytes()
    return pixels


def share_apart(one: bytes, other: bytes) -> float:
    """The share of an image's values in which another differs."""
    return float(np.mean(np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8)))


def batch_of(base: Path, prompts: list[str], images: int) -> dict[str, torch.Tensor]:
    """Samples as the cache would give them, of random pixels."""
    encoders = FAMILY.load_encoders(base, "cpu")
    seeded = torch.Generator().manual_seed(3)
    shape = (len(prompts), 1 + images, 3, SIDE, SIDE)
    pixels = torch.randint(0, 256, shape, generator=seeded) / 127.5 - 1
    latents = encoders.encode_images(pixels[:, 0])
    conditioning = encoders.encode_conditioning(pixels[:, 1:])["conditioning_latents"]
    together = None if FAMILY.pipeline_name(base) == PLAIN else pixels[:, 1:]
    text = encoders.encode_prompts(prompts, together)["prompt_embeds"]
    return stacked(
        [
            {
                "latents": latents[row],
                "conditioning_latents": conditioning[row],
                "prompt_embeds": text[row],
                "noise": torch.randn(latents.shape[1:], generator=seeded),
                "uniform": torch.tensor((row + 0.5) / len(prompts), dtype=torch.float64),
            }
            for row in range(len(prompts))
        ],
        torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *((kind, (SIDE, SIDE)) for kind in (EDIT, EDIT_PLUS, "2511")),
        (EDIT_PLUS, (2 * SIDE, SIDE)),
    ],
)
def test_the_model_is_called_as_the_pipeline_calls_it(bases, kind, size, monkeypatch):
    """Embeddings, latents, shapes and the velocity of the first step, to 1e-6."""
    width, height = size
    monkeypatch.setattr(edit_plus_module, "VAE_IMAGE_SIZE", width * height)
    base = bases[kind]
    images = [image.resize(size) for image in make_pictures(SIDE, count_of(kind))]
    pipeline = pipeline_of(base, EDIT if kind == EDIT else EDIT_PLUS)
    expected, answer = first_call(
        pipeline.transformer, lambda: draw(pipeline, images, 1.0, size, prompt=PROMPT)
    )
    encoders = FAMILY.load_encoders(base, "cpu")
    pixels = pixels_of(images)[None]
    batch = stacked(
        [
            {
                "conditioning_latents": encoders.encode_conditioning(pixels)[
                    "conditioning_latents"
                ][0],
                "prompt_embeds": encoders.encode_prompts([PROMPT], pixels)["prompt_embeds"][0],
            }
        ],
        torch.device("cpu"),
    )
    tokens = width * height // 64
    shape = torch.Size([1, 4, height // 4, width // 4])
    noisy = unpack(expected["hidden_states"][:, :tokens], shape)
    found, velocity = predicted_call(
        FAMILY, base, pipeline.transformer, noisy, 1000 * expected["timestep"], batch
    )
    assert found["hidden_states"].shape[1] == (1 + len(images)) * tokens
    assert_same_call(found, expected)
    torch.testing.assert_close(velocity, answer[:, :tokens], rtol=1e-6, atol=1e-6)


def test_the_timestep_of_conditioning_images_is_the_models_own(bases):
    """zero_cond_t of the transformer's configuration (Edit-2511) changes the velocity."""
    batch = batch_of(bases["2511"], [PROMPT], 2)
    velocities = [
        FAMILY.objective(bases[kind]).predict(
            FAMILY.load_model(bases[kind]).eval(), batch["noise"], torch.tensor([500.0]), batch
        )
        for kind in ("2511", EDIT_PLUS)
    ]
    assert (velocities[0] - velocities[1]).abs().max() > 1e-4


def test_a_plain_base_reads_conditioning_images_after_its_own(bases):
    """In the order of DiffSynth-Studio's context: patches and shapes of the image, then theirs."""
    batch = batch_of(bases[PLAIN], [PROMPT, "boat"], 2)
    model = FAMILY.load_model(bases[PLAIN]).eval()
    first, second = batch["conditioning_latents"].unbind(1)
    shape = (1, SIDE // 8, SIDE // 8)
    with torch.inference_mode():
        expected = model(
            hidden_states=torch.cat([pack(batch["noise"]), pack(first), pack(second)], dim=1),
            timestep=torch.full((2,), 0.5),
            encoder_hidden_states=batch["prompt_embeds"],
            encoder_hidden_states_mask=batch["prompt_embeds_mask"],
            img_shapes=[[shape, shape, shape]] * 2,
        ).sample[:, : (SIDE // 8) ** 2]
        found = FAMILY.objective(bases[PLAIN]).predict(
            model, batch["noise"], torch.full((2,), 500.0), batch
        )
    torch.testing.assert_close(pack(found), expected, rtol=1e-6, atol=1e-6)


def test_the_loss_is_over_the_image_alone(bases):
    """Conditioning latents have a gradient, and no part in the target."""
    base = bases[EDIT_PLUS]
    batch = batch_of(base, [PROMPT, "boat"], 2)
    batch["conditioning_latents"].requires_grad_()
    model = FAMILY.load_model(base)
    objective = FAMILY.objective(base)
    losses = objective.loss(model, batch)
    losses.sum().backward()
    gradient = batch["conditioning_latents"].grad
    assert gradient is not None
    assert all(one.abs().max() > 1e-8 for one in gradient.flatten(0, 1))
    sigmas = objective.sigmas(batch["uniform"], batch["latents"])
    share = sigmas.view(-1, 1, 1, 1)
    noisy = (1 - share) * batch["latents"] + share * batch["noise"]
    velocity = objective.predict(model, noisy, 1000 * sigmas, batch)
    assert velocity.shape == batch["latents"].shape
    error = (velocity - (batch["noise"] - batch["latents"])).square().flatten(1).mean(1)
    torch.testing.assert_close(losses, error)


@pytest.mark.parametrize(("kind", "scale"), [(EDIT, 3.0), (EDIT_PLUS, 1.0)])
def test_samples_are_the_pipelines_own(bases, kind, scale):
    """Guided by the empty prompt with the same images, and without guidance.

    The prompt is padded here, which rounds otherwise on some processors: one value of 3,072 was the
    next one there. Other conditioning images change more than 40 in these small models.
    """
    images = make_pictures(SIDE, count_of(kind))
    negative = {"negative_prompt": ""} if scale > 1 else {}
    expected = draw(pipeline_of(bases[kind], kind), images, scale, prompt=PROMPT, **negative)
    assert share_apart(sample(bases[kind], images, guidance_scale=scale), expected) <= 0.001
    others = make_pictures(SIDE, 4)[-len(images) :]
    assert share_apart(sample(bases[kind], others, guidance_scale=scale), expected) > 0.01


def test_samples_in_context_are_those_of_the_loop_of_editing(bases):
    """A plain base encodes the prompt alone; the loop reads the images' latents."""
    base, images = bases[PLAIN], make_pictures(SIDE, 2)
    plain = FAMILY.load_pipeline(base, "cpu")
    parts = {name: part for name, part in plain.components.items()}
    editing = QwenImageEditPlusPipeline(**parts, processor=None)
    editing.set_progress_bar_config(disable=True)
    given = {
        f"{name}prompt_embeds": plain.encode_prompt(prompt)[0]
        for name, prompt in (("", PROMPT), ("negative_", ""))
    }
    assert sample(base, images, guidance_scale=3.0) == draw(editing, images, **given)


@pytest.mark.parametrize("kind", [EDIT_PLUS, PLAIN])
def test_prompts_of_different_lengths_are_masked(bases, kind):
    """Each is encoded alone; without a mask the pipeline would warn, and read what fills them."""
    base, prompts = bases[kind], [PROMPT, "boat"]
    pixels = torch.stack([pixels_of(make_pictures(SIDE, 2))] * 2)
    pipeline = FAMILY.conditioned_pipeline(FAMILY.load_pipeline(base, "cpu"))
    found = FAMILY.conditioned_arguments(
        pipeline, prompts, pixels, negative="", max_sequence_length=None
    )
    seen = (pixels,) if kind == EDIT_PLUS else ()
    expected = FAMILY.load_encoders(base, "cpu").encode_prompts(prompts, *seen)["prompt_embeds"]
    assert found["prompt_embeds_mask"].sum(1).tolist() == [len(one) for one in expected]
    for one, row in zip(expected, found["prompt_embeds"], strict=True):
        assert torch.equal(row[: len(one)], one)
        assert not row[len(one) :].any()
    assert found["negative_prompt_embeds_mask"].bool().all()


@pytest.mark.parametrize("kind", [EDIT_PLUS, PLAIN])
def test_latents_while_training_are_those_that_are_decoded_after_it(bases, kind):
    """`sample_latents` of encoded images and prompts: the pixels of `sample`, to one of 255."""
    base, images = bases[kind], make_pictures(SIDE, 2)
    encoders = FAMILY.load_encoders(base, "cpu")
    pixels = pixels_of(images)[None]
    seen = () if kind == PLAIN else (pixels,)
    embeds, empty = (
        {"prompt_embeds": torch.stack(encoders.encode_prompts([prompt], *seen)["prompt_embeds"])}
        for prompt in (PROMPT, "")
    )
    config = EvaluateConfig(num_inference_steps=2, guidance_scale=3.0)
    shape = (4, SIDE // 4, SIDE // 4)
    model = FAMILY.load_model(base).eval()
    pipeline = FAMILY.live_pipeline(base, model, SIDE, shape, config, conditioned=True)
    with torch.inference_mode():
        latents = FAMILY.sample_latents(
            pipeline, embeds, empty, 7, config, resolution=SIDE, shape=shape,
            conditioning=encoders.encode_conditioning(pixels),
        )  # fmt: skip
    [made] = FAMILY.decode_latents(base, latents[None], "cpu")
    expected = np.frombuffer(sample(base, images, guidance_scale=3.0), dtype=np.uint8)
    assert np.abs(np.asarray(made).astype(int).ravel() - expected).max() <= 1


def test_image_tokens_have_positions_in_rows_and_columns(bases):
    """Two images of 4 x 4 tokens; the caption's positions follow the larger of their sides."""
    encoders = FAMILY.load_encoders(bases[EDIT_PLUS], "cpu")
    seen: list[torch.Tensor] = []
    encoders.pipeline.text_encoder.model.language_model.register_forward_pre_hook(
        lambda _, __, named: seen.append(named["position_ids"]), with_kwargs=True
    )
    tokens: list[torch.Tensor] = []
    encoders.pipeline.text_encoder.register_forward_pre_hook(
        lambda _, __, named: tokens.append(named["input_ids"][0]), with_kwargs=True
    )
    encoders.encode_prompts([PROMPT], pixels_of(make_pictures(SIDE, 2))[None])
    pad = encoders.pipeline.text_encoder.config.image_token_id
    first = int((tokens[0] == pad).int().argmax())
    positions = seen[0][-3:, 0, first : first + 17] - first
    sides = torch.arange(16)
    expected = torch.stack([torch.zeros(16, dtype=torch.long), sides // 4, sides % 4])
    assert torch.equal(positions[:, :16], expected)
    assert positions[:, 16].tolist() == [4, 4, 4]
    assert int((tokens[0] == pad).sum()) == 32


def test_a_longer_caption_is_cut_and_no_image(bases):
    """cache.max_sequence_length counts the text's tokens; without it nothing is cut."""
    pixels = pixels_of(make_pictures(SIDE, 1))[None]
    base = bases[EDIT]
    [whole] = FAMILY.load_encoders(base, "cpu").encode_prompts([PROMPT], pixels)["prompt_embeds"]
    [cut] = FAMILY.load_encoders(base, "cpu", 4).encode_prompts([PROMPT], pixels)["prompt_embeds"]
    # 16 tokens of the image between two others, then four of the text.
    assert len(cut) == 22
    assert torch.equal(cut, whole[:22])
    assert len(whole) > 22
    long = " ".join(["house"] * 2000)
    assert FAMILY.caption_limits(base, [long]) == []
    [limit] = FAMILY.caption_limits(base, [PROMPT], 4)
    assert (limit.limit, limit.counts) == (4, (len(whole) - 18,))


def test_a_base_for_editing_needs_its_processor(bases, tmp_path):
    folder = changed(bases[EDIT_PLUS], tmp_path / "base", "model_index.json")
    shutil.rmtree(folder / "processor")
    with pytest.raises(PipelineError, match="QwenImageEditPlusPipeline needs the part processor"):
        FAMILY.load_encoders(folder, "cpu")


def test_pixels_become_the_images_that_they_were():
    """Every value of 8 bits."""
    values = np.arange(256 * 3, dtype=np.int64).reshape(16, 16, 3) % 256
    image = Image.fromarray(values.astype(np.uint8))
    [found] = to_images(torch.from_numpy(to_pixels(image))[None])
    assert found.tobytes() == image.tobytes()


def test_the_nano_of_one_image_drops_what_precedes_it(tmp_path):
    """Built for QwenImageEditPipeline, whose template has the image before the prompt."""
    build_pipeline(FAMILY, CAPTIONS, make_pictures(SIDE), 0, tmp_path, pipeline=EDIT, identity=True)
    pipeline = pipeline_of(tmp_path, EDIT)
    tokens = pipeline.tokenizer(pipeline.prompt_template_encode.format(PROMPT)).input_ids
    rest = pipeline.tokenizer.decode(tokens[pipeline.prompt_template_encode_start_idx :])
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert rest == f"{image}{PROMPT}<|im_end|>\n<|im_start|>assistant\n"


def test_a_copy_is_learned(bases):
    """The image is the conditioning image, which varies: the loss of a LoRA falls."""
    base = bases[EDIT_PLUS]
    batch = batch_of(base, [PROMPT, "boat"], 1)
    batch["latents"] = batch["conditioning_latents"][:, 0].clone()
    model = FAMILY.load_model(base)
    add_adapter(model, seed=0, target_modules=TARGETS, **LORA)
    objective = FAMILY.objective(base, TrainConfig().objective("qwen_image"))
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = objective.loss(model, batch).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0], losses
