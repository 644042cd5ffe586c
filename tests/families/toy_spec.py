"""Stable Diffusion 1."""

from zerotrain.config.families import FamilySpec

SPEC = FamilySpec(
    name="toy",
    example="stable-diffusion-v1-5/stable-diffusion-v1-5",
    trained_part="unet",
    parts=("scheduler", "text_encoder", "tokenizer", "unet", "vae"),
    classes={
        "text_encoder": "CLIPTextModel",
        "unet": "UNet2DConditionModel",
        "vae": "AutoencoderKL",
    },
    text_parts=("text_encoder", "tokenizer"),
    pipeline="StableDiffusionPipeline",
    clip_tokens=True,
    text_width="cross_attention_dim",
    loading={"safety_checker": None, "feature_extractor": None},
)
