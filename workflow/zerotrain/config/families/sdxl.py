"""Stable Diffusion XL."""

from zerotrain.config.families import LOSS, FamilySpec, Titles

_TEXT = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
SPEC = FamilySpec(
    name="sdxl",
    example="stabilityai/stable-diffusion-xl-base-1.0",
    trained_part="unet",
    parts=("scheduler", *_TEXT, "unet", "vae"),
    classes={
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "unet": "UNet2DConditionModel",
        "vae": "AutoencoderKL",
    },
    # model_index.json decides how the empty prompt is encoded.
    text_parts=("model_index.json", *_TEXT),
    pipeline="StableDiffusionXLPipeline",
    objective=("snr_gamma", "noise_offset", *LOSS),
    chunks=True,
    clip_tokens=True,
    text_width="cross_attention_dim",
    noise_schedule=True,
    # Its pipeline would add an invisible watermark.
    loading={"add_watermarker": False},
    titles=Titles(
        "stable-diffusion-xl-v1-base",
        "https://github.com/Stability-AI/generative-models",
        "sdxl_base_v1-0",
        "networks.lora",
    ),
)
