"""Stable Diffusion 3 and 3.5."""

from zerotrain.config.families import FLOW_MATCHING, FamilySpec, Prompt, Titles

_CLIP = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
_T5 = ("text_encoder_3", "tokenizer_3")
SPEC = FamilySpec(
    name="sd3",
    example="stabilityai/stable-diffusion-3-medium-diffusers",
    parts=("scheduler", *_CLIP, *_T5, "transformer", "vae"),
    classes={
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
        "transformer": "SD3Transformer2DModel",
        "vae": "AutoencoderKL",
    },
    optional_parts=_T5,
    text_parts=(*_CLIP[:2], _T5[0], *_CLIP[2:], _T5[1]),
    pipeline="StableDiffusion3Pipeline",
    objective=(*FLOW_MATCHING, "precondition_outputs"),
    weighting_scheme="logit_normal",
    clip_tokens=True,
    prompt=Prompt("tokenizer_3", 256, 512),
    token_routing=True,
    sized_presets=True,
    titles=Titles(
        "stable-diffusion-3-medium",
        "https://github.com/Stability-AI/sd3.5",
        "sd3",
        "networks.lora_sd3",
        {
            "dual_attention_layers": "stable-diffusion-3-5-medium",
            "qk_norm": "stable-diffusion-3-5-large",
        },
    ),
)
